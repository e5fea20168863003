"""Test the runner of FLA's own tests on small test files of the same names, without and with the patch."""

import json
import signal
import subprocess
import sys
import time

import fla_suite
import pytest

pytest.importorskip("xdist")

OPS = """
import pytest, sys
from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule as rule

# the patch has imported torch; a pass without it is spared the import, which takes most of the time
torch = sys.modules.get("torch")
x = torch and torch.ones(1, 3, 2, 4)

@pytest.mark.parametrize("n", [0, 1, 2])
def test_works_in_both(n):
    got = rule(x, x, x)
    assert got == "own" or torch.is_tensor(got[0])

def test_left_to_fla():
    assert rule(x, x, torch and x.half()) == "own"

def test_broken_by_the_patch():
    assert rule(x, x, x) == "own"

def test_fails_in_both():
    assert rule(x, x, x) == "neither"

def test_mended_by_the_patch():
    assert torch and torch.is_tensor(rule(x, x, x)[0])

def test_skipped():
    pytest.skip("no such GPU")

@pytest.fixture
def broken():
    raise OSError("no file")

def test_without_its_fixture(broken):
    pass
"""
LAYERS = """
def test_of_no_call():
    pass
"""
OWN = "def {name}(*args, **kwargs):\n    return 'own'\n"
BACKENDS = """
_DISPATCH_DISABLED = False
class BaseBackend:
    pass
def register(name):
    return lambda cls: cls
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Write tests with FLA's names, and a package of the modules that the patch replaces."""
    for file, text in zip(fla_suite.FILES, (OPS, LAYERS), strict=False):
        (tmp_path / "checkout" / file).parent.mkdir(parents=True)
        (tmp_path / "checkout" / file).write_text(text)
    # the checkout has a package and settings of its own, which no pass may use
    (tmp_path / "checkout/fla.py").write_text("raise ImportError('the package of the checkout')\n")
    (tmp_path / "checkout/pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    site = tmp_path / "site"
    modules = {
        "fla.ops.gated_delta_rule.fused_recurrent": ("fused_recurrent_gated_delta_rule",),
        "fla.ops.gated_delta_rule.chunk": ("chunk_gated_delta_rule",),
        "fla.ops.gated_delta_rule.backends": (),
        "fla.modules.causal_conv1d.ops": ("causal_conv1d", "causal_conv1d_update"),
        "fla.modules.norm.fused_norm_gate": ("rms_norm_gated",),
    }
    for module, names in modules.items():
        path = site.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(OWN.format(name=name) for name in names))
    for folder in {p for path in site.rglob("*.py") for p in path.parents if site in p.parents}:
        (folder / "__init__.py").touch()
    (site / "fla/__init__.py").write_text("__version__ = '0.6.0'\n")
    (site / "fla/backends.py").write_text(BACKENDS)
    monkeypatch.setenv("PYTHONPATH", str(site))
    # other plugins of the environment import much, in each process of each pass
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    return tmp_path / "checkout"


def arguments(checkout, *more):
    out = checkout.parent / "out"
    named = {"--out": out, "--append": out / "rows.jsonl", "--commit": "abc", "--tests-commit": "def"}
    return [str(checkout), "--without-gpu", *(str(x) for pair in named.items() for x in pair), *more]


