"""Compile every kernel for GPUs that need not be there, and read the compiler's output.

A specimen (`specimens.py`) is a public call on small CPU tensors. Its launches are recorded under
`launch.record_launches` instead of run. Each is then compiled for a target in a forked process, since LLVM
aborts on some errors; the process compiles the next kernel unless one fails. The types are those of a real
launch: pointers are divisible by 16, and integers are never specialised.

    PYTHONPATH=.:tests python -m kit.compiling [--target cuda:90] [part of a specimen's or kernel's name]
    PYTHONPATH=.:tests python -m kit.compiling --record     record spills.json again for the present Triton
"""

import argparse
import ast
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import inspect
import json
import os
import pkgutil
import re
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, code_generator
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import jit
from triton.runtime.cache import triton_key

from gdn.backends import hopper
from gdn.backends import triton as room
from gdn.backends.triton import launch
from kit.descriptors import VERIFIED, find_shared_bases
from kit.in_flight import find_overwrites
from kit.layouts import find_other_layouts
from kit.specimens import SPECIMENS, Specimen

TESTS = Path(__file__).parent.parent
TABLE = TESTS / "spills.json"
CACHE = TESTS.parent / "build" / "compiled"
TENSOR_MEMORY = 512  # columns of tensor memory in an SM of sm_100
SECONDS = 300  # a compilation that takes longer counts as stuck
JOBS = 50  # of one process, which keeps what compilations leave: to free it takes longer than another process
DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip


class Target(NamedTuple):
    """Describe a GPU to compile for."""

    gpu: GPUTarget
    machine: launch.Machine


TARGETS = {
    "cuda:80": Target(GPUTarget("cuda", 80, 32), launch.Machine("cuda", 80, 108, 163 * 1024)),
    "cuda:90": Target(GPUTarget("cuda", 90, 32), launch.Machine("cuda", 90, 132, 227 * 1024)),
    "cuda:100": Target(GPUTarget("cuda", 100, 32), launch.Machine("cuda", 100, 148, 227 * 1024)),
    "cuda:120": Target(GPUTarget("cuda", 120, 32), launch.Machine("cuda", 120, 188, 99 * 1024)),
    "hip:gfx942": Target(GPUTarget("hip", "gfx942", 64), launch.Machine("hip", 94, 304, 64 * 1024)),
}


@dataclass(frozen=True)
class Job:
    """Hold a kernel with everything that its binary depends on."""

    kernel: Any
    signature: tuple[str, ...]  # the type of each parameter that is not a constant, in order
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    options: tuple[tuple[str, Any], ...]
    target: str

    @property
    def name(self) -> str:
        """Return the name of the job in the table of spills."""
        constants = " ".join(f"{name}={value}" for name, value in self.constants)
        kinds = [t.split("[")[0] for t in self.signature if t.startswith(("*", "constexpr", "tensordesc"))]
        types = ",".join(kinds).replace("*", "").replace("constexpr", "-").replace("tensordesc<", "desc:")
        return f"{self.kernel.__name__} {constants} [{types}] {self.num_warps} warps"

    @property
    def key(self) -> str:
        parts = (
            [field.name for field in dataclasses.fields(Report)],
            triton.__version__,
            self.kernel.cache_key,
            self.name,
            self.signature,
            self.num_stages,
            self.options,
            self.target,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Report:
    """Hold what a kernel needs: bytes spilled (on AMD: registers), shared memory, tensor memory columns.

    If a GPU has too little tensor memory, Triton compiles a trap, and raises only at the launch.
    """

    registers: int = 0
    spills: int = 0
    shared: int = 0
    columns: int = 0
    complaints: tuple[str, ...] = ()
    error: str | None = None
    seconds: float = 0.0


MODULES = [
    import_module(x.name)
    for backend in (room, hopper)
    for x in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}.")
]


@contextmanager
def recording(machine: launch.Machine) -> Iterator[list[Any]]:
    """Record the launches on an imagined GPU; the backend accepts CPU tensors and caches no plan."""
    users = [module for module in MODULES if hasattr(module, "machine")]
    before = room.BACKEND, launch.machine, launch.PlanCache.get
    supports = {"refuses": lambda problem: None, "refuses_backward": None, "refuses_recurrent": None}
    room.BACKEND = dataclasses.replace(room.BACKEND, **supports)
    launch.PlanCache.get = lambda self, key, make: make()
    for module in users:
        module.machine = lambda device: machine
    try:
        with launch.record_launches([]) as launches:
            yield launches
    finally:
        room.BACKEND, real, launch.PlanCache.get = before
        for module in users:
            module.machine = real


