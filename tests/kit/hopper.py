"""Share the cases and helpers of the tests of the Hopper backend; its forward is simulated on the CPU."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import INTERPRETED
from triton.experimental.gluon._runtime import GluonJITFunction

from gdn.backends.hopper import cost, rule, scans, segments
from gdn.backends.hopper.cost import Cuts
from gdn.backends.hopper.factors import WELL_CONDITIONED
from gdn.backends.triton.launch import Launch, LaunchSequence, PlanCache, ready
from gdn.problem import parse
from gdn.testing import Case, accuracy, inputs, packed, rows
from kit import api
from kit.gluon_simulator import Descriptor, Value, simulate

BASE = Case(sizes=(128, 128), heads=(1, 2), state="wide")


CASES = {
    "one chunk": replace(BASE, lengths=rows(64)),
    "rows with tails": replace(BASE, lengths=rows(129)),
    "no state": replace(BASE, lengths=rows(70), state="none", gate="strong"),
    "not four tiles a program": replace(BASE, lengths=rows(129), heads=(1, 3), use_qk_l2norm_in_kernel=True),
    "packed": replace(BASE, lengths=packed(70, 0, 33, 128, tail=29), keys="correlated"),
    "options": replace(
        BASE, lengths=packed(65, 1, 130), use_qk_l2norm_in_kernel=True, raw_gate="on", beta="negative",
        state="narrow", state_v_first=True, is_strided=True, is_scaled=True,
    ),
    "four value heads of a key head": replace(
        BASE, heads=(1, 4), lengths=rows(129), keys="identical", gate="none"
    ),
    "few keys": replace(BASE, sizes=(64, 64), lengths=rows(129), gate="slow"),
    "few keys, options": replace(
        BASE, sizes=(64, 64), lengths=packed(70, 0, 33, 128, tail=29), use_qk_l2norm_in_kernel=True,
        raw_gate="on", beta="negative", state="narrow", state_v_first=True, is_strided=True, is_scaled=True,
    ),
}  # fmt: skip


# limits of errors by kind of keys; of identical keys errors would be 9e-3 if r were rounded to bf16
LIMITS = {"identical": 4e-3, "correlated": 1.5e-2}


# sequences for segments of two chunks
CUT_CASES = {
    "dense": replace(BASE, lengths=rows(129)._replace(T=450)),
    "no decay, states K first": replace(BASE, lengths=packed(300, 0, 33, 256, 400, tail=29), gate="none"),
    "V first, narrow": replace(
        BASE, lengths=packed(385, 0, 130, 1), state="narrow", state_v_first=True, keys="correlated",
        use_qk_l2norm_in_kernel=True,
    ),
    "no state": replace(BASE, lengths=packed(400, 64, 0), state="none", gate="slow"),
    "strong": replace(BASE, lengths=rows(450), gate="strong", state_v_first=True),
    "gone": replace(BASE, lengths=packed(450, 0, 200), gate="reset"),
    "identical keys": replace(BASE, lengths=rows(450), keys="identical", gate="none", heads=(1, 1)),
    "few keys": replace(BASE, sizes=(64, 64), lengths=packed(300, 0, 130, tail=29), gate="slow"),
}  # fmt: skip


# case, segments, and which chunks are well-conditioned: full, random keys, a decay that fits fp32
FAST_CASES = {
    "rows with tails": (CASES["rows with tails"], None, [1, 1, 0, 1, 1, 0]),
    "packed": (replace(CASES["packed"], keys="random"), 1, [1, 0, 0, 1, 1]),
    "options": (CASES["options"], None, [1, 0, 0, 1, 1, 0]),
    "identical keys": (CASES["four value heads of a key head"], None, [0] * 6),
    "V first, narrow": (replace(CUT_CASES["V first, narrow"], keys="random"), 2, [*[1] * 6, 0, 1, 1, 0, 0]),
    "strong": (CUT_CASES["strong"], 2, None),
    "gone": (CUT_CASES["gone"], 2, None),
    # where rounding r to bf16 costs most, though keys are not alike
    "beta to 2": (replace(BASE, lengths=rows(128), gate="none", beta="negative"), None, [0] * 4),
    "beta of 1": (replace(BASE, lengths=rows(128), gate="none", beta="absent"), None, [0] * 4),
}


LONG_CASES = {
    "long": replace(BASE, heads=(4, 8), lengths=rows(16384), gate="slow"),
    "long, packed": replace(
        BASE, heads=(4, 8), lengths=packed(9000, 0, 70, 5000, tail=30), gate="none", state_v_first=True
    ),
    "long, mixed": replace(BASE, heads=(4, 8), lengths=rows(16383), gate="mixed", state="none"),
}


class Simulated(Launch):
    """Run a launch on the CPU: simulate Gluon kernels, interpret Triton kernels."""

    def __call__(self, *tensors):
        if not isinstance(self.kernel, GluonJITFunction):
            return super().__call__(*tensors)
        described = [
            None if x is None else Descriptor(x.base, x.block_shape) for x in tensors[: self.num_descriptors]
        ]
        # a binary has scalars in registers: they are no Python numbers in a kernel
        scalars = (None if x is None else Value(x) for x in self.scalars)
        rest = (*tensors[self.num_descriptors :], *scalars, *self.constants.values())
        simulate(self.kernel, self.grid, *described, *rest, num_warps=self.num_warps)


def simulate_launches(monkeypatch):
    """Let the forward of the Hopper backend run on the CPU, with two consumers a CTA, not in short items."""
    for module in (rule, scans, segments):
        monkeypatch.setattr(module, "Launch", Simulated)
    set_consumers(monkeypatch, 2)
    set_short(monkeypatch, False)


class Encoded:
    """Stand in for the encoded descriptors of one tensor or view: its address."""

    numbers = ()

    def __init__(self, descriptor, metadata, offset):
        self.offset = offset

    def __getitem__(self, pointer):
        return pointer + self.offset


def check_prepared(monkeypatch):
    """Make every LaunchSequence prepare its launches, too, and compare their arguments with its own."""

    def address(x):
        return None if x is None else getattr(x, "base", x).data_ptr()

    def direct(launch):
        return lambda grid, stream, arguments: called.append((launch, list(arguments)))

    def run(sequence, tensors):
        steps = [step for step in sequence.steps(tensors) if step[0].grid]
        with monkeypatch.context() as patch:
            patch.setattr(Launch, "direct", property(direct))
            patch.setattr(ready, "EncodedDescriptors", Encoded)
            patch.setattr(ready, "descriptor_metadata", lambda compiled: itertools.repeat(None))
            patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
            called.clear()
            prepared = ready.prepare(sequence.steps, tensors)
            prepared.launch([x.data_ptr() for x in prepared.used(tensors)])
        assert called == [(launch, list(map(address, given))) for launch, given in steps]
        for launch, given in steps:
            launch(*given)

    called: list = []
    monkeypatch.setattr(LaunchSequence, "__call__", run)


def reference(given, wide=None):
    """Compute the reference recurrence in fp64, on `wide` where gradients are needed."""
    wide = wide or given.double()
    tensors = dict.fromkeys(("g", "beta")) | wide.tensors
    return accuracy.reference_rule(**tensors, **wide.options)


def error(x, expected):
    return ((x.double() - expected).norm() / expected.norm()).item()


def set_fast_path(monkeypatch, is_on=True):
    """Turn the fast path on or off."""
    monkeypatch.setattr(rule, "FAST_PATH", is_on)
    monkeypatch.setattr(rule, "_forwards", PlanCache())


simulated = pytest.mark.skipif(not INTERPRETED, reason="expected kernels to be interpreted")


def set_segments(monkeypatch, chunks):
    """Cut sequences into segments of so many chunks, or by a given cut, whatever the cost model says."""
    cuts = cost.equal_cuts(chunks) if isinstance(chunks, int) else chunks and Cuts(chunks, chunks)
    monkeypatch.setattr(cost, "cuts_of", lambda problem, has_pool=False: cuts)


def set_consumers(monkeypatch, consumers):
    """Set the consumers of a CTA of the scan, whatever the cost model says; with 64 keys it has one."""
    monkeypatch.setattr(cost, "consumers_of", lambda problem, cuts: consumers)


def set_short(monkeypatch, is_on=True):
    """Scan short sequences by the kernel for many of them, or not, whatever the cost model says."""
    monkeypatch.setattr(cost, "has_short_items", lambda problem: is_on)


def forward(given):
    return rule.chunk_forward(parse(**given.tensors, **given.options, backend="triton"), False)


def watch_flags(monkeypatch):
    """Turn the fast path on; return a list to which each forward appends the flags of its chunks."""
    found, call = [], Simulated.__call__

    def watched(launch, *tensors):
        call(launch, *tensors)
        if launch.kernel is rule.solve_kernel:
            factors = tensors[launch.num_descriptors + 5]
            found.append(factors.flatten(-2)[..., WELL_CONDITIONED.value].clone())

    monkeypatch.setattr(Simulated, "__call__", watched)
    set_fast_path(monkeypatch)
    return found


def make_prefill(heads, D, *lengths):
    """Make a prefill of prompts; some start from a state, one has no slot."""
    given = inputs(replace(BASE, heads=heads, sizes=(D, D), lengths=packed(*lengths)), torch.bfloat16)
    x = {name: given.tensors[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    pool = torch.randn(13, heads[1], D, D, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([5, 2, -1, 7, 4][: len(lengths)])
    return x | {"state": pool, "state_index": slots, "has_initial_state": slots != 7}


def run_prefill(backend, device, x):
    """Return outputs, the pool and the checkpoints of a prefill."""
    x = {name: y.to(device, copy=True) if isinstance(y, torch.Tensor) else y for name, y in x.items()}
    o = api.prefill(**x, backend=backend)
    return o, x["state"], x["checkpoints"].nan_to_num(7.0) if "checkpoints" in x else o


def checkpoint_options(every, HV, D, *lengths):
    """Return options for checkpoints, and snapshots within chunks, between them and at the end; or none."""
    if every is None:
        return {}
    counts = torch.tensor(lengths) // every
    at = [2 * n // 3 if i % 2 == 0 else n - n % 64 for i, n in enumerate(lengths)]
    return {
        "checkpoints": torch.full((int(counts.sum()) + 1, HV, D, D), float("nan")),
        "checkpoint_offsets": counts.cumsum(0) - counts, "checkpoint_every": every,
        "snapshot_pos": torch.tensor(at), "snapshot_index": torch.arange(len(lengths)) + 8,
    }  # fmt: skip


def check_checkpoints(device, D):
    """Demand that a checkpoint, or a snapshot between chunks, has the bits of the prefill that ends there."""
    x = make_prefill((1, 2), D, 192)
    options = checkpoint_options(64, 2, D, 192) | {"snapshot_pos": torch.tensor([64])}
    _, pool, kept = run_prefill("hopper", device, x | options)
    assert torch.equal(pool[8], kept[0])
    for i, end in enumerate((64, 128, 192)):
        part = {name: x[name][:, :end] for name in ("q", "k", "v", "g", "beta")}
        _, alone, _ = run_prefill("hopper", device, x | part | {"cu_seqlens": torch.tensor([0, end])})
        assert torch.equal(kept[i], alone[5])
        assert error(kept[i].bfloat16(), alone[5].double()) > 1e-3, "the gate can fail"


def check_nan_stays(device, forward):
    """Demand that NaN of one sequence reaches no other sequence."""
    given = inputs(replace(BASE, lengths=packed(40, 30, 70)), torch.bfloat16, device=device)
    for name in ("q", "k", "v"):
        given.tensors[name][:, 40:70] = float("nan")
    o, final, *_ = forward(given)
    assert o[:, 40:70].isnan().all() and not o[:, :40].isnan().any() and not o[:, 70:].isnan().any()
    assert final[1].isnan().any() and not final[0].isnan().any() and not final[2].isnan().any()


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="expected sm_90"
)
