"""Prepare a sequence of launches whose kernels are compiled, so that a call needs addresses alone.

`prepare` runs the Python code that makes the arguments of each launch once, on tensors of the meta device,
which have no memory. A meta tensor keeps the storage that it is a view of. So each argument is found again as
one of the call's tensors and a number of bytes after its address, and only that is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gdn.backends.triton.launch.launcher import DirectCall, EncodedDescriptors, descriptor_metadata


@dataclass(frozen=True)
class Ready:
    """Hold launches as functions of the addresses of a call's tensors.

    All arguments of all launches are taken from one tuple: addresses, addresses of views, encoded
    descriptors, then the numbers that never change.
    """

    device: int
    used: Callable[[Sequence[Any]], tuple[Tensor, ...]]  # the tensors that some launch takes
    views: list[tuple[int, int]]  # index of an address, bytes after it
    encoded: list[tuple[int, EncodedDescriptors]]  # index of an address, its descriptors
    numbers: tuple[Any, ...]
    launches: list[tuple[DirectCall, int, Callable[[Any], tuple[Any, ...]]]]  # call, grid, its arguments

    def launch(self, pointers: list[int]) -> None:
        """Launch all kernels on the current stream; `pointers`: the addresses of `used`, in order."""
        values = (
            *pointers,
            *[pointers[i] + offset for i, offset in self.views],
            *[encoded[pointers[i]] for i, encoded in self.encoded],
            *self.numbers,
        )
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for call, grid, arguments in self.launches:
            call(grid, stream, arguments(values))


def prepare(
    steps: Callable[[Sequence[Any]], Iterable[tuple[Any, tuple[Any, ...]]]], tensors: Sequence[Tensor | None]
) -> Ready:
    """Return the launches that `steps` makes of tensors like these, all compiled, at least one not empty."""
    metas = [
        None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for x in tensors
    ]
    made = [(launch, given) for launch, given in steps(metas) if launch.grid != 0]
    layout = Layout({x.untyped_storage()._cdata: i for i, x in enumerate(metas) if x is not None})
    places = [layout.places_of(launch, given) for launch, given in made]
    order = {place: i for i, place in enumerate(layout.order())}
    return Ready(
        made[0][0]._device,
        layout.used(),
        [(order["address", i], offset) for i, offset in layout.views],
        [(order["address", i], x) for i, x in layout.encoded.values()],
        tuple(layout.numbers.values()),
        [
            (launch.direct, launch.grid, take([order[place] for place in given]))
            for (launch, _), given in zip(made, places, strict=True)
        ],
    )


def take(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function that takes the elements at these indices, of which there is at least one."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: (values[indices[0]],)


class Layout:
    """Collect the arguments of all launches, each distinct one once.

    A place names an argument: the list of `Ready` that holds it, and its key there.
    """

    def __init__(self, positions: dict[int, int]) -> None:
        """Take the position of each tensor of a call, by its storage."""
        self.positions = positions
        self.addresses: dict[int, None] = {}
        self.views: dict[tuple[int, int], None] = {}
        self.encoded: dict[str, tuple[int, EncodedDescriptors]] = {}
        self.numbers: dict[str, Any] = {}

    def places_of(self, launch: Any, given: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """Return the places of all arguments of a launch."""
        places: list[tuple[str, Any]] = []
        metadata = iter(descriptor_metadata(launch._compiled) if launch.num_descriptors else ())
        for i, x in enumerate(given):
            if x is None:
                places.append(self.number(None))
            elif i < launch.num_descriptors:
                places += self.descriptor(x, next(metadata))
            else:
                places.append(self.tensor(x))
        return places + [self.number(x) for x in launch._trailing]

    def tensor(self, x: Tensor) -> tuple[str, Any]:
        """Return the place of the address of a tensor or view."""
        position, offset = self.locate(x)
        if offset == 0:
            return "address", position
        self.views[position, offset] = None
        return "view", (position, offset)

    def descriptor(self, descriptor: Any, metadata: Any) -> list[tuple[str, Any]]:
        """Return the places of an encoded descriptor, and of its shape and strides."""
        position, offset = self.locate(descriptor.base)
        fields = {name: x for name, x in vars(descriptor).items() if name != "base"}
        key = repr((position, offset, fields, metadata))
        if key not in self.encoded:
            self.encoded[key] = position, EncodedDescriptors(descriptor, metadata, offset)
        _, encoded = self.encoded[key]
        return [("encoded", key), *(self.number(x) for x in encoded.numbers)]

    def number(self, x: Any) -> tuple[str, Any]:
        """Return the place of a number that does not change."""
        # equal numbers of two types, or zeros of two signs, are two numbers
        key = repr(x)
        self.numbers[key] = x
        return "number", key

    def locate(self, x: Tensor) -> tuple[int, int]:
        """Return the position of the tensor that x is a view of, and the bytes between their addresses."""
        position = self.positions[x.untyped_storage()._cdata]
        self.addresses[position] = None
        return position, int(x.storage_offset()) * x.element_size()

    def used(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Return the function that takes the tensors that some launch reads or writes."""
        return take(list(self.addresses))

    def order(self) -> list[tuple[str, Any]]:
        """Return all places in the order of `Ready`."""
        return [
            *(("address", key) for key in self.addresses),
            *(("view", key) for key in self.views),
            *(("encoded", key) for key in self.encoded),
            *(("number", key) for key in self.numbers),
        ]
