"""Run a test's code in a process of its own, since compiled code may crash."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# settings of Inductor where a test makes a package
PACKAGING = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


def run(command: Sequence[str], cwd: Path = ROOT) -> None:
    """Run a command; raise with its output, and with C frames if it crashed and a debugger is there."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    said = f"exit status {done.returncode}\n{done.stderr[-6000:]}"
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    if done.returncode < 0 and debugger is not None:
        again = [debugger, "-batch", "-ex", "run", "-ex", "bt", "--args", *command]
        frames = subprocess.run(again, capture_output=True, text=True, cwd=cwd)
        said += f"\nagain, in a debugger:\n{frames.stdout[-6000:]}"
    assert done.returncode == 0, said


def shared_cxx(folder: Path) -> str:
    """Return the first C++ compiler whose libraries share the libstdc++ of the process that loads them.

    A compiler that links libstdc++ statically makes packages that crash: each copy numbers the facets of a
    locale, and AOTInductor's loader matches the name of a device with std::regex.
    """
    source, library = folder / "shared.cpp", folder / "shared.so"
    source.write_text("#include <string>\nstd::string twice(std::string x) { return x + x; }\n")
    found = [x for x in (os.environ.get("CXX"), "g++", "c++", "clang++") if x and shutil.which(x)]
    for compiler in found:
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        if b"libstdc++.so" in library.read_bytes():
            return compiler
    raise AssertionError(f"expected a C++ compiler that links libstdc++ as a shared library, got {found}")
