"""Test decode and prefill as programs on one state: exported, saved, run in a fresh process, compiled."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kit import api, forks, processes
from kit.serving import error, inputs

from gdn.integrations import export as room
from gdn.ops import portable
from gdn.reference.recurrence import gated_delta_rule as reference

B, H, HV, K, V = 2, 2, 4, 16, 24
FRESH = """
import sys, torch, gdn
from gdn.integrations.export import load
folder = sys.argv[1]
given, state = torch.load(folder + "/given.pt")
programs = {name: torch.export.load(f"{folder}/{name}.pt2") for name in ("decode", "prefill")}
loaded = load(programs, state)
torch.save(([getattr(loaded, name)(*x) for name, x in given], loaded.state), folder + "/found.pt")
"""
COMPILE = """
import sys, torch
folder, device, kind = sys.argv[1:]
sys.path.insert(0, "tests")
import test_integrations_export as of

torch.manual_seed(0)
s = of.session(device, getattr(torch, kind))
print("compiling", file=sys.stderr, flush=True)
with torch._inductor.config.patch(of.processes.PACKAGING):
    of.room.package(of.room.export(s), folder + "/both.pt2")
given, state = of.calls(s), of.nan_state(s)
torch.save((given, state, of.run_session(s, given, state)), folder + "/given.pt")
"""
LOAD = """
import sys, torch
from gdn.integrations.export import load
folder, kind = sys.argv[1:]
sys.path.insert(0, "tests")
import test_integrations_export as of

print("loading", file=sys.stderr, flush=True)
given, state, wanted = torch.load(folder + "/given.pt")
loaded, found = load(folder + "/both.pt2", state), []
for name, x in given:
    print(name, [tuple(t.shape) for t in x], file=sys.stderr, flush=True)
    found.append(getattr(loaded, name)(*x))
    if state.is_cuda:
        torch.cuda.synchronize()
print("compared", file=sys.stderr, flush=True)
assert of.agree((found, state), wanted, 1e-5 if kind == "float32" else 5e-3)
assert not of.agree((found, state * 1.01), wanted, 5e-3) and loaded.state is state
"""
RUNNER = """
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <fstream>

