"""Time the first call in a new process with empty caches; count the compilations of other problems.

    python -m gdn_bench.timing.coldstart cold PROVIDER FOLDER SINCE    print JSON; FOLDER has the caches
    python -m gdn_bench.timing.coldstart warm PROVIDER JOB NAME...     run each problem, to fill caches

A compilation is counted by the folder of files that it leaves in a cache.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gdn.testing import accuracy
from gdn.testing.cases import Case, packed
from gdn.testing.tensors import Inputs
from gdn_bench.problems import jobs, packets
from gdn_bench.problems.catalog import MIXED, step
from gdn_bench.problems.packets import Packet
from gdn_bench.problems.workloads import WORKLOADS, Workload, choose_workloads
from gdn_bench.providers.load import load_provider
from gdn_bench.providers.provider import Provider
from gdn_bench.timing import hosttime
from gdn_bench.timing.processes import run_module
from gdn_bench.timing.settle import finish_background

FIRST = replace(MIXED, heads=(16, 32), lengths=packed(1024))
# the first problem, then others that reuse its kernels
RULE = {
    "first": FIRST,
    "another head count": replace(FIRST, heads=(4, 8)),
    "another batch": replace(FIRST, lengths=packed(1024, 1024, 1024)),
    "another length": replace(FIRST, lengths=packed(777)),
}
STEPS = {
    "first": step(8),
    "another head count": replace(step(8), heads=(4, 8)),
    "another batch": step(3),
}
# variables that name the caches of compilers and libraries
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUTE_DSL_CACHE_DIR")
LIMIT = 300  # seconds after which a child process is stopped


def cold(provider: str) -> dict[str, Any]:
    """Return seconds and compilations of the first and of other calls, measured in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name.lower())) for name in CACHES}
        done = _child(caches, "cold", provider, folder, str(time.time()))
    if done.returncode != 0:
        return {"error_message": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def warm(
    names: Iterable[str], workloads: Iterable[Workload], speculation: Iterable[Sequence[Packet]],
    with_host: bool, workers: int,
) -> float:  # fmt: skip
    """Compile what these workloads need; return the seconds that it took.

    One process runs for each provider, job and head count, and one for each group of packets.
    """
    start = time.perf_counter()
    tasks: list[tuple[str, str, list[str]]] = [(name, "host", []) for name in names] if with_host else []
    ordered = sorted(workloads, key=lambda t: (t.job, t.case.heads))
    for (job, _), group in groupby(ordered, key=lambda t: (t.job, t.case.heads)):
        wanted = [t.name for t in group]
        tasks += [(name, job, wanted) for name in names]
    tasks += [(name, "spec", [packet.name for packet in group]) for group in speculation for name in names]
    # FLA would cache tile sizes that it chose while other processes used the GPU
    environment = {"FLA_CACHE_RESULTS": "0"}
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda task: _child(environment, "warm", task[0], task[1], *task[2]), tasks))
    return time.perf_counter() - start


def _child(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this module in a new process with some environment variables set."""
    command = ["gdn_bench.timing.coldstart", *arguments]
    try:
        return run_module(command, LIMIT, variables=environment)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"longer than {LIMIT} s")


def _cold(name: str, folder: Path, since: float) -> dict[str, Any]:
    """Return seconds and compilations of each call, in the child. since: time.time() of the request."""
    provider = load_provider(name)
    if isinstance(provider, str):
        return {"absent": provider}
    # of Python, torch, gdn, gdn_bench and the provider
    measured: dict[str, Any] = {
        "start_s": time.time() - since,
        "ahead_s": 0.0,
        "seconds": {},
        "compilations": {},
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    before = _entries(folder)

    def note(what: str, run: Any) -> Any:
        nonlocal before
        start = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        measured["seconds"][what] = round(time.perf_counter() - start, 4)
        # the kernels of other sizes, which the background would compile after the first call
        start = time.perf_counter()
        finish_background()
        measured["ahead_s"] += round(time.perf_counter() - start, 4)
        now = _entries(folder)
        measured["compilations"][what] = now - before
        before = now
        return result

    for what, case in RULE.items():
        _differentiate(provider, what, case, device, note)
    for what, case in STEPS.items() if "decode" in provider.binds else ():
        given = jobs.sets("decode", jobs.given(case, device), 1)[0]
        note(f"{what}: decode", jobs.call(provider, "decode", given))
    return measured | {"ok": _is_right(provider, device)}


def _differentiate(provider: Provider, what: str, case: Case, device: torch.device, note: Any) -> None:
    given = jobs.given(case, device)
    if "train" not in provider.binds:
        note(f"{what}: forward", jobs.call(provider, "prefill", given))
        return
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items() if name in accuracy.GRADIENTS}
    bound = provider.binds["train"](given.tensors, given.options)
    outputs = note(f"{what}: forward", bound)
    gradients = [given.do, given.dfinal_state]
    note(f"{what}: backward", lambda: torch.autograd.grad(outputs, list(leaves.values()), gradients))


def _is_right(provider: Provider, device: torch.device) -> bool:
    """Return True if the first problem, run after all others, has errors within their limits."""
    job = "train" if "train" in provider.binds else "prefill"
    function, with_backward = provider.function(job), job == "train"
    judged = accuracy.check(
        function, RULE["first"], torch.bfloat16, device=device, with_backward=with_backward, budget=2**24
    )
    return all(row.ok for row in judged)


def _entries(folder: Path) -> int:
    """Return the number of folders with files: one for each compilation."""
    return len({path.parent for path in folder.rglob("*") if path.is_file()})


def _warm(name: str, job: str, names: list[str]) -> None:
    """Run each problem once, in the child."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provider = load_provider(name)
    if isinstance(provider, str):
        return
    for of, problem in _problems(job, names, device):
        try:
            jobs.call(provider, of, problem)()
        except Exception:
            # the pass itself has a row with the reason
            continue
    finish_background()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _problems(job: str, names: list[str], device: torch.device) -> Iterator[tuple[str, Inputs]]:
    if job == "spec":
        yield from packets.named(names, device)
        return
    is_decode = job == "decode"  # its names say rows and dtype; other jobs' are those of the catalog
    chosen = [x for x in WORKLOADS[job] if x.name in names] if is_decode else choose_workloads(job, names)
    cases = [(job, shortened(workload.case)) for workload in chosen]
    for of, case in hosttime.CASES.values() if job == "host" else cases:
        yield of, jobs.sets(of, jobs.given(case, device), 1)[0]


def shortened(case: Case) -> Case:
    """Return the case with at most 8192 tokens per sequence: up to there peers choose kernels by length."""
    if case.lengths.ends is None:
        return case
    T = case.lengths.T // case.lengths.N
    return replace(case, lengths=packed(*[min(T, 8192)] * case.lengths.N))


def main() -> None:
    """Run the command of a child process."""
    kind, name, *rest = sys.argv[1:]
    if kind == "cold":
        print(json.dumps(_cold(name, Path(rest[0]), float(rest[1]))))
    else:
        _warm(name, rest[0], rest[1:])


if __name__ == "__main__":
    main()
