"""Check that compiled kernels travel: saved by one process, used by another, refused where none would fit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import gdn
from gdn.backends.triton.launch import (
    Launch,
    binaries,
    identity,
    kernel,
    kernels,
    launches,
    parallel,
    saved,
)

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


class Gpu:
    """Stand for an H100: it compiles kernels and loads their binaries, and its launches are recorded."""

    def __init__(self, monkeypatch):
        self.compiled, self.loaded, self.launched = 0, [], []
        monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "a Triton")
        monkeypatch.setattr(saved, "PACKAGE", __name__)
        for name, value in {
            "is_available": True,
            "current_device": 0,
            "get_device_capability": (9, 0),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        target = GPUTarget("cuda", 90, 32)
        utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (1, (name, binary), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )
        active = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_target=lambda: target,
            launcher_cls=self.load,
            utils=utils,
        )
        monkeypatch.setattr(type(triton.runtime.driver), "active", active)
        # kernels are compiled where they are dispatched
        monkeypatch.setattr(launches, "compile_all", lambda steps: [])
        monkeypatch.setattr(Launch, "_dispatch", lambda one, tensors: self.compile(one))
        self.start_process(monkeypatch)

    def start_process(self, monkeypatch):
        """Forget what a process knows of saved kernels."""
        monkeypatch.setattr(saved, "_indices", {})
        monkeypatch.setattr(saved, "_binaries", {})

    def compile(self, launch):
        self.compiled += 1
        source = ASTSource(launch.kernel, {"x_ptr": "*fp32", "N": "constexpr"}, {"N": launch.constants["N"]})
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))

    def load(self, source, metadata):
        self.loaded.append((dict(source.signature), source.constants, metadata.name))
        return lambda *given: self.launched.append(given)


def add_one(n=64):
    # as a new process declares it: its source is not read yet
    return Launch(kernel(_add_one_kernel.fn), 3, (), {"N": n}, 4)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Return a GPU for whose kernels a folder was saved and installed."""
    gpu = Gpu(monkeypatch)
    with binaries.separate_cache(tmp_path / "first"):
        add_one()(torch.zeros(64))
    assert binaries.pack(tmp_path / "first", tmp_path / "saved") == gpu.compiled == 1
    gpu.start_process(monkeypatch)
    with binaries.separate_cache(tmp_path / "second"):
        gdn.load_kernels(tmp_path / "saved")
        gpu.compiled, gpu.loaded = 0, []
        yield gpu


def test_a_saved_kernel_is_launched_without_triton(gpu, monkeypatch):
    """Its launcher has the arguments that Triton's would have, and each later launch is the same."""
    launch, x = add_one(), torch.zeros(64)
    assert saved.is_saved(launch, (x,)) and not gpu.loaded
    for _ in range(2):
        launch(x)
    assert gpu.compiled == 0 and gpu.loaded == [
        ({"x_ptr": "*fp32", "N": "constexpr"}, {(1,): 64}, "_add_one_kernel")
    ]
    assert gpu.launched[-1] == gpu.launched[-2] and gpu.launched[-1][:4] == (3, 1, 1, 7)
    assert gpu.launched[-1][-2:] == (x.data_ptr(), None)
    assert isinstance(launch.kernel, kernels.Unread)
    # another process has the index in the cache, with no call of load_kernels
    gpu.start_process(monkeypatch)
    add_one()(x)
    assert gpu.compiled == 0 and len(gpu.loaded) == 2
    compiled = []
    monkeypatch.setattr(Launch, "compile", lambda one, tensors: compiled.append(one.constants["N"]))
    assert parallel.compile_all([(add_one(), (x,)), (add_one(32), (x,))]) == [] and compiled == [32]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(identity, "_source_hash", lambda: "another source"),
        lambda patch: patch.setattr(identity, "_compiler_hash", lambda: "another Triton"),
        lambda patch: patch.setattr(triton, "__version__", "3.6.9"),
        lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0)),
        lambda patch: patch.setattr(torch.version, "hip", "6.4"),
        lambda patch: patch.setattr(triton.knobs.runtime, "debug", True),
        lambda patch: patch.setattr(saved, "PACKAGE", "gdn.backends."),
    ],
    ids=["source", "compiler", "triton", "gpu", "hip", "debug", "package"],
)
def test_a_saved_kernel_serves_nothing_else(gpu, monkeypatch, change):
    monkeypatch.setattr(gpu, "compile", lambda launch: None)
    gpu.start_process(monkeypatch)
    with monkeypatch.context() as patch:
        change(patch)
        assert saved.find_binary(add_one(), (torch.zeros(64),)) is None
    gpu.start_process(monkeypatch)
    assert saved.find_binary(add_one(), (torch.zeros(64),)) is not None


def delete(folder, pattern):
    for path in folder.rglob(pattern):
        path.unlink()


def empty_the_index(folder):
    (folder / saved.ENTRY / saved.INDEX).write_text("")


