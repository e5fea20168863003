"""Split GatedDeltaNet layers over the ranks of a mesh by whole key heads with their value heads.

    in_proj_qkv, conv1d                   three parameters each, q | k | v, of which a rank holds rows
    in_proj_z, in_proj_b, in_proj_a       rows            A_log, dt_bias    elements
    norm                                  replicated      out_proj          columns; outputs are summed

Each parameter is a DTensor. The layer reads its local tensor, so it computes on fewer heads and nothing else
changes: one collective on its output in the forward, one on the gradient of its input in the backward.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from gdn.distributed import sections

Module = TypeVar("Module", bound=nn.Module)

# parameter -> its placement; the names are those of gdn, Qwen3.5 and Qwen3-Next
PLACEMENTS: Mapping[str, Placement] = {
    "in_proj_z.weight": Shard(0), "in_proj_b.weight": Shard(0), "in_proj_a.weight": Shard(0),
    "in_proj_qkvz.weight": Shard(0), "in_proj_ba.weight": Shard(0),  # rows of a key head are neighbours
    "A_log": Shard(0), "dt_bias": Shard(0), "norm.weight": Replicate(), "out_proj.weight": Shard(1),
}  # fmt: skip
SECTIONS = ("in_proj_qkv.weight", "conv1d.weight", "conv1d.bias")
# numbers of heads and channels, which a layer holds for its own rank from then on
SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")


def tensor_parallel(
    module: Module, mesh: DeviceMesh, *, sequence_parallel: bool = False, src_data_rank: int | None = 0
) -> Module:
    """Split every GatedDeltaNet layer of a module over the ranks of a mesh, in place; return the module.

    Rank r of R computes key heads r H/R .. (r+1) H/R and their value heads. Other layers are left as they
    are: split them by `torch.distributed.tensor.parallel.parallelize_module`.

    Args:
        module              a `gdn.GatedDeltaNet`, or a model with such layers or with those of a Transformers
                            Qwen3-Next or Qwen3.5, whose classes and calls stay
        mesh                DeviceMesh of one dimension. R = 1 splits nothing, but gives the same structure
        sequence_parallel   True: a layer's input and output are the tokens of this rank, T/R neighbours each
        src_data_rank       weights are those of this rank of the mesh; None: each rank has the same already

    A `state_dict` keeps the names and shapes of the whole layer, as DTensors. The parameters q, k, v of
    in_proj_qkv and conv1d have names of their own for an optimizer; `gdn.distributed.get_state_dict` returns
    its state under the names of the whole layer.
    Raises: TypeError for a mesh that is none; ValueError if no layer is found, H is no multiple of R, or a
            layer has other parameters (adapters come later). Nothing is changed then.
    Cost:   the layer's output is summed over the ranks in the forward, its input's gradient in the backward;
            with sequence_parallel a gather and a scatter of tokens each.

    Example:
        >>> import torch, gdn
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> layer = gdn.GatedDeltaNet(64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)
        >>> gdn.distributed.tensor_parallel(layer, mesh)(torch.randn(1, 100, 64)).shape
        torch.Size([1, 100, 64])
        >>> distributed.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; pass mesh['tp'], for instance")
    layers = {name: x for name, x in module.named_modules() if is_layer(x)}
    if not layers:
        raise ValueError(f"module: expected GatedDeltaNet layers, got none in {type(module).__name__}")
    for name, layer in layers.items():
        _check(name, layer, mesh)
    for layer in layers.values():
        _split(layer, mesh, sequence_parallel, src_data_rank)
    return module


def is_layer(module: nn.Module) -> bool:
    """Return True for a GatedDeltaNet of this package or of Transformers, known by its members."""
    names = (
        "num_k_heads",
        "num_v_heads",
        "head_k_dim",
        "head_v_dim",
        "A_log",
        "dt_bias",
        "conv1d",
        "out_proj",
    )
    return all(hasattr(module, name) for name in names)


def _check(name: str, layer: Any, mesh: DeviceMesh) -> None:
    """Raise ValueError unless the layer can be split."""
    where = f"{name}: " if name else ""
    for parameter, x in layer.named_parameters():
        if isinstance(x, DTensor):
            raise ValueError(
                f"{where}expected a whole layer, got a DTensor as {parameter}; split over tp first"
            )
        if parameter not in PLACEMENTS and parameter not in SECTIONS:
            raise ValueError(f"{where}expected the parameters of GatedDeltaNet alone, got {parameter}")
    if layer.num_k_heads % mesh.size():
        raise ValueError(
            f"{where}expected key heads divisible by tp, got {layer.num_k_heads} and {mesh.size()}"
        )


def _split(layer: Any, mesh: DeviceMesh, sequence_parallel: bool, src_data_rank: int | None) -> None:
    R, K, V = mesh.size(), layer.head_k_dim, layer.head_v_dim
    rows = (layer.num_k_heads * K, layer.num_k_heads * K, layer.num_v_heads * V)
    for name, parameter in list(layer.named_parameters()):
        path, _, leaf = name.rpartition(".")
        owner = layer.get_submodule(path)
        if name in SECTIONS:
            parts = [_distribute(x, mesh, Shard(0), src_data_rank) for x in parameter.detach().split(rows)]
            sections.replace_parameter(owner, leaf, parts, parameter.requires_grad)
        else:
            local = _distribute(parameter.detach(), mesh, PLACEMENTS[name], src_data_rank)
            setattr(owner, leaf, nn.Parameter(local, parameter.requires_grad))
            sections.read_locally(owner, leaf)
    for name in SIZES:
        if hasattr(layer, name):
            setattr(layer, name, getattr(layer, name) // R)
    if isinstance(layer.conv1d, nn.Conv1d):
        channels = sum(rows) // R
        layer.conv1d.in_channels = layer.conv1d.out_channels = layer.conv1d.groups = channels
    layer.gdn_tensor_parallel = (mesh, Shard(1) if sequence_parallel else Replicate())
    sections.add_base(layer, _Split)


def _distribute(x: Tensor, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None) -> DTensor:
    return distribute_tensor(x.contiguous(), mesh, [placement], src_data_rank=src_data_rank)


class _Split:
    """Enter and leave the region where ranks hold different heads, around the forward of a layer's class."""

    gdn_tensor_parallel: tuple[DeviceMesh, Placement]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        name = "hidden_states" if "hidden_states" in kwargs else "hidden"
        hidden = args[0] if args else kwargs.pop(name, None)
        if isinstance(hidden, DTensor) or not isinstance(hidden, Tensor):
            raise TypeError(f"{name}: expected a local tensor, got a {type(hidden).__name__}")
        mesh, placement = self.gdn_tensor_parallel
        # the ranks have gradients of different heads for the same input: Partial, summed where they leave
        whole = DTensor.from_local(hidden, mesh, [placement], run_check=False).redistribute(
            placements=[Replicate()]
        )
        local = whole.to_local(grad_placements=[Partial()])
        y = super().forward(*(local, *args[1:]), **kwargs)  # type: ignore[misc]
        summed = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(
            placements=[placement]
        )
        return summed.to_local()
