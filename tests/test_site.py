"""Test the conversion of docstrings, scripts and links to pages, and that the reference is complete."""

import re
import sys
from pathlib import Path

import pytest

import gdn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
import pages  # noqa: E402

DOCSTRING = """Add x * y.

    z = x + y

Args:   shape   dtype
    x   [B]     fp32
                more

Returns: z, where
    it is.
Cost:   <1 flop.
On `a * b` nothing
more.

Example:
    >>> 1
    1"""
PAGE = """Add x \\* y.

```text
z = x + y
```

**Arguments**

|  | shape | dtype |
|---|---|---|
| `x` | \\[B\\] | fp32 more |

**Returns:** z, where it is.

**Cost:** &lt;1 flop.

On `a * b` nothing more.

**Example**

```pycon
>>> 1
1
```"""


def test_a_docstring_becomes_markdown():
    assert pages.docstring_to_markdown(DOCSTRING) == PAGE


COLUMNS = """Args:     shape    dtype
    q, k  [B, T]   any
    a_long_name  int  or None
    x     [N] or N fp32,
                   fp64
    y, with, many, names,
    z     [N]      any"""
TABLE = """|  | shape | dtype |
|---|---|---|
| `q, k` | \\[B, T\\] | any |
| `a_long_name` | int | or None |
| `x` | \\[N\\] or N | fp32, fp64 |
| `y, with, many, names, z` | \\[N\\] | any |"""


def test_a_group_of_arguments_with_a_head_of_words_becomes_a_table():
    made = pages.docstring_to_markdown("Where to read:\n    state  [slots]  fp32\n    index  [B]      int")
    assert made.startswith("**Where to read**\n\n| ") and "| `index` | \\[B\\] | int |" in made
    # a sentence with a colon is not a table
    assert pages.docstring_to_markdown("Two rows must differ: one writes.").startswith("Two rows")


def test_columns_become_a_table():
    """The lines of a row are joined, and a name may be longer than its column."""
    made = pages.docstring_to_markdown(COLUMNS.replace("a_long_name  int  or", "a_long_name int or"))
    assert made.startswith("**Arguments**\n\n```text\n")
    # the second cell begins at its column
    fits = COLUMNS.replace("    a_long_name  int  or None", "    a_long  int    or None")
    assert pages.docstring_to_markdown(fits) == "**Arguments**\n\n" + TABLE.replace("a_long_name", "a_long")
    bare = "Returns:\n    o   [B]  x | y\n    S   [N]"
    assert pages.docstring_to_markdown(bare).splitlines()[2:] == [
        "|  |  |  |",
        "|---|---|---|",
        "| `o` | \\[B\\] | x \\| y |",
        "| `S` | \\[N\\] |  |",
    ]


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
    aliases = {"chunk_gdn", "chunk_kda", "fused_recurrent_gdn", "fused_recurrent_kda"}
    assert set(gdn.__all__) - aliases <= found


def test_every_page_is_in_the_navigation():
    """mkdocs.yml names each page of docs/; the hook adds the lab's entries."""
    config = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w/-]+\.md)$", config, re.M))
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").as_posix()
        assert name in named or name.startswith("lab/"), name
    assert set(pages.PAGES.values()) | set(pages.SCRIPTS.values()) <= named