def jobs(call: Callable[[], Any], target: str) -> list[Job]:
    """Return the kernels that a call would run on a target, each once."""
    with recording(TARGETS[target].machine) as launches:
        call()
    return jobs_of(launches, target)


@contextmanager
def zeros_for_random_numbers() -> Iterator[None]:
    """Make `torch.randn` return zeros: what is launched depends on no number, and random ones take long."""

    def zeros(*shape: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **options)

    with patch.object(torch, "randn", zeros):
        yield


def jobs_of_specimen(specimen: Specimen, target: str) -> list[Job]:
    """Return the kernels that a specimen would run on a target, each once."""
    with zeros_for_random_numbers():
        return jobs(specimen.on("cpu"), target)


def jobs_of(launches: Iterable[Any], target: str) -> list[Job]:
    """Return the kernels of recorded launches, each once."""
    return list(dict.fromkeys(_job(one, tensors, target) for one, tensors in launches))


def _job(one: launch.Launch, tensors: tuple[torch.Tensor | None, ...], target: str) -> Job:
    types = ["constexpr" if x is None else _type(x) for x in tensors]
    for number in one.scalars:
        if isinstance(number, int):
            types.append("i32" if -(2**31) <= number < 2**31 else "i64")
        else:
            types.append("constexpr" if number is None else "fp32")
    count = len(one.kernel.arg_names) - len(one.constants)
    assert count == len(types), (
        f"{one.kernel.__name__}: expected {count} tensors and numbers, got {len(types)}"
    )
    order = {name: i for i, name in enumerate(one.kernel.arg_names)}
    constants = tuple(sorted(one.constants.items(), key=lambda item: order[item[0]]))
    options = tuple(one.options.items())
    return Job(one.kernel, tuple(types), constants, one.num_warps, one.num_stages, options, target)


def _type(x: Any) -> str:
    """Return Triton's name for the type of a tensor or tensor descriptor."""
    if isinstance(x, torch.Tensor):
        return f"*{DTYPES[x.dtype]}"
    return f"tensordesc<{DTYPES[x.base.dtype]}{x.block_shape},{x.layout!r}>"


def spare_the_code_generator() -> None:
    """Let Triton's code generator silence no warnings at each node, and inspect and parse functions once."""
    quiet = nullcontext()
    silent = {"catch_warnings": lambda: quiet, "simplefilter": lambda *args: None}
    code_generator.warnings = SimpleNamespace(**vars(warnings) | silent)
    code_generator.inspect = SimpleNamespace(
        **vars(inspect) | {"signature": functools.cache(inspect.signature)}
    )
    # the code generator changes no node but to mark, each time, a value that is not used
    jit.ast = SimpleNamespace(**vars(ast) | {"parse": functools.cache(ast.parse)})


def _compile(job: Job) -> Any:
    """Compile a kernel, on a machine that may have no GPU."""
    names = job.kernel.arg_names
    given = dict(zip(names, job.signature, strict=False))
    signature = {name: given.get(name, "constexpr") for name in names}
    constants = dict.fromkeys(n for n in names if signature[n] == "constexpr") | dict(job.constants)
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    kind = GluonASTSource if job.kernel.is_gluon() else ASTSource
    source = kind(job.kernel, signature, {(names.index(n),): x for n, x in constants.items()}, attrs)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, **dict(job.options)}
    return triton.compile(source, target=TARGETS[job.target].gpu, options=options)


