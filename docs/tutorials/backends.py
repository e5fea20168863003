"""Reading explain: which backend computes a call, and why.

gdn chooses a backend for each call. `gdn.explain` takes the arguments of a call, computes nothing, and
reports the choice. This tutorial reads its reports, first for calls on the CPU and then for an H200 that
need not be there. It runs on a CPU in seconds:

    python docs/tutorials/backends.py
"""

# %% ## A report
#
# There are three backends, in the order of dispatch: `hopper` (Gluon kernels for H100 and H200), `triton`
# (Triton kernels for GPUs) and `eager` (PyTorch, any device). A call gets the first one that supports it.
# `print(gdn.explain(...))` shows one line for each, with an arrow at the choice and a reason at those that
# do not support the call.

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn


def call(
    T: int, N: int = 1, H: int = 16, HV: int = 32, K: int = 128, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Return q, k, v, g and beta of N rows of T tokens."""
    q, k = (torch.empty(N, T, H, K, dtype=dtype) for _ in "qk")
    v = torch.empty(N, T, HV, K, dtype=dtype)
    g, beta = (torch.empty(N, T, HV) for _ in "gb")
    return q, k, v, g, beta


def on_the_cpu() -> None:
    """Print the report of a call on CPU tensors."""
    report = gdn.explain(*call(100))
    assert report.chosen == "eager"
    print(report)


# %% The report of CPU tensors is
#
#     requested: the first that supports the call
#        hopper   expected tensors on a CUDA device, got cpu
#        triton   expected tensors on a CUDA device, got cpu
#     -> eager    supports it
#
# `report.chosen` is the name, `report.refusals` a dictionary of reasons. A call that no backend supports
# has `chosen` None, and the call itself raises NotImplementedError with the same reasons.
#
# ## A backend by name
#
# `backend="triton"` in the call asks for one backend. Then no other one is used, so a program that has to
# run on kernels fails loudly where it would otherwise be slow. `GDN_BACKEND=triton` in the environment does
# the same for calls that name none.


def by_name() -> None:
    """Show that a backend asked for by name is never replaced."""
    report = gdn.explain(*call(100), backend="triton")
    assert report.chosen is None and report.asked == "triton"
    try:
        gdn.chunk_gated_delta_rule(*call(100), backend="triton")
    except NotImplementedError as error:
        print(error)


# %% ## An H200 that is not there
#
# `explain` reads shapes, dtypes and the device, and no values. So PyTorch's fake tensors are enough: they
# say `cuda` and hold no memory. The two properties of the GPU that matter, its compute capability and its
# number of SMs, are filled in by hand.


@contextlib.contextmanager
def imagined_h200() -> Iterator[None]:
    """Make new tensors say that they are on an H200."""
    properties = mock.Mock(multi_processor_count=132, major=9, minor=0)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        FakeTensorMode(),
        torch.device("cuda:0"),
    ):
        yield


def chosen(**sizes: object) -> str:
    """Return the backend of a call on the imagined GPU."""
    with imagined_h200():
        return gdn.explain(*call(**sizes)).chosen  # type: ignore[arg-type]


# %% ## A map of prompts
#
# For bf16 heads of 128 x 128 or 64 x 64 the choice depends on the number and the length of sequences: a cost
# model (`backends/hopper/cost.py`) predicts the times of both backends. Short prompts of few sequences go to
# `triton`, long or many ones to `hopper`. fp32 tensors and other head sizes go to `triton`, and head sizes
# above 256 or fp64 to `eager`.
#
# ![The backend of a forward by number and length of sequences](backends.svg)

LENGTHS = [2**i for i in range(4, 17)]
ROWS = [2**i for i in range(9)]
COLOURS = {"hopper": "#0072b2", "triton": "#e69f00", "eager": "#999999"}


def draw(path: Path) -> None:
    """Draw the backend of a forward against the number and the length of sequences."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(COLOURS)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (H, HV) in zip(figure.subplots(1, 2), ((16, 32), (2, 8)), strict=True):
        grid = [[names.index(chosen(T=T, N=N, H=H, HV=HV)) for T in LENGTHS] for N in ROWS]
        axes.imshow(grid, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=2, origin="lower")
        axes.set_xticks(range(0, len(LENGTHS), 2), [f"{T:,}" for T in LENGTHS[::2]], rotation=45)
        axes.set_yticks(range(0, len(ROWS), 2), [str(N) for N in ROWS[::2]])
        axes.set_xlabel("tokens in each sequence")
        axes.set_ylabel("sequences")
        axes.set_title(f"H200, bf16, {H} key and {HV} value heads", fontsize=10)
    handles = [Patch(color=COLOURS[name], label=name) for name in names[:2]]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the reports and draw the map."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args()
    on_the_cpu()
    by_name()
    assert chosen(T=8192) == "hopper" and chosen(T=8192, dtype=torch.float32) == "triton"
    assert chosen(T=64, K=512) == chosen(T=64, dtype=torch.float64) == "eager"
    draw(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
