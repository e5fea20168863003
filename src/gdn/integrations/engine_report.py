"""Report whose kernels run the gated delta rule of each installed engine: prefill, decode and verification.

What an engine would run is read from its version, the GPU, and the environment; what it ran is counted
(`gdn.integrations.usage`). No engine is imported for it.
"""

from dataclasses import dataclass
from importlib import metadata

import torch

from gdn import settings
from gdn.integrations import lmdeploy, sglang, sglang_dispatch, usage, vllm, vllm_layer
from gdn.integrations.engines import ENGINES, is_enabled

TESTED = {"vllm": "0.33.0", "sglang": "0.5.23", "lmdeploy": "0.18.0"}
RULE, CHANNEL = "one decay per head", "a decay per key channel"
KIMI_K3 = "a decay per key channel, Kimi K3"  # its calls are counted with those of CHANNEL
Gpu = tuple[tuple[int, int], int]  # compute capability, and the major version of CUDA


@dataclass(frozen=True)
class Server:
    """Say whose kernels run one phase of one kind of layer, and which setting changes it.

    calls: of gdn, 0 if none was counted.
    """

    engine: str
    version: str
    layer: str
    phase: str
    server: str
    setting: str
    calls: int = 0


def installed() -> dict[str, str]:
    """Return the versions of the engines that are installed."""
    versions = {}
    for name in ENGINES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def find_gpu() -> Gpu | None:
    """Return the compute capability and the CUDA version of this machine; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(), int((torch.version.cuda or "0").split(".")[0])


def report(
    versions: dict[str, str] | None = None, gpu: Gpu | None = None, folder: str | None = None
) -> tuple[list[Server], dict[tuple[str, str], int]]:
    """Return whose kernels run each phase, and how often gdn rejected a call: (function, reason) -> calls.

    Args:
        versions  engine -> version; None: those that are installed
        gpu       compute capability and major version of CUDA; None: those of this machine
        folder    that of GDN_CALLS, with the counts of other processes; None: the one in the environment,
                  else this process alone
    Returns: a Server for each engine, kind of layer and phase (whose kernels run, and which setting changes
             it), and the number of calls that gdn rejected by function and reason.
    """
    versions = installed() if versions is None else versions
    gpu = find_gpu() if gpu is None else gpu
    counts, rejected = usage.read(folder or settings.calls_folder())
    rows = []
    for engine, version in versions.items():
        for phase in usage.ROLES:
            server, setting = _CHOICES[engine](phase, gpu)
            calls = counts.get((engine, phase), 0)
            if calls:
                server = "gdn"
            rows.append(Server(engine, version, RULE, phase, server, setting, calls))
        for layer, choose in _CHANNEL_CHOICES.get(engine, {}).items():
            for phase in usage.ROLES:
                server, setting = choose(phase, gpu)
                calls = counts.get((engine, usage.CHANNEL_ROLES[phase]), 0) if layer == CHANNEL else 0
                rows.append(Server(engine, version, layer, phase, "gdn" if calls else server, setting, calls))
    return rows, rejected


def _choose_vllm(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    if is_enabled("vllm") or vllm_layer.is_registered():
        return "gdn", "GDN_ENGINES names vllm; without it vLLM's own kernels run"
    word = {"prefill": "--gdn-prefill-backend", "verify": "VLLM_GDN_DECODE_KERNEL"}.get(phase)
    # without a GPU to ask, what a Hopper GPU would run
    others = vllm_layer.needed_flags(*(gpu or ((9, 0), 13)))
    passing = next((sentence for sentence in others if word and word in sentence), None)
    if vllm.PACKAGE.is_patched and passing is None:
        return "gdn", "patch_vllm() is active"
    own = {"prefill": "vllm: FlashInfer", "verify": "vllm: CUDA operator"}.get(phase, "vllm: Triton")
    own = own if passing else "vllm: Triton"
    return own, "GDN_ENGINES=vllm" if passing is None else f"GDN_ENGINES=vllm; {passing}"


def _choose_vllm_channels(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    if is_enabled("vllm") or vllm_layer.is_registered():
        return "gdn", "GDN_ENGINES names vllm; without it vLLM's own kernels run"
    if vllm.PACKAGE.is_patched:
        return "gdn for Kimi-Linear, vllm for others", "GDN_ENGINES=vllm"
    has_flashkda = phase == "prefill" and (gpu or ((9, 0), 13))[0][0] in (9, 10, 12)
    return "vllm: FlashKDA for GLM, Triton" if has_flashkda else "vllm: Triton", "GDN_ENGINES=vllm"


def _choose_kimi_k3(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    """Choose for vLLM's own layer of Kimi K3, which has fused kernels for one token and for drafts."""
    if is_enabled("vllm") or vllm_layer.is_registered():
        others = {"decode": "decode_backend=latency_specialized", "verify": "--use-replayssm"}
        unless = f"; unless {others[phase]} is given" if phase in others else ""
        return "gdn", f"GDN_ENGINES names vllm; without it vLLM's own kernels run{unless}"
    if vllm.PACKAGE.is_patched:
        return "gdn, where vLLM calls Triton", "patch_vllm() is active; GDN_ENGINES=vllm for all calls"
    major = (gpu or ((9, 0), 13))[0][0]
    own = {"prefill": "FlashKDA", "decode": "fused kernel"}.get(phase, "Triton")
    has_own = major in (9, 10, 12)
    if phase == "verify" and major == 10:
        own = "FlashInfer"
    return f"vllm: {own if has_own else 'Triton'}", "GDN_ENGINES=vllm"