def _report(job: Job, log: Path) -> Report:
    """Compile with all output redirected to a file, and read the file."""
    with log.open("w") as file, tempfile.TemporaryDirectory() as folder:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = _compile(job)
    text = log.read_text()
    if TARGETS[job.target].gpu.backend == "cuda":
        numbers = {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill (?:stores|loads)"}
        complaints = tuple(line.strip() for line in text.splitlines() if re.search(r"C75\d\d|serializ", line))
        faults = find_overwrites(compiled.asm["ttgir"]) + find_other_layouts(compiled.asm["ttgir"])
        # later GPUs have other descriptors, and a later ptxas
        if job.target == "cuda:90" and not job.name.startswith(VERIFIED):
            faults += find_shared_bases(compiled.asm["ptx"])
        if faults:
            return Report(error="; ".join(faults))
    else:
        text, complaints = compiled.asm["amdgcn"], ()
        numbers = {"registers": r"\.vgpr_count:\s+(\d+)", "spills": r"\.[vs]gpr_spill_count:\s+(\d+)"}
    found = {name: [int(n) for n in re.findall(pattern, text)] for name, pattern in numbers.items()}
    memory = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", 0) or 0
    return Report(max(found["registers"]), sum(found["spills"]), *memory, complaints)


def _serve(expected: list[Job], pipe: Any, log: Path) -> None:
    """Compile the jobs whose indices arrive, `JOBS` at most, until one fails, whose errors may last."""
    faulthandler.disable()
    # a garbage collection would read, and so copy, all objects of the parent
    gc.disable()
    with pipe.makefile("r") as indices, pipe.makefile("w") as replies:
        for _, index in zip(range(JOBS), indices, strict=False):
            try:
                report = _report(expected[int(index)], log)
            except BaseException as e:
                while e.__cause__ is not None:
                    e = e.__cause__
                report = Report(error=f"{type(e).__name__}: {str(e)[-1500:]}")
            print(json.dumps(dataclasses.asdict(report)), file=replies, flush=True)
            if report.error is not None:
                return


class Compiler:
    """Hold a forked process that compiles one job after another, until one fails or it dies.

    A process for each job would start the compilers anew, and copy the parent's memory, each time.
    """

    def __init__(self, expected: list[Job], folder: Path, others: Iterable["Compiler"]) -> None:
        """Fork a process, which closes its copies of the other pipes: they would hide the parent's end."""
        self.pipe, pipe = socket.socketpair()
        self.expected, self.at, self.began, self.left = expected, 0, 0.0, JOBS
        self.pid = os.fork()
        if self.pid:
            pipe.close()
            self.replies, self.log = self.pipe.makefile("r"), folder / str(self.pid)
            return
        try:
            for one in [self, *others]:
                os.close(one.pipe.fileno())
            _serve(expected, pipe, folder / str(os.getpid()))
        finally:
            os._exit(0)

    def begin(self, index: int) -> None:
        """Send the index of a job."""
        self.at, self.began = index, time.monotonic()
        self.pipe.send(b"%d\n" % index)

    def finish(self) -> tuple[Job, Report]:
        """Return the job that was begun, and its report; `left` counts the jobs that may follow."""
        job, text = self.expected[self.at], self.replies.readline()
        if not text.endswith("\n"):
            signaled, self.left = os.WTERMSIG(self.close()), 0
            said = self.log.read_text()[-1500:] if self.log.exists() else ""
            return job, Report(error=f"the compiler died with signal {signaled}: {said}")
        values = json.loads(text)
        values |= {"complaints": tuple(values["complaints"]), "seconds": time.monotonic() - self.began}
        report = Report(**values)
        self.left = self.left - 1 if report.error is None else 0
        if not self.left:
            self.close()
        return job, report

    def close(self) -> int:
        """End the process; return its status."""
        self.replies.close()
        self.pipe.close()
        return os.waitpid(self.pid, 0)[1]


def compile_all(expected: list[Job], workers: int | None = None) -> dict[Job, Report]:
    """Return a report for each job; jobs compile in parallel, and earlier results come from the cache."""
    reports: dict[Job, Report] = {}
    waiting = []
    for job in dict.fromkeys(expected):
        path = CACHE / job.key
        if path.exists():
            values = json.loads(path.read_text())
            reports[job] = Report(**values | {"complaints": tuple(values["complaints"])})
        else:
            waiting.append(job)
    CACHE.mkdir(parents=True, exist_ok=True)
    if waiting:
        # Triton hashes its own library, 300 MB, once per process: a forked child inherits the cached hash
        triton_key()
        # and it runs ptxas twice for its version
        for target in {job.target for job in waiting if job.target.startswith("cuda")}:
            backend = make_backend(TARGETS[target].gpu)
            backend.hash()
            backend.parse_options({}).hash()
        spare_the_code_generator()
    at, idle, running = 0, [], {}
    with tempfile.TemporaryDirectory() as folder:
        while at < len(waiting) or running:
            while at < len(waiting) and len(running) < (workers or os.cpu_count() or 1):
                compiler = idle.pop() if idle else Compiler(waiting, Path(folder), running.values())
                compiler.begin(at)
                running[compiler.pipe] = compiler
                at += 1
            ready = select.select(list(running), [], [], 1.0)[0]
            for compiler in running.values():
                if time.monotonic() - compiler.began > SECONDS:
                    os.kill(compiler.pid, signal.SIGKILL)
            for pipe in ready:
                compiler = running.pop(pipe)
                job, report = compiler.finish()
                reports[job] = report
                if compiler.left:
                    idle.append(compiler)
                if report.error is None:
                    text = json.dumps(dataclasses.asdict(report))
                    unfinished = CACHE / f"{job.key}.{os.getpid()}"
                    unfinished.write_text(text)
                    unfinished.rename(CACHE / job.key)
        for compiler in idle:
            compiler.close()
    return reports


def allowed(target: str) -> dict[str, list[Any]] | None:
    """Return the recorded spills and ptxas codes of each job, or None for a Triton without a record."""
    table: dict[str, dict[str, dict[str, list[Any]]]] = json.loads(TABLE.read_text())
    return table.get(triton.__version__, {}).get(target)


def codes(report: Report) -> list[str]:
    """Return the ptxas codes of a report's complaints, such as C7512."""
    return sorted({code for line in report.complaints for code in re.findall(r"C75\d\d", line) or [line]})


def wrong(job: Job, report: Report) -> list[str]:
    """Return what is wrong with a compiled kernel beyond its record, or an empty list."""
    if report.error is not None:
        return [report.error]
    found = []
    known = allowed(job.target)
    if known is not None:
        spills, *accepted = known.get(job.name, [0])
        found += [line for line in report.complaints if not any(code in line for code in accepted)]
        if report.spills > spills:
            found.append(f"spills {report.spills}, expected at most {spills}")
    if report.shared > TARGETS[job.target].machine.shared:
        found.append(f"shared memory {report.shared}, the GPU has {TARGETS[job.target].machine.shared}")
    if report.columns > TENSOR_MEMORY:
        found.append(f"tensor memory {report.columns}, the GPU has {TENSOR_MEMORY}")
    return found


def _readable(table: dict[str, dict[str, dict[str, list[Any]]]]) -> str:
    """Return a table as JSON with one line per job."""
    text = json.dumps(table, indent=1, sort_keys=True)
    return re.sub(r"\[\s+(.*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text, flags=re.S) + "\n"


def main() -> None:
    """Print a line per compiled kernel, the worst first; with --record write a new table of spills."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("part", nargs="?", default="", help="part of a specimen's or a kernel's name")
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    if asked.record and asked.part:
        parser.error("expected --record for all kernels: a part's table would replace the whole one")
    expected = []
    for name, specimen in SPECIMENS.items():
        for target in asked.target or specimen.targets:
            found = jobs_of_specimen(specimen, target)
            expected += [job for job in found if asked.part in name or asked.part in job.kernel.__name__]
    reports = compile_all(expected)
    for job, r in sorted(reports.items(), key=lambda item: (item[1].spills, item[1].registers), reverse=True):
        rest = r.error.splitlines()[-1] if r.error else " ".join(r.complaints)
        size = f"{r.spills:6} spilled {r.registers:4} regs {r.shared:7} B {r.columns:4} columns"
        print(size, f"{r.seconds:5.1f} s", job.target, job.name, rest)
    if asked.record:
        failed = [f"{job.name}: {r.error}" for job, r in reports.items() if r.error]
        if failed:
            # the table would list a failed kernel as one that spills nothing
            raise SystemExit("\n".join(failed))
        table = json.loads(TABLE.read_text())
        found = {job.target: {} for job in reports}
        for job, report in reports.items():
            if report.spills or report.complaints:
                found[job.target][job.name] = [report.spills, *codes(report)]
        table[triton.__version__] = found
        TABLE.write_text(_readable(table))


if __name__ == "__main__":
    main()
