"""Test exported programs, and packages that run without this library."""

import builtins
import dis
import importlib
import sys

import pytest
import torch
from conftest import INTERPRETED
from kit import api, processes
from kit.serving import moved, pool_of, same_bits

H, HV, K, V = 2, 4, 128, 128
RUN = """
import sys
import torch

sys.modules["gdn"] = None
package, given, found = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
torch.save([model(*x) for x in torch.load(given)], found)
"""


class PackedStep(torch.nn.Module):
    """Compute the part of a layer that follows its convolution, as a function of the state."""

    def forward(self, mixed, a, b, A_log, dt_bias, state):
        q, k, v = (x.unsqueeze(1) for x in mixed.split([H * K, H * K, HV * V], 1))
        q, k, v = q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V))
        a, b = a.unsqueeze(1), b.unsqueeze(1)
        o, new = api.decode_functional(q, k, v, state, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
        return o.squeeze(1), new


def arguments(rows, device, dtype=torch.bfloat16, state=torch.float32):
    """Return mixed, a, b, A_log, dt_bias and one state per row."""
    heads = torch.randn(HV), torch.randn(HV)
    gates = torch.randn(rows, HV), torch.randn(rows, HV)
    x = torch.randn(rows, 2 * H * K + HV * V).to(dtype), *gates, *heads
    x = dict(enumerate((*x, pool_of(rows, HV=HV, K=K, V=V, dtype=state))))
    return tuple(moved(x, device).values())


def export_step(example):
    batch = torch.export.Dim("batch", min=1, max=64)
    dynamic = [{0: batch}, {0: batch}, {0: batch}, None, None, {0: batch}]
    return torch.export.export(PackedStep(), example, dynamic_shapes=dynamic)


def decode_in_place(x, backend=None):
    """Return the output and the state of `decode_packed`, which works in place."""
    *rest, state = x
    state = state.clone()
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return api.decode_packed(*rest, state, **sizes, backend=backend), state


@pytest.mark.skipif(INTERPRETED, reason="expected kernels to be compiled")
@pytest.mark.parametrize("name", ["decode", "packet"])
def test_the_source_that_inductor_copies_is_complete(tmp_path, monkeypatch, name):
    """Find each name of the kernel and of what it calls in the file that Inductor writes for it."""
    pytest.importorskip("triton")
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
    from triton.runtime.jit import JITFunction

    kernel = getattr(importlib.import_module(f"gdn.backends.triton.serving.{name}"), f"{name}_kernel")
    source = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    (tmp_path / f"copied_{name}.py").write_text(head + source)
    monkeypatch.syspath_prepend(tmp_path)
    copied = vars(importlib.import_module(f"copied_{name}"))
    functions = [x for x in copied.values() if isinstance(x, JITFunction)]
    used = {x.argval for f in functions for x in dis.get_instructions(f.fn) if x.opname == "LOAD_GLOBAL"}
    assert len(functions) > 3 and used <= {*copied, *dir(builtins)}


def test_an_exported_program_keeps_the_operator():
    """A program holds gdn's operator, which selects the backend where the program runs."""
    program = export_step(arguments(3, "cpu"))
    assert any(node.target is torch.ops.gdn.decode_functional.default for node in program.graph.nodes)
    for rows in (1, 5):
        x = arguments(rows, "cpu")
        assert all(same_bits(a, b) for a, b in zip(program.module()(*x), decode_in_place(x), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_a_package_runs_without_this_library(tmp_path, packager, state):
    """AOTInductor puts the kernel into the package, and the kernel gives the bits of `decode`."""
    package, given, found = (str(tmp_path / name) for name in ("decode.pt2", "given.pt", "found.pt"))
    torch._inductor.aoti_compile_and_package(
        export_step(arguments(3, "cuda", state=state)), package_path=package
    )
    batches = [arguments(rows, "cuda", state=state) for rows in (1, 3, 17)]
    torch.save(batches, given)
    processes.run([sys.executable, "-X", "faulthandler", "-c", RUN, package, given, found], tmp_path)
    for x, got in zip(batches, torch.load(found), strict=True):
        assert all(same_bits(a, b) for a, b in zip(got, decode_in_place(x, "triton"), strict=True))


@pytest.mark.gpu
def test_compiled_by_inductor():
    step = torch.compile(PackedStep(), fullgraph=True, dynamic=True)
    for rows in (2, 5):
        x = arguments(rows, "cuda")
        assert all(same_bits(a, b) for a, b in zip(step(*x), decode_in_place(x), strict=True))
