"""Launching past Triton's Python code: the same arguments, each descriptor encoded once for each address."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from conftest import INTERPRETED
from kit.hopper import on_hopper
from triton.experimental.gluon import language as gl

import gdn
from gdn.backends.backend import Saved
from gdn.backends.hopper import rule
from gdn.backends.hopper.backward import cost as backward_cost
from gdn.backends.hopper.backward import plan
from gdn.backends.hopper.descriptors import make_descriptor
from gdn.backends.triton import launch
from gdn.backends.triton.launch import Launch, LaunchSequence, PlanCache, launcher, launches
from gdn.problem import parse
from gdn.testing import Case, inputs, packed, rows

driver = pytest.importorskip("triton.backends.nvidia.driver")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="expected kernels to be launched, not interpreted")
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class Gpu:
    """Stand for a GPU: `calls` are the arguments of Triton's C function, `encoded` the addresses encoded."""

    def __init__(self, monkeypatch):
        self.calls, self.encoded, self.scratch = [], [], 0
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace())
        monkeypatch.setattr(driver, "make_tensordesc_arg", self.encode)
        monkeypatch.setattr(launcher, "isbuiltin", callable)
        monkeypatch.setattr(launcher, "isfunction", lambda x: x != self.record)
        monkeypatch.setattr(launches, "compile_now", lambda device, steps: None)
        monkeypatch.setattr(Launch, "_dispatch", lambda self_, tensors: self.dispatch(self_, tensors))

    def encode(self, descriptor, metadata, *_):
        address = descriptor.base.data_ptr()
        self.encoded.append(address)
        map_ = ("map", address, *metadata["block_size"], descriptor.padding)
        return [map_, *descriptor.shape, *descriptor.strides]

    def record(self, *arguments):
        # Triton passes 3.7's and later arguments as one sequence
        *rest, last = arguments
        self.calls.append((*rest, *last) if isinstance(last, list | tuple) else arguments)

    def dispatch(self, one, tensors):
        """Compile a launch; its first call records nothing."""
        described = [x for x in tensors[: one.num_descriptors] if x is not None]
        metadata = [{"block_size": x.block_shape} for x in described]
        kinds = ["constexpr" if x is None else "*bf16" for x in tensors]
        for i, x in enumerate(tensors[: one.num_descriptors]):
            kinds[i] = "constexpr" if x is None else f"tensordesc<bf16[{', '.join(map(str, x.block_shape))}]>"
        kinds += ["constexpr" if x is None else "i32" for x in one.scalars] + ["constexpr"] * len(
            one.constants
        )
        run = object.__new__(driver.CudaLauncher)
        run.launch = driver.wrap_handle_tensordesc(self.record, dict(enumerate(kinds)), metadata)
        run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
        run.global_scratch_size, run.profile_scratch_size = self.scratch, 0
        run.global_scratch_align = run.profile_scratch_align = 1
        run.arg_annotations, run.kernel_signature, run.gsan_enabled = "annotations", "signature", False
        return SimpleNamespace(
            run=run, function=one.kernel, packed_metadata=(4, 1, 0),
            metadata=SimpleNamespace(tensordesc_meta=metadata),
        )  # fmt: skip

    def alone(self, steps):
        """Return what the launches of `steps` give the C function one by one, by Triton's own launcher."""
        before, self.calls = self.calls, []
        for one, given in steps:
            one(*given)
        made, self.calls = self.calls, before
        return made


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def described(x, block=(32, 64)):
    return make_descriptor(x.view(-1, 64), block, LAYOUT)


def one_launch(name, num_descriptors=0, scalars=(1, 1.0, -0.0, 0.0, True)):
    return Launch(name, 3, scalars, {"C": 1}, 4, num_descriptors=num_descriptors)


def steps_of(first, second):
    def steps(t):
        x, y, z, absent = t
        yield first, (described(x[1:]), described(y), None, described(y, (64, 64)), x, absent, z[2:])
        yield second, (z, x[1:])

    return steps


def tensors():
    return torch.zeros(3, 64, 64).bfloat16(), torch.zeros(2, 64, 64).bfloat16(), torch.zeros(4, 64), None


