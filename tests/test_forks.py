"""Test the server that starts Python processes for tests: each is as fresh as one of `subprocess`."""

import functools
import signal
import subprocess
import sys
import sysconfig

import pytest
from kit import forks

PACKAGES = sysconfig.get_path("purelib")

SHOW = """
import os, sys
print(sys.argv, os.environ.get("GDN_TEST"), os.getcwd(), __name__, "torch" in sys.modules)
print([name for name in ("gdn", "triton", "transformers") if name in sys.modules], file=sys.stderr)
sys.exit(3)
"""


def test_a_process_has_its_own_arguments_environment_and_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_TEST", "given")
    done = forks.python("-c", SHOW, "one", "two", cwd=tmp_path)
    assert done.stdout.split() == ["['-c',", "'one',", "'two']", "given", str(tmp_path), "__main__", "True"]
    assert (done.returncode, done.stderr) == (3, "[]\n")
    assert "None" in forks.python("-c", SHOW, cwd=tmp_path, env={}).stdout


@pytest.mark.parametrize("how", ["-m", "script"])
@pytest.mark.parametrize("first", ["", PACKAGES])
def test_the_search_path_is_that_of_an_interpreter(tmp_path, monkeypatch, how, first):
    """Whatever the search path of the test that started the server: of a folder that is on it anyway, too."""
    monkeypatch.setenv("PYTHONPATH", first)
    monkeypatch.setattr(forks, "_server", functools.cache(forks._server.__wrapped__))
    forks.python("-c", "pass")
    (tmp_path / "folder").mkdir()
    (tmp_path / "shown.py").write_text(
        "import sys\nif __name__ == '__main__':\n    print(sys.path, sys.argv)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "folder"))
    arguments = ["-m", "shown", "x"] if how == "-m" else [str(tmp_path / "shown.py"), "x"]
    fresh = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert forks.python(*arguments, cwd=tmp_path).stdout == fresh.stdout


def test_errors_signals_and_limits_are_seen(tmp_path):
    failed = forks.python("-c", "import atexit; atexit.register(print, 'end'); raise ValueError('no')")
    assert (failed.returncode, failed.stdout) == (1, "end\n") and failed.stderr.endswith("ValueError: no\n")
    assert forks.python("-c", "import os; os.abort()").returncode == -signal.SIGABRT
    assert forks.python("-c", "import time; time.sleep(60)", timeout=0.2).returncode == -signal.SIGKILL
    with pytest.raises(subprocess.CalledProcessError):
        forks.python("-c", "raise SystemExit(2)", check=True)
    with pytest.raises(AssertionError, match="exit status 1(.|\n)*ValueError"):
        forks.run("-c", "raise ValueError")
    assert forks.python("-c", "import gdn; print(gdn.__version__)").returncode == 0, "the next one is served"
