"""Test the GPU suite's plan, locks and records on small test files that need no GPU."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gpu_suite
import pytest
from kit import gpu_plan, processes, shared_compiles

NAMES = [f"tests/test_{file}.py::test_{f}[{i}]" for file in "abc" for f in "xy" for i in range(20)]
SECONDS = {"tests/test_a.py::test_x": 9.0, "tests/test_b.py::test_x": 1.0, "tests/test_c.py::test_y": 3.0}


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_each_test_is_in_one_part_and_parts_take_the_same_time(parts):
    durations = gpu_plan.Durations(SECONDS, ("tests/test_c.py", "tests/test_a.py"))
    divided = gpu_plan.split_parts(NAMES, parts, durations)
    assert sorted(name for part in divided for name in part) == sorted(NAMES)
    seconds = [sum(durations.of_test(name) for name in part) for part in divided]
    assert max(seconds) - min(seconds) <= 2 * max(SECONDS.values())
    assert divided[0][0].startswith("tests/test_c.py") and divided[-1][-1].startswith("tests/test_b.py")
    assert divided == gpu_plan.split_parts(NAMES, parts, durations)


def test_serial_functions_run_in_one_worker():
    serial = ("tests/test_b.py::test_y", "tests/test_c.py::test_x")
    durations = gpu_plan.Durations(SECONDS, (), serial)
    units = gpu_plan.plan_units(NAMES, durations)
    assert sorted(name for unit in units.values() for name in unit) == sorted(NAMES)
    [unit] = [unit for unit in units.values() if gpu_plan.function_of(unit[0]) in serial]
    assert {gpu_plan.function_of(name) for name in unit} == set(serial) and len(unit) == 40
    assert set(unit) <= set(gpu_plan.split_parts(NAMES, 2, durations)[0])


def test_longest_units_come_first_and_hold_one_function():
    durations = gpu_plan.Durations(SECONDS)
    units = list(gpu_plan.plan_units(NAMES, durations).values())
    seconds = [sum(durations.of_test(name) for name in unit) for unit in units]
    assert all(2 * b + 2 > a for a, b in zip(seconds[1:], seconds, strict=False))
    assert max(seconds) <= gpu_plan.UNIT_SECONDS
    assert all(len({gpu_plan.function_of(name) for name in unit}) == 1 for unit in units)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/2/3", ""])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="part: expected i/n with 1 <= i <= n, got "):
        gpu_plan.parse_part(text)


def test_the_table_names_every_function_with_a_fixture_that_serializes():
    """The table names each test with the fixture `alone`, which would otherwise hold a worker that waits."""
    found = {
        f"tests/{path.name}::{line.split('(')[0].removeprefix('def ')}"
        for path in Path(__file__).parent.glob("test_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def test") and ("alone)" in line or "alone," in line)
    }
    assert found and found == set(gpu_plan.read_durations().serial)


def suite(
    folder: Path, body: str, *options: str, workers: int = 2, has_torch: bool = False
) -> tuple[dict, str]:
    """Run a file of tests as a part; return the recorded row and the output.

    Without torch, whose import takes most of the time, the row has no versions.
    """
    (folder / "test_it.py").write_text("import os, signal, time\nimport pytest\n" + textwrap.dedent(body))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "gpu_suite", "-p", "no:cacheprovider"]
    command += ["-q", "-rN", "--tb=short", "-n", str(workers), "--results", "rows.jsonl", "--commit", "abc"]
    paths = [str(processes.ROOT / name) for name in ("tests", "src", "benchmarks")]
    if not has_torch:
        (folder / "absent").mkdir(exist_ok=True)
        (folder / "absent" / "torch.py").write_text("raise ImportError('no torch in this test')\n")
        paths.insert(0, str(folder / "absent"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    # workers lock the compilations of kernels only where Triton compiles, and import it for that
    environment["TRITON_INTERPRET"] = "1"
    # other plugins of the environment import much, in each of three processes
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[-1])
    assert (done.returncode == 0) == row["ok"], done.stdout + done.stderr
    return row, done.stdout


def test_outcomes_are_recorded(tmp_path):
    body = """
        @pytest.mark.parametrize("i", range(5))
        def test_passes(i): pass
        def test_skips(): pytest.skip("no")
        def test_fails(): assert 2 + 2 == 5
        @pytest.fixture
        def broken(): yield; raise ValueError("too late")
        def test_teardown(broken): pass
        """
    row, said = suite(tmp_path, body, has_torch=True)
    assert (row["passed"], row["failed"], row["skipped"], row["unfinished"]) == (5, 2, 1, 0)
    assert not row["ok"] and row["end"] == "complete" and row["commit"] == "abc" and row["part"] == "1/1"
    assert row["files"]["test_it.py"]["failed"] == 2 and row["versions"]["torch"] and row["division"]
    assert "assert (2 + 2) == 5" in row["failures"]["test_it.py::test_fails"]
    assert row["skips"] == {"no": 1}
    assert "too late" in row["failures"]["test_it.py::test_teardown"]
    assert row["functions"]["test_it.py::test_passes"][0] == 5
    # check the end of the output only
    assert "assert (2 + 2) == 5" in said[-3000:] and "NOT GREEN: complete" in said[-400:]


def test_parts_hold_each_test_once(tmp_path):
    body = "@pytest.mark.parametrize('i', range(9))\ndef test_one(i): open(f'ran-{i}', 'x').close()"
    rows = [suite(tmp_path, body, "--part", f"{i}/2", workers=1)[0] for i in (1, 2)]
    assert [row["passed"] for row in rows] == [4, 5] and all(row["ok"] for row in rows)
    assert len({row["division"] for row in rows}) == 1 and len(list(tmp_path.glob("ran-*"))) == 9


def test_a_part_without_time_names_what_did_not_end(tmp_path):
    body = """
        @pytest.mark.parametrize("i", range(20))
        def test_quick(i): pass
        def test_long(): time.sleep(100)
        @pytest.mark.parametrize("i", range(60))
        def test_later(i): time.sleep(2)
        """
    began = time.monotonic()
    row, said = suite(tmp_path, body, "--part-seconds", "8")
    assert time.monotonic() - began < 30
    assert row["end"] == "out of time" and not row["ok"]
    assert row["passed"] + row["unfinished"] == 81 and row["passed"] >= 1
    assert "test_it.py::test_long" in row["running"] and "test_it.py::test_later" in row["not_started"]
    assert "not started: " in said and "NOT GREEN: out of time" in said[-400:]


def test_a_test_that_ends_its_worker_fails_and_the_others_run(tmp_path):
    body = """
        @pytest.mark.parametrize("i", range(8))
        def test_quick(i): pass
        def test_crash(): open("crashed", "x").close(); os.kill(os.getpid(), signal.SIGKILL)
        def test_hang(): time.sleep(100)
        """
    row, _ = suite(tmp_path, body, "--test-seconds", "3")
    assert (row["passed"], row["failed"], row["unfinished"]) == (8, 2, 0) and row["end"] == "complete"
    assert "crashed" in row["failures"]["test_it.py::test_crash"]
    # the stacks of the worker's threads show where the test hung
    assert "in test_hang" in row["failures"]["test_it.py::test_hang"]


def test_an_error_of_the_gpu_fails_one_test_alone(tmp_path):
    """The worker ends after a CUDA error, since every later CUDA call of its process would raise it again."""
    body = """
        import sys, types
        def raise_it(): raise RuntimeError("CUDA error: an illegal memory access")
        def test_before(): pass
        def test_illegal():
            cuda = types.SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda: 0)
            cuda.synchronize = raise_it
            sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
            raise_it()
        def test_later(): assert not isinstance(sys.modules.get("torch"), types.SimpleNamespace)
        """
    row, _ = suite(tmp_path, body, workers=1)
    assert (row["passed"], row["failed"], row["unfinished"]) == (2, 1, 0) and row["end"] == "complete"
    assert "the process is replaced: CUDA error" in row["failures"]["test_it.py::test_illegal"]


def test_tests_that_cannot_be_imported_are_no_success(tmp_path):
    row, _ = suite(tmp_path, "import absent_module", workers=1)
    assert not row["ok"] and row["passed"] == 0 and row["end"].startswith("exit code")


def test_a_part_of_skipped_tests_is_no_success(tmp_path):
    row, said = suite(tmp_path, "def test_skips(): pytest.skip('no CUDA device')", workers=1)
    assert row["versions"] == {}, "torch was to be absent"
    assert row["skipped"] == 1 and not row["ok"] and "skipped: 1 x no CUDA device" in said


def test_the_table_takes_the_recorded_seconds(tmp_path):
    table, results = tmp_path / "table.json", tmp_path / "rows.jsonl"
    table.write_text(json.dumps({"seconds": {"a.py::f": 1.0, "a.py::g": 2.0}, "files": [], "serial": []}))
    results.write_text("".join(json.dumps({"functions": {"a.py::f": [4, x]}}) + "\n" for x in (4, 12)))
    gpu_suite.update_table(results, table)
    assert gpu_plan.read_durations(table).seconds == {"a.py::f": 3.0, "a.py::g": 2.0}


COMPILE = """
import sys, time
from pathlib import Path
from kit import shared_compiles
folder = Path(sys.argv[1])
with shared_compiles.file_lock(folder / "locks", "variant", int(sys.argv[2])):
    if not (folder / f"entry-{sys.argv[2]}").exists():
        with open(folder / "compiled", "a") as file:
            file.write(sys.argv[2] + "\\n")
        time.sleep(0.5)
        (folder / f"entry-{sys.argv[2]}").touch()
