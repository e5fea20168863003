"""What a user reads runs: the Python of the pages, and the examples in docstrings."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import gdn
from gdn.integrations import transformers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(gdn.__path__, "gdn.") if "__main__" not in m.name]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page):
    """A page is one session: each block sees the names of those above it."""
    pytest.importorskip("transformers")
    assert not transformers._active
    session: dict[str, object] = {}
    try:
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), session)
    finally:
        # a page may patch Transformers and leave it so
        for patch in list(transformers._active):
            patch.undo()


def test_each_block_about_transformers_runs_alone():
    """A reader pastes the block of a heading without those above it."""
    pytest.importorskip("transformers")
    for block in blocks(ROOT / "docs" / "transformers.md"):
        assert "..." not in re.sub("#.*", "", block)
        try:
            exec(compile(block, "transformers.md", "exec"), {})
        finally:
            for patch in list(transformers._active):
                patch.undo()


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_matrix_of_versions_is_whole():
    """docs/install.md has a row for each GPU and Triton of the compile tests, and for each Python."""
    page = (ROOT / "docs" / "install.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    targets = re.findall(r'GPUTarget\("\w+", "?(\w+)"?', (ROOT / "tests" / "compiling.py").read_text())
    tritons = re.search(r"OTHER_TRITONS := (.*)", (ROOT / "Makefile").read_text())[1].split()
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert len(targets) == 5 and tritons and len(pythons) == 4
    names = [name if name.startswith("gfx") else f"sm_{name}" for name in targets]
    for name in (*names, *tritons, *(f"{version}." for version in pythons)):
        assert any(name in row for row in rows), name


def test_every_public_name_is_documented():
    readme = (ROOT / "README.md").read_text()
    for name in gdn.__all__:
        assert getattr(gdn, name).__doc__, name
        if not name.endswith(("_gdn", "Cache")):
            assert name in readme, name