def test_the_arguments_are_those_of_triton(gpu):
    steps = steps_of(one_launch("first", 4), one_launch("second"))
    sequence, one, other = LaunchSequence(steps), tensors(), tensors()
    sequence(one)
    assert gpu.calls == [] and sequence._ready is not None
    sequence.steps = None
    for given in (one, other, one):
        gpu.calls.clear()
        sequence(given)
        assert gpu.calls == gpu.alone(steps(given)) and len(gpu.calls) == 2
        assert [list(map(type, call)) for call in gpu.calls] == [
            list(map(type, call)) for call in gpu.alone(steps(given))
        ]


def test_a_descriptor_is_encoded_once_for_each_address(gpu, monkeypatch):
    steps = steps_of(one_launch("first", 4), one_launch("second"))
    sequence, one, other = LaunchSequence(steps), tensors(), tensors()
    sequence(one)
    for given, count in ((one, 3), (other, 3), (one, 0), (other, 0), ((one[0], *other[1:]), 0)):
        gpu.encoded.clear()
        sequence(given)
        assert len(gpu.encoded) == count
    assert one[0][1:].data_ptr() in (address for _, x in sequence._ready.encoded for address in _maps(x))


def _maps(encoded):
    return [x[1] for x in encoded.values()]


def test_the_number_of_encoded_descriptors_is_bounded(gpu):
    x = torch.zeros(64, 64).bfloat16()
    encoded = launcher.EncodedDescriptors(described(x), {"block_size": (32, 64)}, 128, limit=2)
    for address in (16, 32, 16, 48, 16):
        assert encoded[address][:2] == ("map", address + 128)
    assert gpu.encoded == [144, 160, 176, 144] and len(encoded) == 2


def refuse_version(gpu, monkeypatch):
    monkeypatch.setattr(launcher, "CONVENTIONS", {})


def refuse_scratch(gpu, monkeypatch):
    gpu.scratch = 16
    monkeypatch.setattr(triton.runtime._allocation, "_allocator", SimpleNamespace(get=lambda: lambda *_: 5))


def refuse_class(gpu, monkeypatch):
    kind = type("CudaLauncher", (driver.CudaLauncher,), {"__module__": "another"})
    monkeypatch.setattr(driver, "CudaLauncher", kind)


def refuse_metadata(gpu, monkeypatch):
    # a kernel for another GPU loads without a CUtensorMap
    monkeypatch.setattr(launcher, "descriptor_metadata", lambda compiled: [None])


@pytest.mark.parametrize("refuse", [refuse_version, refuse_scratch, refuse_class, refuse_metadata])
def test_other_launchers_are_called_as_triton_does(gpu, monkeypatch, refuse):
    refuse(gpu, monkeypatch)
    steps = steps_of(one_launch("first", 4), one_launch("second"))
    sequence, given = LaunchSequence(steps), tensors()
    for _ in range(3):
        sequence(given)
    assert sequence._ready is None and gpu.calls == 2 * gpu.alone(steps(given)) and len(gpu.calls) == 4


def test_recorded_launches_keep_their_descriptors(gpu):
    steps = steps_of(one_launch("first", 4), one_launch("second"))
    sequence, given = LaunchSequence(steps), tensors()
    for _ in range(2):
        with launch.record_launches([]) as recorded:
            sequence(given)
        sequence(given)
        assert recorded[0][1][0].base.data_ptr() == given[0][1:].data_ptr() and len(recorded) == 2


