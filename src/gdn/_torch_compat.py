"""Gather what this package uses of PyTorch's private interface, with the reason; no other module does.

Each name here may move or go with a new version of PyTorch. None has a public counterpart:

    forward_ad._current_level            the level of forward-mode differentiation, which our operators lack
    _len_torch_dispatch_stack            an active TorchDispatchMode must see an operator, not its parts
    _functorch.peek_interpreter_stack    so must a transform of torch.func
    _len_torch_function_stack            an active TorchFunctionMode must see the functions of a module
    _get_current_function_mode_stack     those modes, of which DeviceContext, a default device, sees nothing
    _get_sdp_priority_order              the order in which attention prefers its kernels, set by sdpa_kernel
    _get_fp32_precision_getter, ...      flags of torch.backends, whose attributes cost 1 us each
    _storage_Use_Count                   how many tensors have one memory: a caller may keep views
    module._has_any_global_hook          hooks of all modules must see a module's call, not its functions
    _top_saved_tensors_default_hooks     hooks of saved tensors, as of activation checkpointing
    _get_current_graph_task_keep_graph   True while a backward keeps its graph for another one
    _disabled_torch_dispatch_impl        the mark of tensor subclasses that do not intercept operators
    decompose_custom_triton_ops          True while a compiler asks for the kernels inside an operator
    FunctionalTensor, -Mode              the tensors and the mode of AOTAutograd's trace
    fx.traceback.current_meta            the mark of operators that a compiler may not repeat
    _AutoDispatchBelowAutograd           an operator within its own autograd formula, a collective within ours
    _functional_collectives              collectives that a compiler can trace; imported with a context
    distributed.nn.functional            imported first: its defaults would hold the group that exists by then
    DeviceMesh._flatten                  the group of all ranks of a mesh of two dimensions
    _get_process_group_store             where the ranks of a group meet, for a second group of the same ranks
    ProcessGroup._get_backend, _timeout  the timeout that the second group shares
"""

from contextlib import suppress
from datetime import timedelta
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as _functorch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

if torch.distributed.is_available():
    # 2 ms. Imported after init_process_group, as by a context, it keeps the default group for ever: threads
    # of gloo outlive destroy_process_group, and one that ends a tensor at exit aborts the process
    with suppress(ImportError):
        import torch.distributed.nn.functional

__all__ = [
    "FunctionalTensor",
    "FunctionalTensorMode",
    "decomposes_kernels",
    "flat_group",
    "forward_tangent",
    "function_devices",
    "functional_collectives",
    "group_store",
    "group_timeout",
    "has_function_mode",
    "has_global_hooks",
    "has_saved_tensor_hooks",
    "intercepts_operators",
    "is_forward_mode",
    "is_plain",
    "keeps_graph",
    "kernel_flags",
    "run_collective",
    "run_once",
    "storage_uses",
    "tensor_uses",
]


def is_forward_mode() -> bool:
    """Return True inside forward-mode differentiation."""
    return forward_ad._current_level >= 0


def has_function_mode() -> bool:
    """Return True inside a TorchFunctionMode."""
    return bool(torch._C._len_torch_function_stack() > 0)


def function_devices() -> tuple[torch.device, ...] | None:
    """Return the default devices of active TorchFunctionModes; None if there is a mode of another kind."""
    if torch._C._len_torch_function_stack() == 0:
        return ()
    modes = torch.overrides._get_current_function_mode_stack()
    if any(type(mode) is not DeviceContext for mode in modes):
        return None
    return tuple(mode.device for mode in modes)