def _choose_sglang(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    setting = f"--linear-attn-{phase}-backend gdn"
    if not is_enabled("sglang"):
        setting = f"GDN_ENGINES=sglang and {setting}"
    others = sglang_dispatch.needed_flags(*(gpu or ((9, 0), 13)))
    word = "prefill of" if phase == "prefill" else "decode and verification"
    if any(sentence.startswith(word) for sentence in others):
        return "sglang: FlashInfer, for some models", setting
    if sglang.PACKAGE.is_patched:
        return "gdn", "patch_sglang() is active"
    return "sglang: Triton", setting


def _choose_sglang_channels(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    setting = f"--linear-attn-{phase}-backend gdn"
    if not is_enabled("sglang"):
        setting = f"GDN_ENGINES=sglang and {setting}"
    if phase != "decode" and (gpu or ((9, 0), 13))[0][0] == 10:
        own = {"verify": "CuTe DSL, for some models", "prefill": "FlashInfer, with a lower bound"}[phase]
        return f"sglang: {own}", setting
    if sglang.PACKAGE.is_patched:
        return "gdn", "patch_sglang() is active"
    return "sglang: Triton", setting


def _choose_sglang_kimi_k3(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    """Choose for Kimi K3: SGLang's fused decode comes before its dispatcher, past a patch."""
    server, setting = _choose_sglang_channels(phase, gpu)
    return ("sglang: fused kernel" if phase == "decode" else server), setting


def _choose_lmdeploy(phase: str, gpu: Gpu | None) -> tuple[str, str]:
    if lmdeploy.PACKAGE.is_patched:
        return "gdn", "patch_lmdeploy() is active"
    return (
        "lmdeploy: TurboMind, or FLA and TileLang",
        "patch_lmdeploy() and the PyTorch engine (PytorchEngineConfig, --backend pytorch)",
    )


_CHANNEL_CHOICES = {
    "vllm": {CHANNEL: _choose_vllm_channels, KIMI_K3: _choose_kimi_k3},
    "sglang": {CHANNEL: _choose_sglang_channels, KIMI_K3: _choose_sglang_kimi_k3},
}
_CHOICES = {"vllm": _choose_vllm, "sglang": _choose_sglang, "lmdeploy": _choose_lmdeploy}