"""


def test_processes_compile_a_variant_once(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    running = [subprocess.Popen([*command, str(i % 2)], env=environment) for i in range(6)]
    assert [process.wait(60) for process in running] == [0] * 6
    assert sorted((tmp_path / "compiled").read_text().split()) == ["0", "1"]


def test_the_lock_of_a_dead_process_is_free(tmp_path):
    code = "import os\nfrom pathlib import Path\nfrom kit.shared_compiles import file_lock\n"
    code += "with file_lock(Path(), 1): os._exit(3)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path).returncode == 3
    with shared_compiles.file_lock(tmp_path, 1):
        pass


FOR_HOPPER = """
import json, os
import gdn, torch, triton
from kit import compiling, shared_compiles
from triton import compiler
from triton.runtime.cache import triton_key
shared_compiles.install()
x = torch.randn(1, 2, 1, 16)
call = lambda: gdn.rms_norm_gated(x, x, torch.ones(16), backend="triton")
[job, *_] = compiling.jobs(call, "cuda:90")
hits = []
triton.knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
triton.compile = compiler.compile
triton_key()
for _ in range(2):
    if not os.fork():
        compiling._compile(job)
        print(json.dumps(hits), flush=True)
        os._exit(0)
for _ in range(2):
    os.wait()
"""


def test_triton_compiles_a_kernel_once(tmp_path):
    """Two processes need a kernel for an H200, and the second reads it from the disk cache."""
    pytest.importorskip("triton")
    paths = os.pathsep.join(str(processes.ROOT / name) for name in ("tests", "src"))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    # one process that imports all and forks both
    command = [sys.executable, "-c", FOR_HOPPER]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120
    )
    hits = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(hits) == [[False], [True]] and len(list((tmp_path / "locks").iterdir())) == 1


@pytest.mark.parametrize("has_launchers", [True, False])
def test_triton_compiles_under_the_lock(tmp_path, monkeypatch, has_launchers):
    """The lock is named by source and options, so another option takes another lock.

    has_launchers   Triton compiles a launcher for each kernel, as up to 3.7
    """
    triton = pytest.importorskip("triton")
    from triton import compiler
    from triton.backends.nvidia import driver

    monkeypatch.setattr(compiler, "compile", lambda *args, **options: "kernel")
    # first set, so that the original, if any, comes back
    monkeypatch.setattr(driver, "compile_module_from_src", lambda *args, **options: "module", raising=False)
    if not has_launchers:
        monkeypatch.delattr(driver, "compile_module_from_src")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    shared_compiles.install()
    shared_compiles.install()

    class Source:
        def hash(self) -> str:
            return "a source"

    def locks() -> int:
        return len(list((tmp_path / "locks").iterdir()))

    assert compiler.compile(Source(), target="cuda", options={"num_warps": 4}) == "kernel" and locks() == 1
    assert compiler.compile(Source(), target="cuda", options={"num_warps": 4}) == "kernel" and locks() == 1
    assert compiler.compile(Source(), target="cuda", options={"num_warps": 8}) == "kernel" and locks() == 2
    if has_launchers:
        assert driver.compile_module_from_src(src="int x;", name="launcher") == "module" and locks() == 3


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_runs_the_part_that_is_asked_for():
    def command(*given: str) -> str:
        # a Python that has every package, as make sees it: the import of all takes seconds
        make = ["make", "-n", "test-gpu", "PYTHON=true", *given]
        # do not inherit the flags of a make that runs this test
        clean = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(make, cwd=processes.ROOT, env=clean, capture_output=True, text=True, check=True)
        return done.stdout

    said = command("PART=2/3", "WORKERS=20", "TIMEOUT=100", "RESULTS=x/y.jsonl", "COMMIT=abc")
    expected = "-m gpu", "-n 20", "--part 2/3", "--part-seconds 100", "--results x/y.jsonl", "--commit abc"
    assert all(option in said for option in expected)
    # 3,000 drawn problems each of test_hopper_gpu and test_hopper_training: two tests a seed
    assert "GDN_TEST_SEEDS=30 GDN_TEST_PROBLEMS=50" in said
    assert "--part 1/1" in command() and "--commit" not in command()
