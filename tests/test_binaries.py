"""Check that compiled kernels travel: saved by one process, used by another, refused where none would fit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gdn
from gdn.backends.triton.launch import binaries, kernel

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled for the interpreter"
)
triton_lang = triton.language


@kernel
def _add_one_kernel(x_ptr, N: triton_lang.constexpr):
    i = triton_lang.arange(0, N)
    triton_lang.store(x_ptr + i, triton_lang.load(x_ptr + i) + 1)


def compile_for_hopper():
    source = ASTSource(_add_one_kernel, {"x_ptr": "*fp32", "N": "constexpr"}, {"N": 64})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with one kernel, whose cache is gone."""
    # the hash of Triton's 400 MB is not what is tested
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "a Triton")
    cache, folder = tmp_path / "first", tmp_path / "saved"
    with binaries.separate_cache(cache):
        compile_for_hopper()
    assert binaries.pack(cache, folder) == 1
    shutil.rmtree(cache)
    return folder


def test_a_saved_kernel_is_not_compiled_again(folder, tmp_path, monkeypatch):
    def make_ir(*args, **options):
        raise AssertionError("expected no kernel to be traced")

    monkeypatch.setattr(ASTSource, "make_ir", make_ir)
    with binaries.separate_cache(tmp_path / "second"):
        with pytest.raises(AssertionError, match="expected no kernel to be traced"):
            compile_for_hopper()
        assert gdn.load_kernels(folder) == 1
        shutil.rmtree(folder)
        assert set(compile_for_hopper().asm) == {"cubin"}


def test_what_the_cache_holds_is_kept(folder, tmp_path):
    with binaries.separate_cache(tmp_path / "second"):
        gdn.load_kernels(str(folder))
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "second").rglob("*.cubin")}
        assert len(files) == 1
        gdn.load_kernels(folder)
        assert {path: path.stat().st_mtime_ns for path in files} == files


@pytest.mark.parametrize("name", ["triton", "python", "kernels", "gpu"])
def test_a_folder_for_something_else_is_refused(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        binaries, "identity", lambda was=binaries.identity: {**was(), "gpu": "cuda:90", name: "other"}
    )
    manifest = json.loads((folder / binaries.MANIFEST).read_text())
    manifest["gpu"] = "cuda:90"
    (folder / binaries.MANIFEST).write_text(json.dumps(manifest))
    with (
        binaries.separate_cache(tmp_path / "second"),
        pytest.raises(
            ValueError, match=f"folder: expected kernels for {name} other, got {name} {manifest[name]}"
        ),
    ):
        gdn.load_kernels(folder)
    assert not (tmp_path / "second").exists()


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"folder: expected one written by `gdn warmup --save`"):
        gdn.load_kernels(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"folder: expected an empty or new one, got files in"):
        binaries.pack(tmp_path, tmp_path)


def test_the_source_of_the_kernels_is_in_the_manifest(monkeypatch):
    before = binaries.identity()
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"#")
    after = binaries.identity()
    assert {name for name in before if before[name] != after[name]} == {"kernels"}


CALLS = """
import sys, torch, triton, gdn
from gdn.backends.triton.launch import binaries
compiled = []
def listen(*, cache_hit, metadata, **rest):
    compiled.append((metadata["name"], cache_hit))
triton.knobs.compilation.listener = listen
def run():
    x = [torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    gdn.chunk_gated_delta_rule(*x, backend="triton")
    pool = torch.zeros(4, 2, 64, 64, device="cuda")
    gdn.decode(*(y[:, :1] for y in x), pool)
    torch.cuda.synchronize()
folder = __import__("pathlib").Path(sys.argv[2])
if sys.argv[1] == "save":
    with binaries.separate_cache(folder.parent / "cache"):
        run()
    binaries.pack(folder.parent / "cache", folder)
else:
    triton.knobs.cache.dir = str(folder.parent / "other")
    gdn.load_kernels(folder)
    run()
print(len(compiled), sum(not hit for _, hit in compiled))
"""


@pytest.mark.gpu
def test_another_process_compiles_nothing(tmp_path):
    counts = []
    for way in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-c", CALLS, way, str(tmp_path / "saved")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append([int(x) for x in done.stdout.split()])
    (saved, compiled), (loaded, missed) = counts
    assert saved == compiled == loaded > 3 and missed == 0, counts
    assert torch.cuda.is_available()