def kernel_flags() -> tuple[Any, ...]:
    """Return the flags of torch.backends by which matmuls, convolutions and attention select kernels.

    `torch.get_float32_matmul_precision` is not among them: it raises where `fp32_precision` was set, which
    has the same information.
    """
    get = torch._C
    return (
        get._get_fp32_precision_getter("cuda", "matmul"), get._get_fp32_precision_getter("cuda", "conv"),
        get._get_cublas_allow_fp16_reduced_precision_reduction(), get._get_cublas_allow_fp16_accumulation(),
        get._get_cublas_allow_bf16_reduced_precision_reduction(), get._get_blas_preferred_backend(),
        get._get_cudnn_enabled(), get._get_cudnn_deterministic(), get._get_cudnn_benchmark(),
        get._get_flash_sdp_enabled(), get._get_mem_efficient_sdp_enabled(), get._get_math_sdp_enabled(),
        get._get_cudnn_sdp_enabled(), get._get_math_sdp_allow_fp16_bf16_reduction(),
        tuple(get._get_sdp_priority_order()),
    )  # fmt: skip


def storage_uses(x: Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor's storage object, and the numbers of references to it in C++ and Python.

    In C++ there is one for each tensor, and one for the storage's Python object, which exists in this call at
    the latest. References to that object are those of this call, if nobody has it.
    """
    storage = x.untyped_storage()
    address: int = storage._cdata
    return address, torch._C._storage_Use_Count(address), getrefcount(storage)


def tensor_uses(x: Tensor) -> int:
    """Return the number of references to a tensor in C++, as those of DLPack; 1 if nobody else has it."""
    count: int = x._use_count()  # type: ignore[attr-defined]
    return count


def has_global_hooks() -> bool:
    """Return True if the calls of all modules have hooks."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def has_saved_tensor_hooks() -> bool:
    """Return True where hooks replace what autograd saves: checkpointing computes it again later."""
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True) is not None


def keeps_graph() -> bool:
    """Return True in a backward whose saved tensors another backward may read (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def forward_tangent(x: Tensor) -> Tensor | None:
    """Return the forward-mode tangent of x, or None."""
    tangent: Tensor | None = forward_ad.unpack_dual(x).tangent
    return tangent


def intercepts_operators(x: Tensor) -> bool:
    """Return True if the class of x has a `__torch_dispatch__`; return False while a compiler traces.

    The fake tensors of a compiler replace the tensors of the caller, and may appear beside real constants.
    """
    kind = type(x)
    if kind is Tensor or torch.compiler.is_compiling():
        return False
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_plain(x: Tensor) -> bool:
    """Return True if no tracer, transform or dispatch mode is active for x.

    An operator without gradient may then call its body directly, which saves 40 us.
    """
    return (
        type(x) is Tensor
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def decomposes_kernels() -> bool:
    """Return True while a compiler replaces operators by the kernels that they launch."""
    return bool(_functorch.decompose_custom_triton_ops)


def functional_collectives() -> Any:
    """Return torch's functional collectives as operators, whose names are those of every version."""
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def run_collective(op: Any, *args: Any) -> Tensor:
    """Run a functional collective within an autograd formula of ours: its own, in Python, costs 10 us."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)  # type: ignore[no-any-return]


def run_once(op: Any, *args: Any) -> tuple[Tensor, ...]:
    """Run an operator within its own autograd formula; a compiler does not run it again in the backward.

    Within activation checkpointing its policy decides, alike on all ranks.
    Raises NotImplementedError where the compiler would decide by sizes, which may differ between ranks.
    """
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    with torch._C._AutoDispatchBelowAutograd():
        meta = traceback.current_meta
        if not meta or "recompute" in meta:
            return op(*args)  # type: ignore[no-any-return]
        if _functorch.activation_memory_budget not in (0, 1):
            budget = _functorch.activation_memory_budget
            raise NotImplementedError(f"activation_memory_budget: expected 1 with cp_context, got {budget}")
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
        try:
            return op(*args)  # type: ignore[no-any-return]
        finally:
            del meta["recompute"]


def flat_group(mesh: Any) -> Any:
    """Return the process group of all ranks of a DeviceMesh; its first call is collective."""
    return mesh._flatten("_".join(("gdn", *mesh.mesh_dim_names))).get_group()


def group_store(group: Any) -> Any:
    """Return the store in which the ranks of a process group met."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)


def group_timeout(group: Any) -> timedelta:
    """Return the timeout that a process group was made with, or torch's default where no backend says it."""
    from torch import distributed

    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return distributed.default_pg_timeout
