"""`gdn warmup`: compile the kernels of a model, save them to a folder, or install those of a folder."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import gdn
from gdn.cli.console import Device, check_choice, console, find_device, need_packages, status
from gdn.cli.options import take_options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STATE_DTYPES = {**DTYPES, "int16": torch.int16, "int8": torch.int8}
SIZES = "K x V of a head, such as 128x128, or one number for both."


@dataclass(frozen=True)
class WarmupOptions:
    """Hold the options of `gdn warmup`; those of `gdn.warmup` have its names."""

    heads: Annotated[str | None, typer.Option(help="Key heads / value heads, such as 16/32.")] = None
    head_dims: Annotated[str, typer.Option(help=SIZES)] = "128"
    dtypes: Annotated[str, typer.Option(help="Some of bf16, fp16, fp32, with commas.")] = "bf16"
    state_dtypes: Annotated[str, typer.Option(help="Some of bf16, fp16, fp32, int16, int8.")] = "fp32"
    conv_size: Annotated[int, typer.Option(min=1, help="Taps of the convolution.")] = 4
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest packet of drafts.")] = 4
    max_rows: Annotated[int, typer.Option(min=1, help="Most prompts in a batch.")] = 256
    engines: Annotated[str, typer.Option(help="Some of gdn, history, vllm, sglang, lmdeploy.")] = "gdn"
    gates: Annotated[str, typer.Option(help="Some of raw, active.")] = "raw"
    decay: Annotated[str, typer.Option(help="head, or channel (KDA).")] = "head"
    lower_bound: Annotated[float | None, typer.Option(help="Of raw gates, such as -5 (Ling-3.0).")] = None
    l2norm: Annotated[bool, typer.Option("--l2norm", help="use_qk_l2norm_in_kernel=True.")] = False
    state_v_first: Annotated[bool, typer.Option("--state-v-first", help="States [V, K].")] = False
    training: Annotated[bool, typer.Option("--training", help="Compile the backward, too.")] = False
    device: Device = None
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the kernels to DIR.")] = None
    load: Annotated[Path | None, typer.Option(metavar="DIR", help="Install the kernels of DIR.")] = None


@take_options(WarmupOptions)
def warmup(options: WarmupOptions) -> None:
    """Compile every kernel of a model's calls, save them to a folder, or install those of a folder."""
    if options.heads is None and options.load is None:
        raise typer.BadParameter("expected --heads H/HV to compile, or --load DIR to install, got neither")
    if options.load is not None:
        need_packages("triton", "triton")
        count = reported(lambda: gdn.load_kernels(options.load or ""))
        console.print(f"installed {count} kernels of {options.load}")
    if options.heads is None:
        return
    device, arguments = find_device(options.device), arguments_of(options)
    if options.save is None:
        print_calls(device, arguments)
        return
    if device.type == "cpu":
        raise typer.BadParameter("--save: expected a GPU, got cpu, where nothing is compiled")
    binaries = import_module("gdn.backends.triton.launch.binaries")
    folder = options.save
    with tempfile.TemporaryDirectory() as cache:
        with binaries.separate_cache(Path(cache)):
            print_calls(device, arguments)
        count = reported(lambda: binaries.pack(Path(cache), folder))
    console.print(f"wrote {count} kernels to {folder}")


def print_calls(device: torch.device, arguments: dict[str, Any]) -> None:
    """Run the warmup and print its lines."""
    status.print(f"warmup on {device}")
    for line in reported(lambda: gdn.warmup(device, **arguments)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def reported(call: Callable[[], Any]) -> Any:
    """Return what a call returns; a usage error for what it rejects."""
    try:
        return call()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error


def arguments_of(options: WarmupOptions) -> dict[str, Any]:
    """Return the arguments of `gdn.warmup`."""
    H, HV = numbers("heads", options.heads or "", "/")
    K, V = numbers("head-dims", options.head_dims, "x")
    return {
        "num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V,
        "dtypes": find_dtypes("dtypes", options.dtypes, DTYPES),
        "state_dtypes": find_dtypes("state-dtypes", options.state_dtypes, STATE_DTYPES),
        "conv_size": options.conv_size, "max_tokens": options.max_tokens, "max_rows": options.max_rows,
        "engines": words(options.engines), "gates": words(options.gates), "decay": options.decay,
        "lower_bound": options.lower_bound,
        "use_qk_l2norm_in_kernel": options.l2norm, "state_v_first": options.state_v_first,
        "training": options.training,
    }  # fmt: skip


def numbers(option: str, text: str, separator: str) -> tuple[int, int]:
    """Return two numbers; a text without the separator is one number for both."""
    parts = text.split(separator)
    if len(parts) > 2 or not all(x.isdecimal() and int(x) > 0 for x in parts):
        raise typer.BadParameter(f"--{option}: expected such as 16{separator}32, got {text!r}")
    return int(parts[0]), int(parts[-1])


def find_dtypes(option: str, text: str, dtypes: dict[str, torch.dtype]) -> tuple[torch.dtype, ...]:
    """Return some of `dtypes` by their short names, which commas separate."""
    return tuple(dtypes[check_choice(f"--{option}", name, dtypes)] for name in words(text))


def words(text: str) -> tuple[str, ...]:
    """Return the words that commas separate."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
