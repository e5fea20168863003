"""Save a split model and its optimizer under the names and shapes of the whole one.

`torch.distributed.checkpoint` then loads what any layout saved under any other: FSDP2, tensor parallelism, or
one process. Context parallelism has no state.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.optim import Optimizer

from gdn.distributed import sections

State = dict[str, Any]
# wrappers whose names `torch.distributed.checkpoint` leaves out
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class Sections(NamedTuple):
    """Hold the name of a parameter of the whole layer, and of those that replace it names, rows, tensors."""

    whole: str
    names: list[str]
    rows: list[int]
    parameters: list[Tensor]


def get_state_dict(model: nn.Module, optimizer: Optimizer) -> tuple[State, State]:
    """Return the states of a model and its optimizer, by the names and shapes of the whole model.

    It calls `torch.distributed.checkpoint.state_dict.get_state_dict`, and joins the optimizer's states of
    q | k | v. All ranks call it. `torch.distributed.checkpoint.load` fills the tensors that it returns.
    """
    states_of: tuple[State, Any] = torch_state.get_state_dict(model, optimizer)
    state, optimizer_state = states_of
    states, groups = optimizer_state["state"], optimizer_state["param_groups"]
    for whole, names, _, _ in _sections(model):
        parts = [states.pop(name) for name in names if name in states]
        if parts:
            states[whole] = {key: _merged([x[key] for x in parts]) for key in parts[0]}
        for group in groups:
            first, *others = names
            group["params"] = [whole if x == first else x for x in group["params"] if x not in others]
    return state, optimizer_state


def set_state_dict(model: nn.Module, optimizer: Optimizer, state: State, optimizer_state: State) -> None:
    """Load what `get_state_dict` returned, under this layout or any other, into a model and its optimizer.

    It calls `torch.distributed.checkpoint.state_dict.set_state_dict`. All ranks call it.
    """
    states = dict(optimizer_state["state"])
    groups = [dict(group) for group in optimizer_state["param_groups"]]
    for section in _sections(model):
        whole, names, _, _ = section
        if whole in states:
            states.update(zip(names, _parts(states.pop(whole), section), strict=True))
        for group in groups:
            group["params"] = [y for x in group["params"] for y in (names if x == whole else [x])]
    torch_state.set_state_dict(
        model,
        optimizer,
        model_state_dict=state,
        optim_state_dict={"state": states, "param_groups": groups},
    )


def _sections(model: nn.Module) -> Iterator[Sections]:
    for prefix, module in model.named_modules():
        for name, rows in vars(module).get("gdn_sections", {}).items():
            path = f"{prefix}." if prefix else ""
            for wrapper in _WRAPPERS:
                path = path.replace(wrapper, "")
            names = sections.names_of_sections(name)
            parameters = [module._parameters[x] for x in names]
            yield Sections(path + name, [path + x for x in names], rows, parameters)  # type: ignore[arg-type]


def _merged(values: list[Any]) -> Any:
    """Return the state of q | k | v; a number of steps is that of each."""
    first = values[0]
    return sections.merge(values) if isinstance(first, Tensor) and first.dim() > 0 else first


def _parts(state: State, section: Sections) -> list[State]:
    """Return the states of q, k and v from that of q | k | v."""
    states_of: list[State] = [{} for _ in section.names]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            values = sections.split(value, section.rows, section.parameters)
        else:
            # copies: an optimizer adds to a number of steps in place
            values = [value.clone() if isinstance(value, Tensor) else value for _ in states_of]
        for one, part in zip(states_of, values, strict=True):
            one[key] = part
    return states_of
