"""Find out what a recorded step has of a model: the addresses of its weights, and what Python decides by."""

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# attributes of every module: its parameters, hooks and parts
COMMON = frozenset(vars(nn.Module()))
CONTAINERS = (list, tuple, set, dict)
# attributes that a step may read in Python
VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)

PLAIN_TENSORS = {Tensor, nn.Parameter}

# tensors that multimodal models replace in each `generate`; a step gets positions that were made with them
REPLACED = {"rope_deltas"}


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return each module once; `model.modules()` makes up a name for each and takes four times as long."""
    modules, listed = [model], {model}
    # the list grows while it is read
    for module in modules:
        for part in module._modules.values():
            if part is not None and part not in listed:
                listed.add(part)
                modules.append(part)
    return modules


def is_hooked(module: nn.Module) -> bool:
    """Return True if a module has hooks, or a forward of its own: a replay would skip them."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_hf_hook" in own)


class Attributes:
    """Hold the attributes of a model's modules, to restore them after a run that must change none."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules_of(model)
        self.before = [dict(vars(m)) for m in self.modules]

    def restore(self) -> bool:
        """Restore the attributes; return True if there was one to restore."""
        changed = self._changed()
        for m, own in changed:
            vars(m).clear()
            vars(m).update(own)
        return bool(changed)

    def have_changed(self) -> bool:
        """Return True if a module has other attributes."""
        return bool(self._changed())

    def _changed(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        pairs = zip(self.modules, self.before, strict=True)
        return [(m, own) for m, own in pairs if not has_same(vars(m), own)]


def has_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two dictionaries have the same objects under the same names."""
    return one.keys() == other.keys() and all(x is other[name] for name, x in one.items())


class ModelKey:
    """Hold what a recording has of a model; thousands of values are hashed once."""

    def __init__(self, values: tuple[Hashable, ...]) -> None:
        self.values, self.hash = values, hash(values)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ModelKey) and self.hash == other.hash and self.values == other.values


