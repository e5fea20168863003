"""Hold the matrix q | k | v of a split layer as three parameters, and save it as one.

A rank holds rows of q, rows of k and rows of v. No placement of DTensor describes such rows of one matrix, so
a module has the parameters weight_q, weight_k, weight_v, and the property `weight`: the local rows side by
side. In a `state_dict` there is one `weight` of full shape, split over the other axis where it divides.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

LETTERS = ("q", "k", "v")


def replace_parameter(module: Any, name: str, parts: Sequence[DTensor], requires_grad: bool) -> None:
    """Replace a parameter by the parameters name_q, name_k and name_v."""
    del module._parameters[name]
    for letter, part in zip(LETTERS, parts, strict=True):
        module.register_parameter(f"{name}_{letter}", nn.Parameter(part, requires_grad))
    add_base(module, object, {name: property(lambda self: _join_local(self, name))})
    if "gdn_sections" not in vars(module):
        module.gdn_sections = {}
        module.register_state_dict_post_hook(_merge_saved)
        module.register_load_state_dict_pre_hook(_split_loaded)
    module.gdn_sections[name] = [part.shape[0] for part in parts]


def read_locally(module: nn.Module, name: str) -> None:
    """Make the attribute `name` of a module the local tensor of its parameter, which is a DTensor."""
    add_base(module, object, {name: property(lambda self: to_local(self._parameters[name]))})

    def place_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if type(state.get(prefix + name)) is Tensor:
            like = module._parameters[name]
            state[prefix + name] = place(state[prefix + name], like)  # type: ignore[arg-type]

    module.register_load_state_dict_pre_hook(place_loaded)


def add_base(module: nn.Module, base: type, members: dict[str, Any] | None = None) -> None:
    """Give a module a class of its own: that of the module, with a base before it and more members."""
    cls = type(module)
    bases = (cls,) if base is object else (base, cls)
    prefix = "" if cls.__name__.startswith("TensorParallel") else "TensorParallel"
    # the module of the class stays: a Transformers layer is known by its file
    module.__class__ = type(prefix + cls.__name__, bases, {"__module__": cls.__module__, **(members or {})})


def to_local(x: Tensor) -> Tensor:
    """Return the local tensor of a parameter. The gradient of a replicated one is summed over the ranks.

    While FSDP2 has split the parameter as well, on a mesh of more dimensions, return the parameter itself:
    FSDP2 reads it under this name.
    """
    if not isinstance(x, DTensor) or x.device_mesh.ndim > 1:
        return x
    if x.placements[0].is_replicate():
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return x.to_local()


def names_of_sections(name: str) -> list[str]:
    """Return the names of the three parameters that replace one."""
    return [f"{name}_{letter}" for letter in LETTERS]


def merge(parts: Sequence[Tensor]) -> Tensor:
    """Return q | k | v as one tensor of full shape. As a DTensor it is split over axis 1, or replicated."""
    first = parts[0]
    if isinstance(first, DTensor):
        num_ranks = first.device_mesh.size()
        is_divisible = first.dim() == 2 and first.shape[1] % num_ranks == 0
        placement: Placement = Shard(1) if is_divisible else Replicate()
        parts = [x.redistribute(placements=[placement] * x.device_mesh.ndim) for x in parts]  # type: ignore[attr-defined]
    return torch.cat(list(parts))


def split(whole: Tensor, rows: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the sections of a tensor of full shape, placed as those of `like`."""
    return [place(x, other) for x, other in zip(whole.split(list(rows)), like, strict=True)]


def place(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of full shape with the mesh and placements of another; every rank has all of x."""
    if not isinstance(like, DTensor):
        return x
    if not isinstance(x, DTensor):
        mesh = like.device_mesh
        x = DTensor.from_local(x.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    # a copy, since parameters that FSDP2 has split as well have a placement that redistribute does not make
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


def _join_local(module: nn.Module, name: str) -> Tensor:
    """Return the local rows of q | k | v: one product with them costs less than three, whatever T is."""
    parts = [module._parameters[x] for x in names_of_sections(name)]
    return torch.cat([x.to_local() if isinstance(x, DTensor) else x for x in parts])  # type: ignore[misc]


def _merge_saved(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in module.gdn_sections:  # type: ignore[union-attr]
        state[prefix + name] = merge([state.pop(prefix + x) for x in names_of_sections(name)])


def _split_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, rows in module.gdn_sections.items():  # type: ignore[union-attr, operator]
        if prefix + name in state:
            names = names_of_sections(name)
            like = [module._parameters[x] for x in names]
            parts = split(state.pop(prefix + name), rows, like)  # type: ignore[arg-type]
            state.update({prefix + x: part for x, part in zip(names, parts, strict=True)})
