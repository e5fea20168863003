"""Check every compiled kernel, for GPUs that need not be there: spills, shared memory, serialised WGMMA."""

import ast
import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from kit import compiling
from kit.compiling import TARGETS, Report, compile_all, jobs, jobs_of_specimen, wrong
from kit.specimens import SPECIMENS, chunk

from gdn.backends.triton import launch
from gdn.testing import Case, inputs
from gdn.testing.accuracy import run

KERNELS = Path(__file__).parent.parent / "src" / "gdn" / "backends"
BOTH = [(target, name) for target in TARGETS for name, s in SPECIMENS.items() if target in s.targets]
pytestmark = pytest.mark.compile


@functools.cache
def jobs_of(name, target):
    """Return the jobs of a specimen, whose launches are recorded once for all tests."""
    return jobs_of_specimen(SPECIMENS[name], target)


@pytest.fixture(scope="session")
def reports(request):
    """Return the reports of all selected tests, compiled together, so that no core waits for one."""
    wanted = [
        item.callspec.params for item in request.session.items if item.name.startswith("test_compiles[")
    ]
    return compile_all([job for x in wanted for job in jobs_of(x["name"], x["target"])])


@pytest.mark.parametrize("target, name", BOTH, ids=[f"{target}-{name}" for target, name in BOTH])
def test_compiles(reports, target, name):
    wanted = jobs_of(name, target)
    assert wanted, "expected a kernel to be launched"
    found = [f"{job.name}: {what}" for job in wanted for what in wrong(job, reports[job])]
    assert not found, "\n".join(found)


def test_every_kernel_has_a_specimen():
    written = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}
                written |= {node.name} if "kernel" in names else set()
    met = {job.kernel.__name__ for name in SPECIMENS for job in jobs_of(name, "cuda:90")}
    assert written and written == met


@launch.kernel
def _product(a_ptr, b_ptr, bias_ptr, o_ptr, pitch, scale, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(0, pitch, K):
        a = tl.load(a_ptr + m[:, None] * pitch + (i + k)[None, :])
        b = tl.load(b_ptr + (i + k)[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n)[None, :]
    tl.store(o_ptr + m[:, None] * N + n[None, :], acc * scale)


@launch.kernel
def _no_instruction(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, tl.inline_asm_elementwise("nothing $0, $1;", "=r,r", [i], tl.int32, True, 1))


@launch.kernel
def _read_twice(x_ptr, sums_ptr, o_ptr, length, N: tl.constexpr, STAGES: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a = tl.load(x_ptr + tile)
    acc = tl.zeros((N, N), tl.float32)
    sums = tl.zeros((N,), tl.float32)
    for at in tl.range(0, length, N, num_stages=STAGES):
        b = tl.load(x_ptr + at * N + tile)
        sums += tl.sum(b.to(tl.float32), 1)
        acc = tl.dot(a, b, acc)
    tl.store(o_ptr + tile, acc)
    tl.store(sums_ptr + i, sums)


def product(M, N):
    x = torch.zeros(1, dtype=torch.bfloat16)
    constants = {"M": M, "N": N, "K": 64}
    launch.Launch(_product, 1, (64, 1.0), constants, num_warps=4, num_stages=2)(x, x, None, x)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Ignore the results of earlier runs."""
    monkeypatch.setattr(compiling, "CACHE", tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_a_small_kernel_passes_everywhere(fresh, target):
    (job,) = jobs(lambda: product(64, 64), target)
    report = compile_all([job])[job]
    assert wrong(job, report) == [] and report.registers > 0 and report.shared > 0
    assert compile_all([job]) == {job: report}, "the second time it is read from the cache"


def test_a_kernel_that_spills_is_refused(fresh, monkeypatch):
    monkeypatch.setattr(compiling, "allowed", lambda target: {})
    (job,) = jobs(lambda: product(128, 256), "cuda:90")
    complaints = wrong(job, compile_all([job])[job])
    assert any("spills" in c for c in complaints) and any("C75" in c for c in complaints)


def test_a_compiler_that_fails_or_dies_is_reported(fresh, monkeypatch):
    def call():
        launch.Launch(_no_instruction, 1, (), {"N": 128}, num_warps=4)(torch.zeros(1, dtype=torch.int32))

    (job,), (sound,) = jobs(call, "cuda:90"), jobs(lambda: product(64, 64), "cuda:90")
    reports = compile_all([job, sound], 1)
    assert "PTXASError" in wrong(job, reports[job])[0]
    assert wrong(sound, reports[sound]) == [], "another process compiles what follows"
    monkeypatch.setattr(compiling, "_compile", lambda job: os.abort())
    assert "signal 6" in wrong(job, compile_all([job])[job])[0]


def test_too_much_shared_memory_is_refused():
    (job,) = jobs(lambda: product(64, 64), "hip:gfx942")
    assert wrong(job, Report(shared=64 * 1024)) == []
    assert "shared memory 65537" in wrong(job, Report(shared=64 * 1024 + 1))[0]


def test_a_load_that_overwrites_what_a_product_reads_is_seen(fresh):
    """Triton 3.6 pipelines with one buffer too few for an operand that is also read into registers."""
    x, sums = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)

    def read_twice(stages):
        launch.Launch(_read_twice, 1, (128,), {"N": 64, "STAGES": stages}, num_warps=4)(x, sums, sums)

    alone, pipelined = (jobs(lambda n=n: read_twice(n), "cuda:90")[0] for n in (1, 3))
    found = compile_all([alone, pipelined])
    assert found[alone].error is None
    if triton.__version__.startswith("3.6."):
        assert "meets" in str(found[pipelined].error)


SHARING = {
    "state_bwd_kernel": Case(sizes=(65, 7)),
    "state_kernel": Case(sizes=(65, 7), is_per_channel=True),
    "values_bwd_kernel": Case(sizes=(80, 16), is_per_channel=True),
}


@pytest.mark.parametrize("name", SHARING)
def test_no_operands_of_two_layouts_share_an_address(fresh, name):
    """ptxas 12.8 loses addresses of the second one. Operands that Triton does not pipeline share memory."""
    given = inputs(SHARING[name], torch.bfloat16)
    found = jobs(lambda: run(chunk, given, name != "state_kernel"), "cuda:90")
    (job,) = [job for job in found if job.kernel.__name__ == name]
    assert dict(job.constants)["BV"] == 64
    assert compile_all([job])[job].error is None
    if name == "values_bwd_kernel" and triton.__version__.startswith("3.6."):
        narrow = replace(job, constants=tuple((dict(job.constants) | {"BV": 32}).items()))
        assert "descriptors of 2 layouts" in str(compile_all([narrow])[narrow].error)
