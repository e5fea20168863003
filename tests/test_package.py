"""Check the package as users get it: wheel, sdist, editable install beside a clone, missing packages."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from kit import forks

import gdn

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "out", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


def run(command, cwd, **environment):
    """Run a command without this checkout on PYTHONPATH; return the finished process.

    The command `python` runs in a process that has imported torch.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [x for x in given if x and ROOT not in Path(x).parents]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(kept), "OMP_NUM_THREADS": "1", **environment}
    if command[0] == "python":
        return forks.python(*command[1:], cwd=cwd, env=env)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)


def output_of(command, cwd, **environment):
    done = run(command, cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a copy of the repository in a folder named gdn, as git clone makes it."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"a build needs setuptools 77 or newer, got {setuptools.__version__}")
    folder = tmp_path_factory.mktemp("neighbour") / "gdn"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


@pytest.fixture(scope="module")
def built(clone, tmp_path_factory):
    """Build a wheel and an sdist by the functions that pip calls, without a network; return their paths."""
    out = tmp_path_factory.mktemp("dist")
    commands = ([sys.executable, "-c", BUILD.format(kind), str(out)] for kind in ("wheel", "sdist"))
    return [out / output_of(command, clone).splitlines()[-1] for command in commands]


@pytest.fixture(scope="module")
def environment(clone):
    """Install the clone editably in a new environment that has torch but no typer; return its python."""
    pytest.importorskip("pip")
    home = clone.parent / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python3*/site-packages")
    # what the tests' own environment has, torch and setuptools among it, comes after what is installed here
    there = [x for x in sys.path if Path(x).name in ("site-packages", "dist-packages")]
    (site / "zz_tests.pth").write_text("\n".join(there) + "\n")
    install = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-e", str(clone)]
    output_of([str(python), *install], clone.parent)
    (site / "aa_plain.pth").write_text("import sys; sys.modules['typer'] = None\n")
    return python


def test_a_wheel_holds_the_package_alone(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = HeaderParser().parsestr(wheel.read(path).decode())
    modules = {str(x.relative_to(ROOT / "src")) for x in (ROOT / "src" / "gdn").rglob("*.py")}
    assert modules | {"gdn/py.typed"} == {name for name in names if name.startswith("gdn/")}
    assert "gdn/testing/__init__.py" in modules and not any("bench" in name for name in names)
    extras = about.get_all("Provides-Extra")
    assert extras == ["cli", "transformers", "triton", "serve", "bench", "docs", "dev"]
    assert any(name.endswith("/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"gdn"}
    assert (about["Name"], about["Version"], about["Author"]) == ("gdn", gdn.__version__, "The gdn authors")
    assert about["License-Expression"] == "MIT" and "linear attention" in about["Keywords"]
    assert not about.get_all("Project-URL") and about["Home-page"] is None
    versions = {x.rpartition(" ")[2] for x in about.get_all("Classifier") if "Python :: 3." in x}
    assert versions == {"3.10", "3.11", "3.12", "3.13"} and about["Requires-Python"] == ">=3.10"


def test_the_tests_of_an_sdist_run(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        sdist.extractall(tmp_path)
    (home,) = tmp_path.iterdir()
    for folder in ("src", "tests", "docs", "examples", "benchmarks"):
        here = [x for x in (ROOT / folder).rglob("*") if x.is_file() and "egg-info" not in str(x)]
        wanted = {str(x.relative_to(ROOT)) for x in here if x.suffix in (".py", ".md", ".json", ".jsonl")}
        missing = {name for name in wanted if not (home / name).exists()}
        assert wanted and not missing, missing
    assert all((home / x).exists() for x in ("Makefile", "CONTRIBUTING.md", "NOTES.md", "pyproject.toml"))
    tests = [
        "tests/test_docs.py",
        "tests/test_problem.py",
        "-k",
        "links or public or refuse",
        "-p",
        "no:cacheprovider",
    ]
    where = "import gdn, pathlib; print(pathlib.Path(gdn.__file__).resolve())"
    assert Path(output_of(["python", "-c", where], home, PYTHONPATH=str(home / "src")).strip()) == (
        home.resolve() / "src" / "gdn" / "__init__.py"
    )
    said = output_of(["python", "-m", "pytest", *tests], home)
    assert re.search(r"^[1-9]\d* passed", said, re.M), said


def test_a_neighbour_of_the_clone_imports_the_package(environment, clone):
    """Import the package where a folder named gdn, the clone, lies beside the script."""
    code = "import gdn; gdn.decode; print(gdn.__file__, gdn.__version__)"
    file, version = output_of([str(environment), "-c", code], clone.parent).split()
    assert Path(file) == clone / "src" / "gdn" / "__init__.py" and version == gdn.__version__


def test_a_neighbour_of_the_clone_is_checked_with_types(environment, clone):
    pytest.importorskip("mypy")
    script = clone.parent / "script.py"
    script.write_text(
        "import gdn\n\nlayer = gdn.GatedDeltaNet(64, 2, 2, 16, 16)\nx: int = layer.num_k_heads\n"
        "gdn.no_such_function()\n"
    )
    cache = clone.parent / "cache"
    # torch's own types take most of the time, and are not what is tested
    (clone.parent / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n[mypy-jaxtyping.*]\nfollow_imports = skip\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        str(environment),
        "--cache-dir",
        str(cache),
    ]
    said = run([*command, script.name], clone.parent).stdout
    errors = [line for line in said.splitlines() if ": error:" in line]
    assert len(errors) == 1 and 'Module has no attribute "no_such_function"' in errors[0], said


@pytest.mark.parametrize("command", ["info", "bench"])
def test_a_plain_install_names_the_extra(environment, clone, command):
    done = run([str(environment.parent / "gdn"), command], clone.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gdn: the command line needs typer, which is not installed: pip install 'gdn[cli]'\n"
    )


def test_the_version_needs_no_installation(tmp_path):
    """Read the version from src by PYTHONPATH alone."""
    code = "import gdn; print(gdn.__version__)"
    said = output_of(["python", "-c", code], tmp_path, PYTHONPATH=str(ROOT / "src"))
    assert said.strip() == gdn.__version__
    if importlib.util.find_spec("typer") and importlib.util.find_spec("rich"):
        command = ["python", "-m", "gdn", "--version"]
        assert output_of(command, tmp_path, PYTHONPATH=str(ROOT / "src")) == f"gdn {gdn.__version__}\n"


@pytest.mark.parametrize(
    "patch, package, words",
    [
        (gdn.patch_fla, "fla", "pip install flash-linear-attention"),
        (gdn.patch_transformers, "transformers", r"pip install 'gdn\[transformers\]'"),
    ],
)
def test_a_patch_names_what_it_needs(monkeypatch, patch, package, words):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=words):
        patch()
