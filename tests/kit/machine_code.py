"""Compare the machine code (SASS) of kernels between two checkouts: the gate of every refactoring of kernels.

    PYTHONPATH=.:tests python -m kit.machine_code dump FOLDER KERNEL...      in each checkout
    PYTHONPATH=.:tests python -m kit.machine_code compare A B [--rename old=new ...]

`dump` compiles the kernels of that name for all launches of the specimens, without a GPU, and
writes the SASS of each binary to FOLDER. `compare` prints the binaries that differ, and fails if there are
any. Line numbers are not part of the code, so a moved function is no difference. A binary is known by its
kernel's name, constants and signature: `--rename` replaces words of A's names by those of B.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


class Binary(NamedTuple):
    """Hold what a dump says of one compiled kernel."""

    name: str
    registers: int  # a thread
    sass: list[str]  # one line per instruction, with its encoding

    @property
    def opcodes(self) -> collections.Counter[str]:
        """Count the instructions by opcode, without predicates and modifiers."""
        texts = (re.sub(r"/\*[0-9a-f]+\*/|@!?U?P\w+", "", line).split() for line in self.sass)
        return collections.Counter(words[0].split(".")[0] for words in texts if words and words[0][0] != "/")

    @property
    def summary(self) -> str:
        """Return the size, registers, and accesses of local memory, which are spills."""
        counts = self.opcodes
        spilled = counts["STL"] + counts["LDL"]
        return f"{counts.total()} instructions, {self.registers} registers, {spilled} local loads and stores"


def instructions(text: str) -> list[str]:
    """Return the instruction lines of what cuobjdump prints: no names, no header."""
    return [line.strip() for line in text.splitlines() if re.match(r"\s+/\*", line)]


def _dump(job: Any, path: Path) -> None:
    import triton
    import triton.backends.nvidia

    from kit import compiling

    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.always_compile = True
        compiled = compiling._compile(job)
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        run = lambda option: subprocess.check_output([str(tool), option, str(cubin)], text=True)  # noqa: E731
        sass, usage = instructions(run("-sass")), run("-res-usage")
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    record = {"name": binary_name(job), "registers": registers, "sass": sass}
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=0))
    unfinished.rename(path)


_todo: list[tuple[Any, Path]] = []


def _dump_at(i: int) -> str:
    _dump(*_todo[i])
    return binary_name(_todo[i][0])


def binary_name(job: Any) -> str:
    """Return the name of a binary: all that it depends on but the source."""
    return f"{job.name} ({', '.join(job.signature)}) {dict(job.options)}"


def dump(folder: Path, kernels: list[str], target: str, workers: int) -> None:
    """Compile all binaries of some kernels (all, if none is named); those already in the folder are kept."""
    # before Triton is imported: without line numbers the code depends on the instructions alone
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    from kit.compiling import jobs_of_specimen
    from kit.specimens import SPECIMENS

    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for specimen in SPECIMENS.values():
        if target in specimen.targets:
            found |= {binary_name(job): job for job in jobs_of_specimen(specimen, target)}
    for name, job in found.items():
        path = folder / f"{job.kernel.__name__}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        if (not kernels or job.kernel.__name__ in kernels) and not path.exists():
            _todo.append((job, path))
    missing = set(kernels) - {job.kernel.__name__ for job in found.values()}
    if missing:
        raise SystemExit(f"expected kernels that a specimen launches for {target}, got {sorted(missing)}")
    # jobs hold kernels, which cannot be pickled: workers are forked and get an index
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for i, name in enumerate(pool.map(_dump_at, range(len(_todo)))):
            print(f"{i + 1}/{len(_todo)} {name[:100]}", flush=True)


def binaries(folder: Path, renamed: dict[str, str] | None = None) -> dict[str, Binary]:
    """Return the binaries of a dump by name, words of the names replaced."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        x = Binary(**json.loads(path.read_text()))
        name = re.sub(r"\w+", lambda word: (renamed or {}).get(word[0], word[0]), x.name)
        found[name] = x._replace(name=name)
    return found


def compare(a: Path, b: Path, renamed: dict[str, str] | None = None) -> list[str]:
    """Return a message for each binary that is in one dump only, or differs."""
    before, after = binaries(a, renamed), binaries(b)
    messages = [f"only in {a}: {name}" for name in before if name not in after]
    messages += [f"only in {b}: {name}" for name in after if name not in before]
    for name in before.keys() & after.keys():
        x, y = before[name], after[name]
        if x.sass != y.sass or x.registers != y.registers:
            kinds = "the same opcodes" if x.opcodes == y.opcodes else "other opcodes"
            messages.append(f"differs, {kinds}: {x.summary} -> {y.summary}: {name}")
    return sorted(messages)


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    dumps = commands.add_parser("dump")
    dumps.add_argument("folder", type=Path)
    dumps.add_argument("kernels", nargs="*")
    dumps.add_argument("--target", default="cuda:90")
    dumps.add_argument("--workers", type=int, default=os.cpu_count())
    compares = commands.add_parser("compare")
    compares.add_argument("a", type=Path)
    compares.add_argument("b", type=Path)
    compares.add_argument("--rename", nargs="+", default=[], metavar="old=new")
    asked = parser.parse_args()
    if asked.command == "dump":
        dump(asked.folder, asked.kernels, asked.target, asked.workers)
        return
    renamed = dict(pair.split("=") for pair in asked.rename)
    messages = compare(asked.a, asked.b, renamed)
    print(*messages, sep="\n")
    num_all = len(binaries(asked.a, renamed).keys() | binaries(asked.b).keys())
    print(f"{num_all - len(messages)} of {num_all} binaries have the same SASS")
    sys.exit(bool(messages) or num_all == 0)


if __name__ == "__main__":
    main()