std::vector<at::Tensor> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<at::Tensor> tensors;
  auto all = torch::jit::pickle_load(bytes);
  for (const auto& value : all.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

int main(int argc, char** argv) {
  std::string folder = argv[1];
  auto given = read(folder + "/tensors.pt");  // state, then three inputs for each step
  torch::inductor::AOTIModelPackageLoader model(folder + "/decode.pt2");
  std::unordered_map<std::string, at::Tensor> constants{{"session.state", given[0]}};
  model.load_constants(constants, false, false, true);
  std::vector<at::Tensor> found;
  for (size_t i = 1; i < given.size(); i += 3)
    found.push_back(model.run({given[i], given[i + 1], given[i + 2]})[0]);
  found.push_back(given[0]);
  auto bytes = torch::jit::pickle_save(found);
  std::ofstream(folder + "/found.pt", std::ios::binary).write(bytes.data(), bytes.size());
}
"""


def session(device="cpu", dtype=torch.float32, state_dtype=torch.float32):
    return room.Session(
        B, H, HV, K, V, torch.randn(HV), torch.randn(HV), dtype=dtype, state_dtype=state_dtype, device=device
    )


def calls(s, lengths=(70, None, None, 5, None)):
    """Return (method, inputs) of prompts and single tokens in turn; the second prompt starts one row anew."""
    found = []
    for number, T in enumerate(lengths):
        lead = (B,) if T is None else (B, T)
        x = [torch.randn(*lead, n).to(s.dtype) for n in (s.channels, HV, HV)]
        if T is not None:
            x.append(torch.tensor([True, True]) if number == 0 else torch.tensor([False, True]))
        found.append(("decode" if T is None else "prefill", tuple(t.to(s.state.device) for t in x)))
    return found


def run_session(s, given, state):
    """Return the outputs and the state of the session itself."""
    s.state.copy_(state)
    with torch.no_grad():
        return [getattr(s, name)(*x) for name, x in given], s.state.clone()


def agree(found, expected, tolerance=1e-6):
    pairs = zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True)
    return all(error(a, b) < tolerance for a, b in pairs)


def nan_state(s):
    return torch.full_like(s.state, float("nan"))


def test_a_session_agrees_with_the_reference():
    s = session()
    given = calls(s, (6, None, None))
    (prompt, *steps), state = run_session(s, given, nan_state(s))
    x = [torch.cat([given[0][1][i], *(x[i][:, None] for _, x in given[1:])], 1) for i in range(3)]
    q, k, v = x[0].split([H * K, H * K, HV * V], -1)
    o, S = reference(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), x[1], x[2], A_log=s.A_log,
        dt_bias=s.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert error(torch.cat([prompt, *(y[:, None] for y in steps)], 1), o) < 1e-5 and error(state, S) < 1e-5


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_programs_share_one_state(state_dtype):
    """One program handles any number of tokens, and writes the state in place."""
    s = session(state_dtype=state_dtype)
    programs, state = room.export(s), nan_state(s)
    assert room.needs_library(programs["decode"]) == ["gdn.decode_functional.default"]
    loaded = room.load(programs, state)
    given = calls(s, (70, None, 2, None, 130))
    found = [getattr(loaded, name)(*x) for name, x in given]
    expected = run_session(s, given, nan_state(s))
    assert loaded.state is state and agree((found, state), expected)
    assert not agree((found, state * 1.01), expected)


def test_a_fresh_process_runs_saved_programs(tmp_path):
    s = session()
    given = calls(s)
    for name, program in room.export(s).items():
        torch.export.save(program, tmp_path / f"{name}.pt2")
    torch.save((given, nan_state(s)), tmp_path / "given.pt")
    forks.run("-c", FRESH, str(tmp_path))
    assert agree(torch.load(tmp_path / "found.pt"), run_session(s, given, nan_state(s)))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gates", ["raw", "active", "none"])
def test_portable_decode_is_the_operator(v_first, gates):
    x = inputs(3, 1, raw=gates == "raw")
    x = {name: value for name, value in x.items() if gates != "none" or name in "qkv"}
    state = torch.randn(3, 4, *((24, 16) if v_first else (16, 24)))
    options = {"state_v_first": v_first, "allow_neg_eigval": gates == "raw"}
    expected = api.decode_functional(**x, state=state, **options)
    names = ("g", "beta", "a", "b", "A_log", "dt_bias")
    rest = (None, None, 16**-0.5, None, True, gates == "raw", v_first, "final", None, False, True, None)
    got = portable.decode_functional(x["q"], x["k"], x["v"], state, *(x.get(n) for n in names), *rest)
    assert all(error(a, b) < 1e-6 and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    with pytest.raises(NotImplementedError, match="one token per row"):
        packet = inputs(3, 2)
        portable.decode_functional(packet["q"], packet["k"], packet["v"], state, *[None] * 6, *rest)


def test_a_portable_program_needs_no_library():
    s = session()
    programs = room.export(s, portable=True)
    assert room.needs_library(programs["decode"]) == [] != room.needs_library(programs["prefill"])
    given = calls(s)
    state = nan_state(s)
    loaded = room.load(programs, state)
    found = [getattr(loaded, name)(*x) for name, x in given]
    assert agree((found, state), run_session(s, given, nan_state(s)))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@needs_compiler
def test_a_package_runs_from_cpp(tmp_path, packager):
    """A package of decode runs in a process that has neither this library nor Python."""
    (tmp_path / "runner.cpp").write_text(RUNNER)
    root = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O0",
        f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include",
        f"-L{root}/lib",
    ]
    flags += [f"-Wl,-rpath,{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiler = subprocess.Popen(["g++", str(tmp_path / "runner.cpp"), "-o", str(tmp_path / "runner"), *flags])
    s = session()
    program = room.export(s, portable=True)["decode"]
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decode.pt2"))
    given, state = calls(s, (None, None, None)), torch.randn_like(s.state)
    expected = run_session(s, given, state)
    tensors = [state, *(t for _, x in given for t in x)]
    (tmp_path / "tensors.pt").write_bytes(torch._C._pickle_save(tensors))
    assert compiler.wait() == 0
    processes.run([str(tmp_path / "runner"), str(tmp_path)])
    *found, state = torch._C._pickle_load_obj((tmp_path / "found.pt").read_bytes())
    assert agree((found, state), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, kind",
    [
        pytest.param("cpu", "float32", marks=needs_compiler),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_both_methods_in_one_package_in_a_fresh_process(tmp_path, packager, device, kind):
    """A package compiled in one process runs in another; both methods write the state that the caller gave.

    On a GPU the package holds the kernel of decode. If compiled code crashes, the message says what ran last.
    """
    forks.run("-c", COMPILE, str(tmp_path), device, kind)
    forks.run("-c", LOAD, str(tmp_path), kind)
