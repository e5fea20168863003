"""Load vLLM's own modules from its wheel, and build its metadata, for the tests of its layers on gdn.

vLLM has no compiled extension here; its platform is a stand-in that says what an H200 says.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdn.integrations import vllm_layer
from kit import engine_sources


def load(folder: Path) -> SimpleNamespace:
    """Return vLLM's modules with gdn registered by its own loader of plug-ins; folder: an empty one."""
    engine_sources.provide("vllm")
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    class Machine(CpuPlatform):
        device_name, _enum = "H200", PlatformEnum.CPU

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def get_cuda_runtime_major(cls):
            return 13

        @classmethod
        def current_device(cls):
            return "cpu"

    platforms._current_platform = Machine()
    # these ask the compiled extension at import time, on CUDA alone
    import vllm.model_executor.layers.quantization.online.fp8  # noqa: F401
    from vllm import plugins
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen
    from vllm.v1.attention import backend, selector
    from vllm.v1.attention.backends import gdn_attn, registry
    from vllm.v1.kv_cache_interface import MambaSpec

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.entry_points", engine_sources.entry_points)
        patch.setenv("GDN_ENGINES", "")
        plugins.load_general_plugins()
        assert not vllm_layer.is_registered()
        patch.setenv("GDN_ENGINES", "vllm")
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
    assert vllm_layer.is_registered()
    Machine._enum = PlatformEnum.CUDA
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/file", 0, "gloo")
        initialize_model_parallel(1, 1)
    return SimpleNamespace(
        config=config, set_config=set_current_vllm_config, context=set_forward_context, qwen=qwen, olmo=olmo,
        attention=gdn_attn, registry=registry, selector=selector, MambaSpec=MambaSpec, machine=Machine,
        Common=backend.CommonAttentionMetadata, custom_op=custom_op,
    )  # fmt: skip


def metadata(package, builder, counts, seen, table, **drafting):
    """Return vLLM's metadata of `counts` new tokens after `seen`, for rows of a block table."""
    counts, seen = torch.tensor(counts), torch.tensor(seen)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    lengths = (counts + seen).int()
    common = package.Common(
        query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=lengths, num_reqs=len(counts),
        num_actual_tokens=int(offsets[-1]), max_query_len=int(counts.max()), max_seq_len=64,
        block_table_tensor=table, slot_mapping=torch.zeros(1), seq_lens_cpu_upper_bound=lengths,
        is_prefilling=seen == 0,
    )  # fmt: skip
    return builder.build(0, common, **drafting)