def rows(checkout):
    return [json.loads(line) for line in (checkout.parent / "out/rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_both_passes(checkout, capfd):
    assert fla_suite.main(arguments(checkout, "--workers", "2")) == 1
    ops, layers = rows(checkout)
    works = {f"test_works_in_both[{n}]": ["passed", "passed"] for n in range(3)}
    assert ops["tests"] == works | {
        "test_left_to_fla": ["passed", "passed"],
        "test_broken_by_the_patch": ["passed", "failed"],
        "test_fails_in_both": ["failed", "failed"],
        "test_mended_by_the_patch": ["failed", "passed"],
        "test_skipped": ["skipped", "skipped"],
        "test_without_its_fixture": ["failed", "failed"],
    }
    assert ops["broken"] == ["tests/ops/test_gdn.py::test_broken_by_the_patch"] and ops["is_complete"]
    name = "fused_recurrent_gated_delta_rule"
    assert ops["calls"] == {"gdn": {name: 6}, "fla": {name: 1}}
    assert layers["counts"] == {"without": {"passed": 1}, "with": {"passed": 1}} and not layers["broken"]
    assert (ops["commit"], ops["tests_commit"], ops["fla"]) == ("abc", "def", "0.6.0")
    said = capfd.readouterr().out
    assert "6 calls served by gdn, 1 left to FLA" in said
    assert (
        "broken by the patch: tests/ops/test_gdn.py::test_broken_by_the_patch: AssertionError: assert" in said
    )


@pytest.mark.slow
def test_a_selection_that_holds_and_one_that_gdn_never_sees(checkout):
    """Without workers, one process collects, runs and records."""
    assert fla_suite.main(arguments(checkout, "--workers", "1", "--select", "works or left")) == 0
    assert fla_suite.main(arguments(checkout, "--workers", "1", "--select", "of_no_call")) == 1


@pytest.mark.slow
def test_a_pass_that_is_cut_off_leaves_what_it_has(checkout, capfd):
    """A pass that its own limit or a signal ends leaves a record, and exit status 2."""
    slow = "import time\n" + LAYERS + "def test_slow():\n    time.sleep(60)\n"
    (checkout / fla_suite.FILES[1]).write_text(slow)
    given = arguments(checkout, "--workers", "1", "--select", "works or no_call or slow")
    assert fla_suite.main([*given, "--minutes", "0.3"]) == 2
    _, layers = rows(checkout)
    assert layers["tests"]["test_slow"] == ["not run", "not run"] and not layers["is_complete"]
    assert "cut off: " in capfd.readouterr().out
    for file in ("rows", "without", "with"):
        (checkout.parent / f"out/{file}.jsonl").unlink()
    command = [sys.executable, fla_suite.__file__, *given]
    process = subprocess.Popen(command, env=fla_suite.os.environ | {"PYTHONPATH": python_path()})
    outcomes = checkout.parent / "out/without.jsonl"
    for _ in range(600):
        if outcomes.exists() and "test_of_no_call" in outcomes.read_text().partition("\n")[2]:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 2
    assert rows(checkout)[1]["tests"]["test_of_no_call"] == ["passed", "not run"]


def python_path():
    return fla_suite.os.pathsep.join([str(fla_suite.ROOT / "src"), fla_suite.os.environ["PYTHONPATH"]])


def test_a_half_written_line_and_a_crashed_worker(tmp_path):
    lines = [{"collected": ["f::a", "f::b"]}, {"test": "f::a", "outcome": "passed", "calls": {}}]
    for name in fla_suite.PASSES:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text + '{"test": "f::b", "outc')
    summary = fla_suite.compare(tmp_path)
    assert summary["tests"] == {"f::a": ["passed", "passed"], "f::b": ["not run", "not run"]}
    assert not summary["is_complete"] and not summary["broken"]
    crash = pytest.TestReport("f::b", ("f", 1, "b"), {}, "failed", "worker crashed", "???")
    assert fla_suite.outcome_of([crash])["outcome"] == "failed"


def test_few_configurations_of_a_kernel(monkeypatch):
    """The configurations are evenly spaced, so one fits the GPU if any does; a kernel with few keeps all."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    seen = []
    monkeypatch.setattr(autotuner, "__init__", lambda self, fn, names, configs, **more: seen.append(configs))
    fla_suite.limit_configs(3)
    for count in (2, 3, 8):
        autotuner(None, [], list(range(count)), key=[])
    assert seen == [[0, 1], [0, 1, 2], [0, 2, 5]]


def test_wrong_arguments(tmp_path, capsys, checkout, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        fla_suite.main([str(tmp_path)])
    assert "expected a folder with tests/ops/test_gdn.py" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        fla_suite.main([str(checkout)])
    assert "expected a CUDA device, got none" in capsys.readouterr().err