class Snapshot:
    """Tell whether a model is as it was, in a quarter of the time that collecting its values takes.

    It compares the identities of what `is_hooked` and `values_of` read. No object of the model is kept alive,
    so a new container or tensor may have the address of an old one: the contents of these are compared, too.
    A model that differs from its snapshot may still have equal values: the caller then collects them anew.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = list(map(ref, modules))
        own = [m.__dict__ for m in modules]
        self.getters = [itemgetter("training", "_modules", *(x.keys() - COMMON)) for x in own]
        self.sizes, self.kinds = list(map(len, own)), list(map(type, modules))
        self.forwards = {kind: _forward_of(kind) for kind in set(self.kinds)}
        configs = configs_of(own)
        self.configs = list(map(ref, configs))
        settings = [x.__dict__ for x in configs]
        self.names = list(map(list, settings))
        self.attention = _attention_of(configs)
        attributes = self._attributes(own, settings)
        self.identities, self.types = list(map(id, attributes)), list(map(type, attributes))
        # no other value gets its address
        self.values = list(filter(_is_constant, attributes))
        places = [[name for name in x.keys() - COMMON if _may_change(x[name])] for x in own]
        self.containers = [(place, name) for place, names in enumerate(places) for name in names]
        self.lists = [(place, name) for place, x in enumerate(settings) for name in x if _may_change(x[name])]
        self.contents = self._contents(own, settings)

    def is_of(self, model: Any) -> bool:
        """Return True if the model has no hooks and all is as in the snapshot."""
        modules, configs = [x() for x in self.modules], [x() for x in self.configs]
        if modules[0] is not model or list(map(type, modules)) != self.kinds:
            return False
        if any(x is None for x in configs):
            return False
        settings = [x.__dict__ for x in configs]
        if list(map(list, settings)) != self.names or _attention_of(configs) != self.attention:
            return False
        own = [m.__dict__ for m in modules]
        if any(map(itemgetter("_forward_hooks"), own)) or any(map(itemgetter("_forward_pre_hooks"), own)):
            return False
        if list(map(len, own)) != self.sizes:
            return False
        try:
            attributes = self._attributes(own, settings)
        except KeyError:
            # an attribute has another name
            return False
        if list(map(id, attributes)) != self.identities or list(map(type, attributes)) != self.types:
            return False
        is_same = all(_forward_of(kind) is forward for kind, forward in self.forwards.items())
        return is_same and self._contents(own, settings) == self.contents

    def _attributes(self, own: list[dict[str, Any]], settings: list[dict[str, Any]]) -> list[Any]:
        """Return the attributes of all modules and configurations."""
        of_modules = [get(x) for get, x in zip(self.getters, own, strict=True)]
        return list(chain(chain.from_iterable(of_modules), *(x.values() for x in settings)))

    def _contents(self, own: list[dict[str, Any]], settings: list[dict[str, Any]]) -> tuple[list[Any], ...]:
        """Return what there is in the dictionaries and lists of all modules and configurations."""
        modules, *others = ([x[name] for x in own] for name in ("_modules", "_parameters", "_buffers"))
        tensors = list(chain.from_iterable([x.values() for x in chain(*others) if x]))
        weights = [x for x in tensors if x is not None]
        if not set(map(type, weights)) <= PLAIN_TENSORS:
            weights = list(chain.from_iterable(map(_parts_of, weights)))
        return (
            list(map(len, modules)), list(map(id, chain.from_iterable([x.values() for x in modules if x]))),
            list(map(id, tensors)), list(map(Tensor.data_ptr, weights)),
            list(map(attrgetter("shape", "dtype"), weights)), list(map(Tensor.stride, weights)),
            [_plain(own[place][name]) for place, name in self.containers],
            [_plain(settings[place][name]) for place, name in self.lists],
        )  # fmt: skip


def values_of(modules: list[nn.Module]) -> tuple[Hashable, ...]:
    """Return what a recording has of a model: addresses, and what Python decides by.

    Weights that are written in place are read by a replay. Weights that are replaced are not, and neither is
    an adapter that is switched, a scale, another forward, or a value of a configuration, which forwards read.
    """
    configs = configs_of([m.__dict__ for m in modules])
    values: list[Hashable] = [*_attention_of(configs)]
    for config in configs:
        kind: Any = type(config)
        values.append(kind)
        for name, x in config.__dict__.items():
            values += (name, x if isinstance(x, VALUES) else _plain(x))
    for m in modules:
        own = m.__dict__
        kind = type(m)
        values += (kind, kind.forward, m.training)
        for x in chain(own["_parameters"].values(), own["_buffers"].values()):
            values += (None,) if x is None else _place_of(x)
        for name in own.keys() - COMMON - REPLACED:
            x = own[name]
            values += (name, x if isinstance(x, VALUES) else _plain(x))
    return tuple(values)


def _forward_of(kind: Any) -> Any:
    return kind.forward


def _is_constant(x: Any) -> bool:
    """Return True for an object that cannot change: as long as it lives, its address tells its contents."""
    return isinstance(x, VALUES) or (type(x) is tuple and all(isinstance(y, VALUES) for y in x))


def _may_change(x: Any) -> bool:
    return isinstance(x, (*CONTAINERS, Tensor)) and not _is_constant(x)


def configs_of(own: list[dict[str, Any]]) -> list[Any]:
    """Return the configurations that modules have, and those that are parts of these, each once."""
    configs = {id(x): x for attributes in own if _is_config(x := attributes.get("config"))}
    listed = list(configs.values())
    # the list grows while it is read
    for config in listed:
        for x in config.__dict__.values():
            if _is_config(x) and id(x) not in configs:
                configs[id(x)] = x
                listed.append(x)
    return listed


def _is_config(x: Any) -> bool:
    return hasattr(type(x), "model_type")


def _attention_of(configs: list[Any]) -> list[Any]:
    """Return the function that is registered for the attention of each configuration, or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    return [functions.get(getattr(config, "_attn_implementation", None)) for config in configs]


def _place_of(x: Tensor) -> tuple[Hashable, ...]:
    if type(x) not in PLAIN_TENSORS and len(parts := _parts_of(x)) > 1:
        return (type(x), x.shape, x.dtype, *map(_place_of, parts))
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _parts_of(x: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor consists of, as a quantised one, whose own address is 0."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    parts: Any = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    return list(chain.from_iterable(map(_parts_of, parts)))


def _plain(x: Any, depth: int = 2) -> tuple[Hashable, ...]:
    """Return the plain values, the addresses of tensors and the functions in a module's attribute.

    `depth`: how deep containers may lie in containers; those below do not count.
    """
    if isinstance(x, Tensor):
        return _place_of(x)
    if isinstance(x, CONTAINERS):
        pairs = x.items() if isinstance(x, dict) else enumerate(x)
        if depth == 0:
            return ()
        return tuple((key, y if isinstance(y, VALUES) else _plain(y, depth - 1)) for key, y in pairs)
    # not the function itself, which may hold the model
    return (id(x),) if callable(x) else ()
