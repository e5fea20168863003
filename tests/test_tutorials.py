"""Run the tutorials: each is a script that checks itself and draws its picture."""

import re
from pathlib import Path

import pytest
from kit import forks

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
# script -> options that make it short, and a pattern of what it prints
TUTORIALS = {
    "recurrence": ([], r"loop, chunks and gdn agree"),
    "packed": (["--steps", "60"], r"loss 2\.\d\d -> 2\.[0-7]\d nats; padding: 1\.\d\d times"),
    "speculation": ([], r"30 of 48 tokens accepted; ring, commit and replay agree"),
    "backends": ([], r"-> eager"),
}


def test_every_tutorial_is_here():
    assert set(TUTORIALS) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs(name, tmp_path):
    """The script runs in a process of its own, and its report is the one that its page shows."""
    if name == "backends":
        pytest.importorskip("triton")
    options, pattern = TUTORIALS[name]
    picture = tmp_path / "picture.svg"
    script = FOLDER / f"{name}.py"
    done = forks.python(str(script), "--out", str(picture), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(pattern, done.stdout), done.stdout
    assert picture.read_bytes().startswith(b"<?xml") and (FOLDER / f"{name}.svg").exists()
    text = script.read_text()
    assert f"]({name}.svg)" in text
    shown = "\n".join(line[6:] for line in text.splitlines() if line.startswith("#     "))
    assert not shown or shown in done.stdout
