"""Check the files that a forge and tools read: citation, templates, workflow, hooks."""

import ast
import re
from pathlib import Path

import pytest

import gdn

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
FORGE = ROOT / ".github"


def load(path):
    return yaml.safe_load(path.read_text())


def test_the_citation_has_the_version_of_the_package():
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == gdn.__version__ and citation["license"] == "MIT"
    assert citation["authors"] == [{"name": "The gdn authors"}] and "http" not in str(citation)


@pytest.mark.parametrize("name", ["bug", "performance", "question"])
def test_an_issue_template_is_a_form(name):
    form = load(FORGE / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert form["name"] and form["description"] and form["body"]
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in form["body"])


def test_the_workflow_calls_the_scripts_of_this_repository():
    """The workflow runs .ci/run on one Python, and .ci/quick on all others that pyproject.toml names."""
    jobs = load(FORGE / "workflows" / "ci.yml")["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for script in ("run", "quick"):
        path = ROOT / ".ci" / script
        assert any(f".ci/{script}" in command for command in commands)
        assert path.stat().st_mode & 0o100 and path.read_text().startswith("#!")
    (version,) = (
        step["with"]["python-version"]
        for step in jobs["run"]["steps"]
        if "setup-python" in step.get("uses", "")
    )
    named = set(re.findall(r"Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    assert {version, *jobs["quick"]["strategy"]["matrix"]["python"]} == named
    torch = re.search(r"TORCH \?= (torch==\S+)", (ROOT / "Makefile").read_text())[1]
    assert any(torch in command for command in commands)


def source_of(node, text):
    """Return the lines of a node: `ast.get_source_segment` would divide the whole text anew for each."""
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def test_the_oldest_torch_runs_every_test_that_compiles_a_model():
    """`make test-oldest` takes the version of pyproject.toml, and selects tests by their names."""
    makefile = (ROOT / "Makefile").read_text()
    version = re.search(r"OLDEST_TORCH \?= (\d+\.\d+)\.0\n", makefile)[1]
    assert f'"torch>={version}"' in (ROOT / "pyproject.toml").read_text()
    words = re.search(r'-k "\((.*?)\)', makefile)[1].split(" or ")
    texts = {path: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    for path, text in texts.items():
        for node in ast.parse(text).body if "torch.compile(" in text else ():
            if isinstance(node, ast.FunctionDef) and "torch.compile(" in source_of(node, text):
                is_helper = not node.name.startswith("test_")
                assert is_helper or any(word in node.name for word in words), f"{path.name}: {node.name}"


def test_one_file_has_the_tests_that_compile():
    """`make compile` collects this file alone: the imports of all others take longer than many kernels."""
    mark = "pytest.mark." + "compile"
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()] == [
        "test_compile.py"
    ]


def test_the_hooks_check_what_make_checks():
    """The commands of the hooks are those of make. The paths that mypy checks are in pyproject.toml."""
    (local,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    entries = {hook["id"]: hook["entry"].split() for hook in local["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    assert set(entries) == {"lint", "format", "types"}
    assert f"-m {' '.join(entries['types'])}\n" in makefile
