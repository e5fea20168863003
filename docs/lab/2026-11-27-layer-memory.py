"""List the tensors that a training step of GatedDeltaNet holds at its peak, without a GPU.

The layer's own code and autograd run on meta tensors, with the launches of `hopper` and `triton` recorded
instead of run, so that it allocates and frees what it would on a GPU, in the same order.

    PYTHONPATH=src:tests python docs/lab/2026-11-27-layer-memory.py [training|recompute|forward] [--all]

Bytes are those beyond the layer's input, the gradient of its output and its weights, as `gdn bench layer`
counts them. Not counted: the 32 MiB of cuBLAS for each handle and stream, and what the allocator rounds up.
"""

import sys
import traceback
import weakref
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gdn
from gdn._torch_compat import forward_ad
from gdn.backends import hopper, triton
from gdn.backends.triton import launch
from gdn.backends.triton.launch import record_launches
from gdn.ops import conv, fastpath, library, norm

HIDDEN, HEADS, SIZE, TOKENS = 2048, (16, 32), 128, 16384
MIB = 2**20


class Ledger(TorchDispatchMode):
    """Record every storage that is allocated and freed, with the line that allocated it."""

    def __init__(self):
        super().__init__()
        self.live, self.held, self.peaks, self.total, self.past = {}, [], [], 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.note(x)
        return out

    def note(self, x):
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size = storage.nbytes()
        self.live[key] = (size, where(), f"{str(x.dtype)[6:]} {list(x.shape)}")
        self.total += size
        self.held.append(weakref.finalize(storage, self.free, key))
        if self.total > self.past:
            self.past = self.total
            self.peaks.append((self.total, where(), dict(self.live)))

    def free(self, key):
        self.total -= self.live.pop(key)[0]


def where():
    """Return the innermost lines of gdn on the stack."""
    lines = [x for x in traceback.extract_stack() if "/gdn/" in x.filename or "nn/modules" in x.filename]
    names = [f"{x.filename.split('/gdn/')[-1].split('torch/')[-1]}:{x.lineno}" for x in lines]
    return " < ".join(reversed(names[-4:])) or "autograd"


def plain(x):
    """Stand for `is_plain`, which is false for meta tensors."""
    return type(x) is torch.Tensor and forward_ad._current_level < 0


def on_meta(stack):
    """Let the backends take meta tensors, and record their launches."""

    def supports(problem):
        return None

    for module in (library, fastpath):
        stack.enter_context(patch.object(module, "is_plain", plain))
    for module in (hopper, triton):
        changed = {"refuses": supports, "refuses_backward": None, "refuses_recurrent": None}
        backend = module.dataclasses_replace(module.BACKEND, **changed)
        stack.enter_context(patch.object(module, "BACKEND", backend))
    stack.enter_context(record_launches(Nothing()))
    stack.enter_context(patch.object(launch.PlanCache, "get", lambda self, key, make: make()))
    # torch knows no autocast on meta tensors
    stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda kind: False))
    # operators on meta tensors would run their fakes
    stack.enter_context(patch.object(conv, "conv_operator", conv._conv))
    stack.enter_context(patch.object(norm, "norm_operator", Norm.apply))


class Nothing(list):
    """Forget what is appended: a recorded launch would hold its tensors."""

    def append(self, _):
        pass


class Norm(torch.autograd.Function):
    """Stand for the operator of the norm, whose fake would run."""

    @staticmethod
    def forward(ctx, *args):
        norm._keep(ctx, args, None)
        return norm._norm(*args)

    @staticmethod
    def backward(ctx, dy):
        return norm.requested(norm._norm_backward(*ctx.saved_tensors, *ctx.options, dy), ctx.needs_input_grad)


def show(peak, is_whole):
    total, at, live = peak
    print(f"{total / MIB:.0f} MiB at {at}")
    for size, at, shape in sorted(live.values(), key=lambda x: -x[0]):
        if size >= MIB / 2 or is_whole:
            print(f"  {size / MIB:8.1f}  {shape:36} {at}")


def main(kind, is_whole):
    import dataclasses

    for module in (hopper, triton):
        module.dataclasses_replace = dataclasses.replace
    options = {"recompute": True} if kind == "recompute" else {}
    layer = gdn.GatedDeltaNet(
        HIDDEN, *HEADS, head_k_dim=SIZE, head_v_dim=SIZE, device="meta", dtype=torch.bfloat16, **options
    )
    x = torch.empty(1, TOKENS, HIDDEN, device="meta", dtype=torch.bfloat16)
    dy, leaf = torch.empty_like(x), x.detach().requires_grad_()
    with ExitStack() as stack:
        on_meta(stack)
        ledger = stack.enter_context(Ledger())
        # the caller's tensors are not counted
        for given in (x, leaf, dy, *layer.parameters(), *layer.buffers()):
            ledger.live[given.untyped_storage()._cdata] = (0, "", "")
        if kind == "forward":
            with torch.no_grad():
                y = layer(x)
        else:
            y = layer(leaf)
            print(f"between forward and backward {ledger.total / MIB:.0f} MiB")
            if is_whole:
                show((ledger.total, "end of the forward", dict(ledger.live)), False)
            found = torch.autograd.grad(y, [leaf, *layer.parameters()], dy)
            print(f"after the backward {ledger.total / MIB:.0f} MiB")
            del found
        show(ledger.peaks[-1], is_whole)
        del y


if __name__ == "__main__":
    words = [x for x in sys.argv[1:] if not x.startswith("-")]
    main(words[0] if words else "training", "--all" in sys.argv)
