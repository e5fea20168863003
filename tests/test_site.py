"""Test the conversion of docstrings, scripts and links to pages, and that the reference is complete."""

import re
import sys
from pathlib import Path

import pytest

import gdn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
import pages  # noqa: E402


def test_a_docstring_becomes_markdown():
    text = (
        "Add x * y.\n\n    z = x + y\n\nArgs:   shape   dtype\n    x   [B]     fp32\n            more\n\n"
        "Returns: z, where\n    it is.\nCost:   <1 flop.\nOn `a * b` nothing\nmore.\n\n"
        "Example:\n    >>> 1\n    1"
    )
    assert pages.docstring_to_markdown(text) == (
        "Add x \\* y.\n\n```text\nz = x + y\n```\n\n**Arguments**\n\n```text\n    shape   dtype\n"
        "x   [B]     fp32\n        more\n```\n\n**Returns:** z, where it is.\n\n**Cost:** &lt;1 flop.\n\n"
        "On `a * b` nothing more.\n\n**Example**\n\n```pycon\n>>> 1\n1\n```"
    )


def test_columns_stay_under_their_heads():
    text = "Args:          shape\n    q, k       [B]\n    v          [C]"
    lines = pages.docstring_to_markdown(text).splitlines()[3:6]
    assert lines == ["           shape", "q, k       [B]", "v          [C]"]


def test_a_script_becomes_a_page():
    text = '"""Title.\n\nAbout.\n"""\n\n# %% ## Head\n#\n# Words\n# here.\n\nx = 1  # why\n\n# %% End.\n'
    assert pages.script_to_markdown(text) == (
        "# Title\n\nAbout.\n\n## Head\n\nWords\nhere.\n\n```python\nx = 1  # why\n```\n\nEnd.\n"
    )


@pytest.mark.parametrize(
    "link, source, target, made",
    [
        ("[a](docs/fla.md#x)", "README.md", "index.md", "[a](fla.md#x)"),
        ("[a](CHANGELOG.md)", "README.md", "index.md", "[a](changelog.md)"),
        ("[a](CITATION.cff)", "README.md", "index.md", "a (`CITATION.cff`)"),
        ("[a](../../README.md)", "docs/design/x.md", "design/x.md", "[a](../index.md)"),
        ("[a](../src/gdn/settings.py)", "docs/x.md", "x.md", "a (`src/gdn/settings.py`)"),
        ("![a [b]](docs/results/p.svg)", "README.md", "index.md", "![a [b]](results/p.svg)"),
        ("[a](docs/tutorials/packed.py)", "README.md", "index.md", "[a](tutorials/packed.md)"),
        ("[a](no/such.file)", "README.md", "index.md", "[a](no/such.file)"),
        ("[a](#here) [b](https://x.y/z)", "README.md", "index.md", "[a](#here) [b](https://x.y/z)"),
        ("```\n[a](CITATION.cff)\n```", "README.md", "index.md", "```\n[a](CITATION.cff)\n```"),
    ],
)
def test_links_hold_on_the_site(link, source, target, made):
    assert pages.relink(link, source, target, ROOT) == made


def test_the_reference_has_every_public_name():
    found = {
        name.rpartition(".")[2]
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (gdn\.\S+)", page.read_text(), re.M)
    }
    aliases = {"chunk_gdn", "fused_recurrent_gdn"}
    assert set(gdn.__all__) - aliases <= found


def test_every_page_is_in_the_navigation():
    """Name each page of docs/ in mkdocs.yml; the lab's entries are added by the hook."""
    config = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w/-]+\.md)$", config, re.M)) | {"hopper.md"}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").as_posix()
        assert name in named or name.startswith("lab/"), name
    assert set(pages.PAGES.values()) | set(pages.SCRIPTS.values()) <= named
