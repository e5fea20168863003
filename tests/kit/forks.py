"""Run Python code in a fresh process that need not import torch: a server has imported it, and forks.

    forks.python("-c", "import gdn; print(gdn.__version__)")      as subprocess.run([sys.executable, ...])

The process has its own environment, folder, arguments and module search path, and ends as an interpreter
does. Of the packages it has torch alone: not gdn, Triton or Transformers, unless torch imports them.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kit import processes

# the child returns from `fork_tasks` and runs at the top level, so that the interpreter ends as always
SERVER = """
import faulthandler, json, os, runpy, subprocess, sys, types
import torch

faulthandler.enable()

def fork_tasks():
    # of an interpreter without PYTHONPATH: this one has a folder of both once
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    rest = json.loads(subprocess.run([sys.executable, "-E", "-c", code], capture_output=True).stdout)
    replies = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, file=replies, flush=True)
            print(os.waitpid(pid, 0)[1], file=replies, flush=True)
            continue
        os.chdir(task["cwd"])
        os.environ.clear()
        os.environ.update(task["env"])
        replies.close()
        for number, name in ((0, os.devnull), (1, task["out"]), (2, task["err"])):
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        sys.stdin = open(0, closefd=False)
        first, *arguments = task["arguments"]
        named = first in ("-c", "-m")
        lead = "" if first == "-c" else os.getcwd() if named else os.path.dirname(os.path.abspath(first))
        path = filter(None, task["env"].get("PYTHONPATH", "").split(os.pathsep))
        # a folder of both is there once, as in an interpreter
        sys.path[:] = [lead, *dict.fromkeys([*map(os.path.abspath, path), *rest])]
        sys.argv[:] = [first, *arguments[named:]]
        return first, arguments[0] if named else first
    os._exit(0)

_how, _what = fork_tasks()
if _how == "-c":
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(_what, "<string>", "exec"), vars(sys.modules["__main__"]))
elif _how == "-m":
    runpy.run_module(_what, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(_what, run_name="__main__")
"""


@functools.cache
def _server() -> tuple[Any, Any]:
    """Start the server of this process; return the file of its tasks and that of its replies."""
    receive, send = os.pipe()
    command = [sys.executable, "-c", SERVER, str(send)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=(send,))
    os.close(send)
    assert server.stdin is not None
    # the server ends with its standard input
    atexit.register(lambda: (server.stdin.close(), server.wait()))  # type: ignore[union-attr]
    # without a buffer, which could hold a status that `select` waits for
    return server.stdin, os.fdopen(receive, "rb", buffering=0)


def python(
    *arguments: str,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    check: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run an interpreter with these arguments, first `-c`, `-m` or a script, and return its outcome."""
    tasks, replies = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        task = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "out": str(out), "err": str(err)}
        print(json.dumps(task | {"env": dict(os.environ) if env is None else env}), file=tasks, flush=True)
        pid = int(replies.readline())
        if not select.select([replies], [], [], timeout)[0]:
            # the status comes as always
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(int(replies.readline()))
        command = [sys.executable, *arguments]
        done = subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())
    if check:
        done.check_returncode()
    return done


def run(*arguments: str) -> None:
    """Run an interpreter in the root; raise with its errors, after a crash with those of `processes.run`."""
    done = python(*arguments, cwd=processes.ROOT)
    if done.returncode < 0:
        processes.run([sys.executable, "-X", "faulthandler", *arguments])
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-6000:]}"