# options of the cost model of the backward, and the launches of a backward
CASES = {
    "whole": (Case(lengths=rows(130)), {}, 4),
    "packed, options": (
        Case(
            lengths=packed(70, 0, 129, tail=9), use_qk_l2norm_in_kernel=True, raw_gate="on", state="narrow",
            state_v_first=True, is_strided=True,
        ),
        {},
        6,
    ),
    "segments": (Case(lengths=rows(4096)), {}, 7),
    "slabs": (Case(lengths=rows(2048)), {"SLABS": True, "SLAB_BYTES": 4 << 16}, 22),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_call_on_hopper_gives_the_kernels_what_its_steps_say(gpu, monkeypatch, name):
    """The launches of a second call, on other memory, are those that the first way of launching makes."""
    case, settings, count = CASES[name]
    for option, value in settings.items():
        monkeypatch.setattr(backward_cost, option, value)
    monkeypatch.setattr(rule, "_forwards", PlanCache())
    monkeypatch.setattr(plan, "_plans", PlanCache())
    case = Case(**{**vars(case), "sizes": (128, 128), "heads": (1, 2)})
    for _ in range(2):
        given = inputs(case, torch.bfloat16)
        p = parse(**given.tensors, **given.options, backend="hopper")
        calls = run_both(gpu, monkeypatch, p)
    # forwards without and with saved tensors, the scan again, and a backward with a launch for each slab
    assert len(calls) == 4 and len(calls[3]) == count and len(calls[1]) >= len(calls[2]) + 2


def zeros(shapes):
    return Saved(*(None if x is None else torch.zeros(x[0], dtype=x[1]) for x in shapes))


def run_both(gpu, monkeypatch, p):
    """Run forward and backward; compare each sequence that is ready with its launches one by one."""
    run, found = LaunchSequence.__call__, []

    def compared(sequence, tensors):
        is_ready = sequence._ready is not None
        gpu.calls.clear()
        run(sequence, tensors)
        calls = list(gpu.calls)
        if is_ready:
            assert calls == gpu.alone(sequence.steps(tensors))
            found.append(calls)

    monkeypatch.setattr(LaunchSequence, "__call__", compared)
    rule.chunk_forward(p, False)
    rule.chunk_forward(p, True)
    again = replace(p, recompute=True)
    rule.recompute_saved(again, zeros(rule.saves(again)))
    plan.chunk_backward(p, zeros(rule.saves(p)), torch.zeros_like(p.v), None)
    monkeypatch.setattr(LaunchSequence, "__call__", run)
    return found


def step_inputs(T=200):
    case = Case(lengths=rows(T), sizes=(128, 128), heads=(2, 4), use_qk_l2norm_in_kernel=True)
    return inputs(case, torch.bfloat16, device="cuda")


def step(given, leaves):
    """Return the outputs and gradients of a training step."""
    o, _ = gdn.chunk_gated_delta_rule(**leaves, **given.options, backend="hopper")
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), given.do)]


def fresh_leaves(given):
    return {name: x.clone().requires_grad_() for name, x in given.tensors.items()}


def equal_bits(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def forget_plans(monkeypatch):
    monkeypatch.setattr(rule, "_forwards", PlanCache())
    monkeypatch.setattr(plan, "_plans", PlanCache())


@pytest.mark.gpu
@on_hopper
def test_bits_do_not_depend_on_addresses(monkeypatch):
    """Tensors at other addresses, and other tensors at the same addresses, get the bits of a first call."""
    forget_plans(monkeypatch)
    given, kept = step_inputs(), []
    expected = step(given, fresh_leaves(given))
    for i in range(6):
        leaves = fresh_leaves(given)
        assert equal_bits(step(given, leaves), expected)
        # every other time the tensors stay, so that the next ones have other addresses
        kept += [leaves, torch.empty(4096 * (i + 1), device="cuda")] * (i % 2)
    assert all(x._ready is not None for x in (*_runs(rule._forwards), *_runs(plan._plans)))
    other = step_inputs()
    for x in other.tensors.values():
        x.data.mul_(0.5)
    changed = step(other, fresh_leaves(other))
    forget_plans(monkeypatch)
    assert equal_bits(step(other, fresh_leaves(other)), changed) and not equal_bits(changed, expected)


def _runs(plans):
    return [x.run for x in plans.plans.values()]


@pytest.mark.gpu
@on_hopper
def test_two_threads_launch_one_plan(monkeypatch):
    forget_plans(monkeypatch)
    given = step_inputs()
    expected, same = step(given, fresh_leaves(given)), []
    torch.cuda.synchronize()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                same.append(equal_bits(step(given, fresh_leaves(given)), expected))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 100


@pytest.mark.gpu
@on_hopper
def test_a_captured_step_keeps_its_descriptors(monkeypatch):
    """A graph that is captured has the descriptors in its nodes: later encodings do not change it."""
    given = step_inputs()
    leaves = fresh_leaves(given)
    for _ in range(2):
        step(given, leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(given, leaves)
    forget_plans(monkeypatch)
    expected = step(given, fresh_leaves(given))
    graph.replay()
    torch.cuda.synchronize()
    assert equal_bits(found, expected)
