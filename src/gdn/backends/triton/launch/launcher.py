"""Call the C function that Triton compiles for a launch, without the Python code before it.

Triton's `CudaLauncher` is Python: on each launch it looks for scratch buffers, and it encodes each TMA
descriptor into a CUtensorMap. A descriptor depends on nothing but the address, shape and strides of a tensor
and on the block that a kernel loads. A training step has the same addresses as the step before, so here an
encoded descriptor is kept by its address (`EncodedDescriptors`). Triton's own functions encode it, and the C
function gets the arguments that Triton's Python code would give it.

These are parts of Triton that may change with its version. `direct_call` returns None for a version that is
not in CONVENTIONS, and for a kernel that needs more than a launch; the caller then uses Triton's launcher.
"""

from collections.abc import Callable, Sequence
from inspect import getclosurevars, isbuiltin, isfunction
from typing import Any

import triton

# calls a kernel's C function: grid, stream, all arguments of the kernel
DirectCall = Callable[[int, int, Sequence[Any]], None]


def triton_call(compiled: Any) -> DirectCall:
    """Return the call of Triton's own launcher, which encodes the descriptors among its arguments."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def call(grid: int, stream: int, arguments: Sequence[Any]) -> None:
        run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return call


def direct_call(compiled: Any) -> DirectCall | None:
    """Return how to call the C function of a compiled kernel; None where Triton's launcher must be used.

    Its arguments are those of the kernel, with (CUtensorMap, shape, strides) in the place of a descriptor.
    """
    major, minor, *_ = triton.__version__.split(".")
    convention = CONVENTIONS.get((major, minor))
    run = compiled.run
    if convention is None or type(run).__module__ != "triton.backends.nvidia.driver":
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    launch = run.launch
    if isfunction(launch):
        # Triton's function that encodes descriptors holds the C function
        launch = getclosurevars(launch).nonlocals.get("launcher")
    metadata = descriptor_metadata(compiled)
    if not isbuiltin(launch) or any(x is None for x in metadata):
        return None
    return convention(launch, run, compiled)


def call_flat(launch: Any, run: Any, compiled: Any) -> DirectCall:
    """Return the call of Triton 3.6: the C function takes each argument of the kernel as one of its own."""
    function, metadata = compiled.function, compiled.packed_metadata
    is_cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl

    def call(grid: int, stream: int, arguments: Sequence[Any]) -> None:
        launch(
            grid, 1, 1, stream, function, is_cooperative, pdl, None, None, metadata, None, None, None,
            *arguments,
        )  # fmt: skip

    return call


def call_packed(launch: Any, run: Any, compiled: Any) -> DirectCall:
    """Return the call of Triton 3.7 to 3.9: one C function for all kernels takes a tuple of arguments."""
    function, metadata = compiled.function, compiled.packed_metadata
    is_cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    annotations, signature = run.arg_annotations, run.kernel_signature

    def call(grid: int, stream: int, arguments: Sequence[Any]) -> None:
        launch(
            grid, 1, 1, stream, function, is_cooperative, pdl, metadata, None, None, None, None, None,
            annotations, signature, arguments,
        )  # fmt: skip

    return call


CONVENTIONS = {
    ("3", "6"): call_flat,
    ("3", "7"): call_packed,
    ("3", "8"): call_packed,
    ("3", "9"): call_packed,
}


def descriptor_metadata(compiled: Any) -> Sequence[Any]:
    """Return what Triton's compiler says of each TMA descriptor: swizzle, block and type of elements."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


class Address:
    """Stand for the tensor of a descriptor, of which Triton reads the address alone."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        """Return the address."""
        return self.pointer


class EncodedDescriptors(dict[int, Any]):
    """Encode the TMA descriptor of one tensor of a plan, once for each address that the tensor has.

    `self[pointer]` is the CUtensorMap, a host object of 128 bytes that a launch copies. The memory may belong
    to another tensor by then: only the address and the geometry are encoded. It is emptied when it holds
    `limit` descriptors.
    """

    def __init__(self, descriptor: Any, metadata: Any, offset: int, limit: int = 512) -> None:
        """Take a descriptor at any address, Triton's metadata, and its bytes after the tensor's address."""
        super().__init__()
        self.fields = {name: x for name, x in vars(descriptor).items() if name != "base"}
        self.kind, self.metadata, self.offset, self.limit = type(descriptor), metadata, offset, limit
        self.encode = descriptor_encoder()
        self.numbers: tuple[int, ...] = (*descriptor.shape, *descriptor.strides)

    def __missing__(self, pointer: int) -> Any:
        """Encode the descriptor at an address."""
        # a descriptor of its own, as another thread may encode the same one at another address
        descriptor = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=Address(pointer + self.offset))
        encoded = self.encode(descriptor, self.metadata)[0]
        if len(self) >= self.limit:
            self.clear()
        self[pointer] = encoded
        return encoded


def descriptor_encoder() -> Callable[[Any, Any], list[Any]]:
    """Return Triton's function from a descriptor and its metadata to a CUtensorMap, its shape and strides."""
    from triton.backends.nvidia import driver

    encode = driver.make_tensordesc_arg
    # from 3.8 on the function has a third parameter, which it does not read
    is_short = triton.__version__.startswith(("3.6.", "3.7."))
    return encode if is_short else lambda descriptor, metadata: encode(descriptor, metadata, None)