def move(folder):
    """Leave a copy of the cache, whose groups name files of a folder that is gone."""
    shutil.move(folder, folder.with_name("elsewhere"))
    shutil.copytree(folder.with_name("elsewhere"), folder)
    for path in folder.rglob("__grp__*"):
        path.write_text(path.read_text().replace(str(folder), str(folder.with_name("gone"))))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: delete(folder, "_add*.json"),
        lambda folder: delete(folder, "*.cubin"),
        empty_the_index,
        move,
    ],
    ids=["no metadata", "no binary", "torn index", "moved"],
)
def test_what_a_damaged_cache_lacks_is_compiled(gpu, tmp_path, monkeypatch, damage):
    """And the folder repairs the cache."""
    damage(tmp_path / "second")
    gpu.start_process(monkeypatch)
    assert not saved.is_saved(add_one(), (torch.zeros(64),))
    assert saved.find_binary(add_one(), (torch.zeros(64),)) is None
    gdn.load_kernels(tmp_path / "saved")
    gpu.start_process(monkeypatch)
    add_one()(torch.zeros(64))
    assert gpu.compiled == 0 and len(gpu.loaded) == 1


def test_a_cache_that_cannot_be_written_has_no_index(gpu, monkeypatch):
    def refuse(entry):
        raise PermissionError(entry)

    gpu.start_process(monkeypatch)
    monkeypatch.setattr(saved, "_manager", refuse)
    assert saved.find_binary(add_one(), (torch.zeros(64),)) is None


@pytest.mark.parametrize("source", ["same", "edited"])
def test_only_binaries_of_one_source_are_saved(tmp_path, monkeypatch, source):
    gpu, before = Gpu(monkeypatch), identity._source_hash()
    with binaries.separate_cache(tmp_path / "first"):
        add_one()(torch.zeros(64))
    monkeypatch.setattr(identity, "_source_hash", lambda: before if source == "same" else source)
    if source == "same":
        assert binaries.pack(tmp_path / "first", tmp_path / "saved") == gpu.compiled
    else:
        with pytest.raises(ValueError, match="kernels: expected the source that they were compiled from"):
            binaries.pack(tmp_path / "first", tmp_path / "saved")


def test_binaries_that_triton_was_told_to_change_are_not_in_the_index(tmp_path, monkeypatch):
    Gpu(monkeypatch)
    with triton.knobs.runtime.scope(), binaries.separate_cache(tmp_path / "first"):
        triton.knobs.runtime.debug = True
        add_one()(torch.zeros(64))
    assert json.loads((tmp_path / "first" / saved.INDEX).read_text())["launches"] == {}


@pytest.mark.parametrize("name", ["TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"])
def test_another_assembler_counts(tmp_path, monkeypatch, name):
    before = identity._compiler_hash.__wrapped__()
    (tmp_path / "ptxas").write_text("another assembler")
    monkeypatch.setenv(name, str(tmp_path / "ptxas"))
    assert identity._compiler_hash.__wrapped__() != before


def test_options_of_the_environment_count(monkeypatch):
    before = identity._compiler_hash.__wrapped__()
    options = identity.CUDAOptions
    monkeypatch.setattr(
        identity, "CUDAOptions", lambda **given: options(ptx_options="--opt-level 0", **given)
    )
    assert identity._compiler_hash.__wrapped__() != before


def test_a_launch_of_another_kind_has_another_key():
    x, other = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)

    def launch(*scalars, warps=4, **constants):
        return Launch(saved_kernel, 1, scalars, constants, warps, options=constants.pop("options", {}))

    saved_kernel = SimpleNamespace(fn=SimpleNamespace(__module__="gdn.backends.x", __qualname__="kernel"))
    keys = [
        saved.launch_key(*given)
        for given in (
            (launch(N=1), (x,)),
            (launch(N=True), (x,)),
            (launch(N=1.0), (x,)),
            (launch(N=None), (x,)),
            (launch(N=triton_lang.float32), (x,)),
            (launch(M=1), (x,)),
            (launch(N=1), (other,)),
            (launch(N=1), (None,)),
            (launch(N=1, warps=8), (x,)),
            (launch(N=1, options={"maxnreg": 128}), (x,)),
            (launch(1, N=1), (x,)),
            (launch(1.0, N=1), (x,)),
            (launch(None, N=1), (x,)),
        )
    ]
    assert len(set(keys)) == len(keys) and None not in keys
    assert saved.launch_key(launch(2, N=1), (x[16:],)) == keys[10]
    for given in ((launch(2**31, N=1), (x,)), (launch(N=x), (x,))):
        assert saved.launch_key(*given) is None


@pytest.mark.parametrize("change", ["", "#"], ids=["same", "changed"])
def test_every_file_of_triton_counts(monkeypatch, change):
    before, read_bytes = identity._compiler_hash.__wrapped__(), Path.read_bytes
    is_jit = lambda path: path.parts[-2:] == ("runtime", "jit.py")  # noqa: E731
    more = lambda path: read_bytes(path) + (change.encode() if is_jit(path) else b"")  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", more)
    assert (identity._compiler_hash.__wrapped__() == before) is not bool(change)


@pytest.mark.parametrize("missing", ["list", "size"])
def test_libraries_without_a_list_are_hashed(monkeypatch, missing):
    monkeypatch.setattr(identity, "triton_key", lambda: hashed.append(1) or "a Triton")
    hashed = []
    text = identity.distribution("triton").read_text("RECORD")
    record = None if missing == "list" else text.replace("libtriton.so,sha256", "libtriton.so,md5")
    identity._compiler_hash.__wrapped__()
    assert not hashed or not text
    monkeypatch.setattr(identity, "distribution", lambda name: SimpleNamespace(read_text=lambda name: record))
    identity._compiler_hash.__wrapped__()
    assert hashed


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
    (kept, compiled), (loaded, missed) = counts
    # with the index, no launch comes to Triton's compiler
    assert kept == compiled > 3 and loaded == missed == 0, counts
    assert torch.cuda.is_available()
