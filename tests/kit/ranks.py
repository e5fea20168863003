"""Start the ranks of a process group on this machine, and run functions on all of them.

One start serves many functions. The ranks are forked from a server process that has imported torch and gdn
once and has no threads. They meet in a file, so no port is needed. A function that takes longer than the
limit ends its rank with the stacks of its threads on stderr. Ranks end when their parent does. With NCCL
each rank has a GPU of its own.
"""

import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

LIMIT = 30  # seconds that one function may take on a rank, the start apart
START = 120  # seconds until all ranks have imported torch: a loaded machine has two cores


class Ranks:
    """Hold the ranks of a process group. `run` calls a function of a test module on each of them.

    timeout  seconds of the process group
    kind     gloo, or nccl
    """

    def __init__(self, num_ranks: int, timeout: float = LIMIT, kind: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self.is_sound = True  # False: a function failed, and the group may be out of step
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "torch._dynamo", "gdn", "kit.ranks"]
        )
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            arguments = (rank, num_ranks, kind, self.folder.name, timeout, there, list(sys.path))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        for rank in range(num_ranks):
            self._receive(rank, START)

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Return function(rank, *args) of every rank; raise with the traceback of each rank that raised."""
        outcomes = self.outcomes(function, *args, limit=limit)
        errors = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        self.is_sound = not errors
        assert not errors, "\n".join(errors)
        return [value for _, value in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, limit: float = LIMIT, only: list[int] | None = None
    ) -> list[tuple[bool, Any]]:
        """Return (True, result) or (False, traceback) of every rank, or of some."""
        chosen = range(self.num_ranks) if only is None else only
        for rank in chosen:
            with suppress(OSError):
                self.pipes[rank].send((function, args, limit))
        return [self._receive(rank, limit + 10) for rank in chosen]

    def _receive(self, rank: int, seconds: float) -> tuple[bool, Any]:
        pipe, process = self.pipes[rank], self.processes[rank]
        try:
            if pipe.poll(seconds):
                return pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            said = (Path(self.folder.name) / f"stderr{rank}").read_text()[-4000:]
            return False, f"ended with exit code {process.exitcode}\n{said}"
        return False, f"no answer within {seconds} s"

    def close(self) -> None:
        """End the ranks: politely, then by force."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def share_ranks(held: list[Ranks], *arguments: Any) -> Ranks:
    """Return the ranks that tests share: new ones after a failure, which may leave one in a collective."""
    if held and not held[0].is_sound:
        held.pop().close()
    if not held:
        held.append(Ranks(*arguments))
    return held[0]


def seconds(number: float) -> datetime.timedelta:
    """Return a timeout of a process group."""
    return datetime.timedelta(seconds=number)


@contextmanager
def started(num_ranks: int, timeout: float = LIMIT, kind: str = "gloo") -> Iterator[Ranks]:
    """Yield so many ranks, and end them."""
    ranks = Ranks(num_ranks, timeout, kind)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(
    rank: int, num_ranks: int, kind: str, folder: str, timeout: float, pipe: Any, path: list[str]
) -> None:
    """Run the functions that come through the pipe until it says None."""
    sys.path[:] = path
    stderr = open(Path(folder) / f"stderr{rank}", "w")  # noqa: SIM115 - open for the life of the process
    os.dup2(stderr.fileno(), 2)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    options: dict[str, Any] = {}
    if kind == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        kind, rank=rank, world_size=num_ranks, store=store, timeout=seconds(timeout), **options
    )
    pipe.send((True, None))
    while (task := pipe.recv()) is not None:
        function, args, limit = task
        faulthandler.dump_traceback_later(limit, exit=True)
        torch.manual_seed(0)
        try:
            outcome = True, function(rank, *args)
        except BaseException:
            outcome = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)
    os._exit(0)


def _end_with(parent: int) -> None:
    """End this process as soon as its parent has ended: the server of forks, which ends with the tests."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
