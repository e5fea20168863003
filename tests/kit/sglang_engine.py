"""Load SGLang's own modules from its wheel with gdn's plug-in, for the tests of its kernels on gdn."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gdn.integrations import usage
from kit import engine_sources

FLAGS = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend",
         "linear_attn_verify_backend")  # fmt: skip


def load() -> SimpleNamespace:
    """Return SGLang's modules with gdn registered by its own loader of plug-ins."""
    engine_sources.provide("sglang")
    from sglang.srt import plugins, runtime_context
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.fields import exec_
    from sglang.srt.layers.attention.linear import gdn_backend, kda_backend, utils
    from sglang.srt.layers.attention.linear.kernels import gdn_triton, kda_triton
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata

    own_backend = kda_backend.KDAAttnBackend
    own, own_channels = gdn_backend.GDNKernelDispatcher, kda_backend.KDAKernelDispatcher
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", lambda group: engine_sources.entry_points(group))
        patch.setenv("GDN_ENGINES", "")
        plugins.load_plugins()
        assert "gdn" not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES
        assert gdn_backend.GDNKernelDispatcher is own
        assert kda_backend.KDAKernelDispatcher is own_channels
        patch.setenv("GDN_ENGINES", "sglang")
        plugins._plugins_loaded = False
        plugins.load_plugins()
    assert "gdn" in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    for made, original in (
        (gdn_backend.GDNKernelDispatcher, own),
        (kda_backend.KDAKernelDispatcher, own_channels),
        (kda_backend.KDAAttnBackend, own_backend),
    ):
        assert issubclass(made, original) and made is not original
    # a model that is imported after the hooks were applied
    from sglang.srt.models import kimi_k3

    return SimpleNamespace(
        k3=kimi_k3, backend=gdn_backend, channels=kda_backend, utils=utils, triton=gdn_triton,
        channel_triton=kda_triton, context=runtime_context, choices=choices, fields=exec_, own=own,
        own_channels=own_channels, Metadata=ForwardMetadata,
    )  # fmt: skip


def use_flags(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return SGLang's flags of linear attention, with SGLang's defaults, which its modules then read."""
    group = next(
        cls for cls in vars(package.fields).values() if isinstance(cls, type) and hasattr(cls, FLAGS[0])
    )
    defaults = group()
    values = SimpleNamespace(**{name: getattr(defaults, name) for name in FLAGS})
    execution = SimpleNamespace(
        mamba=values, features=SimpleNamespace(enable_mis=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )  # fmt: skip
    for module in (package.backend, package.channels, package.utils, package.context):
        monkeypatch.setattr(module, "get_exec", lambda: execution)
    # our dispatchers hold the function that they imported
    for made in (package.backend.GDNKernelDispatcher, package.channels.KDAKernelDispatcher):
        cells = zip(made.__init__.__closure__, made.__init__.__code__.co_freevars, strict=True)
        for cell, name in cells:
            if name == "get_exec":
                monkeypatch.setattr(cell, "cell_contents", lambda: execution)
    usage.reset()
    return values


def build(package: SimpleNamespace, dispatcher: type) -> Any:
    """Return one of SGLang's dispatchers, built from its flags as its backends build it."""
    backends = package.utils.resolve_linear_attn_backends()
    return dispatcher(backends.decode, backends.prefill, backends.verify)


def serves(made: Any, phases: Sequence[str], kernel: type) -> list[bool]:
    """Return for each phase of a dispatcher whether a kernel class of gdn serves it."""
    return [isinstance(getattr(made, f"{phase}_kernel"), kernel) for phase in phases]
