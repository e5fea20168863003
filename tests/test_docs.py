"""Run the code of the pages and the examples in docstrings, and check links, names and lengths of pages."""

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest

import gdn
from gdn.integrations import transformers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAB = ROOT / "docs" / "lab"
# files that pages name but this repository does not have: FLA's tests, and an imagined backend
FOREIGN = {
    "tests/ops/test_gdn.py", "tests/layers/test_gated_deltanet.py",
    "tests/models/test_modeling_gated_deltanet.py", "src/gdn/backends/xpu/__init__.py", "xpu/rule.py",
    "fla/ops/gated_delta_rule/backends/gdn.py",
}  # fmt: skip
MODULES = [m.name for m in pkgutil.walk_packages(gdn.__path__, "gdn.") if "__main__" not in m.name]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page):
    """The blocks of a page run as one session: each block sees the names of those above it."""
    pytest.importorskip("transformers")
    assert not transformers._active
    session: dict[str, object] = {}
    try:
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), session)
    finally:
        # a page may patch Transformers and not undo it
        for patch in list(transformers._active):
            patch.undo()


def test_each_block_about_transformers_runs_alone():
    """A reader may paste the block of a heading without those above it."""
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


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge generates from a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that do not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def missing_files(page: Path) -> list[str]:
    """Return the files that a page names in backticks, with a folder, and that do not exist."""
    text = re.sub(r"^```.*?^```|^    .*?$", "", page.read_text(), flags=re.S | re.M)
    package = ROOT / "src" / "gdn"
    backends = package / "backends"
    roots = (ROOT, package, backends, *backends.glob("*/"))
    named = re.findall(r"`([\w.*-]+/[\w./*-]+\.(?:py|md|json|jsonl|svg))`", text)
    return [name for name in named if name not in FOREIGN and not any(any(r.glob(name)) for r in roots)]


def test_links_lead_somewhere():
    others = [ROOT / f"{name}.md" for name in ("CONTRIBUTING", "NOTES", "CHANGELOG", "SECURITY")]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *(x for x in others if x.exists())]
    assert len(pages) > 50
    assert [link for page in pages for link in broken_links(page)] == []


def test_files_that_pages_name_exist():
    """Pages name files that exist. Entries of the lab keep the names of their day."""
    others = (ROOT / "CONTRIBUTING.md", ROOT / "NOTES.md")
    pages = [page for page in (*PAGES, *others) if LAB not in page.parents]
    assert {page.name: missing for page in pages if (missing := missing_files(page))} == {}


def test_a_missing_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    page = tmp_path / "page.md"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "is.py").touch()
    page.write_text(
        "`src/is.py` `src/no.py` `src/*.py` `src/n*.py` `xpu/rule.py` `no.py` and\n\n    `src/indented.py`\n"
    )
    assert missing_files(page) == ["src/no.py", "src/n*.py"]


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# One: a `Head`\n[a](page.md#one-a-head) [b](#one-a-head) [c](#two) [d](no.md) [e](https://x.y/)"
    )
    assert broken_links(page) == ["page.md: #two", "page.md: no.md"]


def lab_entries() -> list[Path]:
    """Return the paths of the lab's entries."""
    return [path for path in sorted(LAB.glob("*.md")) if path.name != "README.md"]


@pytest.mark.parametrize("entry", lab_entries(), ids=lambda path: path.stem)
def test_a_lab_entry_has_its_heads(entry: Path):
    assert re.fullmatch(r"\d{4}-\d\d-\d\d(-[a-z0-9]+)+\.md", entry.name)
    heads = re.findall(r"^## (.*)$", entry.read_text(), re.M)
    assert heads == ["Tried", "Why", "Result", "Verdict"]


def test_the_lab_lists_each_entry_once():
    listed = re.findall(r"^- \[[^]]*\]\(([^)]+)\): \S", (LAB / "README.md").read_text(), re.M)
    assert sorted(listed) == [path.name for path in lab_entries()]


def test_notes_and_design_pages_stay_short():
    assert len((ROOT / "NOTES.md").read_text().splitlines()) <= 80
    for page in (ROOT / "docs" / "design").glob("*.md"):
        assert len(page.read_text().splitlines()) <= 220, page.name


def test_the_matrix_of_versions_is_whole():
    """docs/install.md has a row for each GPU and each Triton of the compile tests, and for each Python."""
    page = (ROOT / "docs" / "install.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    targets = re.findall(
        r'GPUTarget\("\w+", "?(\w+)"?', (ROOT / "tests" / "kit" / "compiling.py").read_text()
    )
    tritons = re.search(r"OTHER_TRITONS := (.*)", (ROOT / "Makefile").read_text())[1].split()
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert len(targets) == 5 and tritons and len(pythons) == 4
    names = [name if name.startswith("gfx") else f"sm_{name}" for name in targets]
    for name in (*names, *tritons, *(f"{version}." for version in pythons)):
        assert any(name in row for row in rows), name


@pytest.mark.parametrize("name", ["transformers", "fla"])
def test_tests_that_a_page_says_were_run_are_recorded(name):
    """Each row of a date and a GPU that counts the tests of files agrees with rows of the results."""
    results = [*(ROOT / "benchmarks" / "results" / "tests").glob("*.jsonl")]
    recorded = [json.loads(line) for path in results for line in path.read_text().splitlines()]
    rows = re.findall(
        r"^\| (20[-0-9]+) \| (.*) \| (.*) \|$", (ROOT / "docs" / f"{name}.md").read_text(), re.M
    )
    num_files = 0
    for date, what, where in rows:
        for file, counts in re.findall(r"`(tests/[\w/]+\.py)`: ((?:\d+ \w+(?:, )?)+)", what):
            stated = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", counts)}
            same = [row for row in recorded if row["date"] == date and where in row["gpu"]]
            of_file = [row["files"].get(file, {}) for row in same if "files" in row]
            of_file += [row["counts"]["with"] for row in same if row.get("file") == file]
            assert any(stated.items() <= one.items() for one in of_file), (date, file, stated, of_file)
            num_files += 1
    assert num_files >= 5


def test_every_public_name_is_documented():
    readme = (ROOT / "README.md").read_text()
    for name in gdn.__all__:
        assert getattr(gdn, name).__doc__, name
        if not name.endswith(("_gdn", "Cache")):
            assert name in readme, name
