"""Compare one call on all ranks before any payload: ranks that disagree raise the same message.

A collective whose shapes differ between ranks hangs, aborts a process or returns garbage without an error. So
every rank first gathers a signature of fixed size, 16 words of 64 bits, which cannot itself mismatch. It goes
over a gloo group of its own: on the group of the payload, the signature of a rank that raises would meet the
payload of the others.
"""

import atexit
import hashlib
import struct
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from gdn._torch_compat import group_store, group_timeout
from gdn.distributed.plan import Plan
from gdn.problem import Problem
from gdn.problem.check import records_gradient

VERSION = 1
NUM_WORDS = 16
NUM_COMPARED = 256  # calls that a context remembers
NUM_TEXT = 512  # bytes of a refusal's message that the other ranks repeat
REFUSED = "refused"
PATIENCE = timedelta(seconds=5)  # how long a rank that refuses waits for the others before it raises alone

OPERATIONS = (REFUSED, "chunk_gated_delta_rule", "causal_conv1d", "unshard", "convert", "gather_states")
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXCHANGES = ("gather", "owner", "nodes", "heads")

FLAGS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "state_v_first", "exact", "batch_invariant",
)  # fmt: skip

# a process group -> the gloo group of the same ranks for signatures
_groups: "weakref.WeakKeyDictionary[ProcessGroup, dist.ProcessGroupGloo]" = weakref.WeakKeyDictionary()
# a caller may keep its group until the end; a thread of gloo that ends a tensor after that aborts the process
atexit.register(_groups.clear)


class Flags(NamedTuple):
    """Hold named flags that are one word of a signature."""

    names: tuple[str, ...]
    values: tuple[bool, ...]


class Hashed(NamedTuple):
    """Hold a value that is compared by the hash of its text: offsets, runs."""

    value: Any


@dataclass(frozen=True)
class Signature:
    """Hold what has to be the same on all ranks: an operation and its named words.

    A value is an int, a bool, a float, a dtype or None, the name of an exchange, Flags or Hashed. Its kind
    may not differ between ranks: each rank reads the words of the others by the kinds of its own.
    """

    operation: str
    words: tuple[tuple[str, Any], ...]

    def encode(self) -> list[int]:
        """Return NUM_WORDS ints of 64 bits."""
        names = hashed(",".join(name for name, _ in self.words))
        code = [VERSION, OPERATIONS.index(self.operation), names, *(encode(x) for _, x in self.words)]
        assert len(code) <= NUM_WORDS, code
        return code + [0] * (NUM_WORDS - len(code))

    def differences(self, rows: Sequence[Sequence[int]]) -> str | None:
        """Return the message about ranks whose words differ from one another, or None."""
        kinds = (("version", 0), ("operation", OPERATIONS), ("list of words", Hashed("")), *self.words)
        for i, (name, example) in enumerate(kinds):
            column = [row[i] for row in rows]
            if len(set(column)) > 1:
                return (
                    f"cp_context: expected the same call on all ranks, got {_by_rank(name, example, column)}"
                )
        return None


class Compared:
    """Remember the calls that all ranks have compared, the last NUM_COMPARED.

    repeated   what later calls of a layout repeat, by its key; each belongs to a call that is remembered
    """

    def __init__(self) -> None:
        self._signatures: dict[Signature, None] = {}
        self.repeated: dict[Hashable, Any] = {}

    def repeat(self, key: Hashable, call: Any) -> None:
        """Keep a call for those of its layout. Strides are in the key, so that a call may have many."""
        if len(self.repeated) >= NUM_COMPARED:
            self.repeated.clear()
        self.repeated[key] = call

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._signatures

    def add(self, signature: Signature) -> None:
        self._signatures[signature] = None
        if len(self._signatures) > NUM_COMPARED:
            # all ranks forget the same one: they made the same calls in the same order
            self._signatures.pop(next(iter(self._signatures)))
            self.repeated.clear()


def _by_rank(name: str, example: Any, column: Sequence[int]) -> str:
    """Return "HV=32 on ranks 0, 1 and HV=16 on rank 2"; the groups alone where a word is a hash."""
    if isinstance(example, Flags):
        # the first flag that differs
        bit = next(b for b in range(len(example.names)) if len({x >> b & 1 for x in column}) > 1)
        name = example.names[bit]
        column, example = [x >> bit & 1 for x in column], True
    parts = []
    for value in dict.fromkeys(column):
        ranks = [str(rank) for rank, x in enumerate(column) if x == value]
        where = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        text = decode(value, example)
        parts.append(f"{name}={text} on {where}" if text is not None else f"one {name} on {where}")
    return " and ".join(parts).replace(" and one ", " and another ")


def encode(value: Any) -> int:
    """Return a value of a signature as a signed int of 64 bits."""
    if isinstance(value, Flags):
        return sum(bool(flag) << bit for bit, flag in enumerate(value.values))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if value is None or isinstance(value, torch.dtype):
        return DTYPES.index(value)
    return EXCHANGES.index(value) if isinstance(value, str) else hashed(repr(value))


def decode(word: int, example: Any) -> str | None:
    """Return the text of a word, read as a value of the kind of `example`; None for a hash."""
    if isinstance(example, bool):
        return str(bool(word))
    if isinstance(example, int):
        return str(word)
    if isinstance(example, float):
        return str(struct.unpack("<d", struct.pack("<q", word))[0])
    if example is OPERATIONS:
        return OPERATIONS[word]
    if example is None or isinstance(example, torch.dtype):
        return str(DTYPES[word]).removeprefix("torch.")
    return EXCHANGES[word] if isinstance(example, str) else None


def hashed(text: str) -> int:
    """Return 63 bits of the SHA-256 of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shape_words(x: Tensor, dim: int) -> tuple[tuple[str, Any], ...]:
    others = [size for axis, size in enumerate(x.shape) if axis != dim % x.dim()]
    return (
        ("dim", dim % x.dim()),
        ("shape", Hashed(tuple(others))),
        ("dtype", x.dtype),
        ("requires_grad", records_gradient(x)),
    )


def rule_words(p: Problem, plan: Plan, records: bool) -> tuple[tuple[str, Any], ...]:
    """Return the words of a signature that describe a call of the rule."""
    flags = {name: getattr(p, name) for name in FLAGS}
    flags |= {
        "initial_state": p.initial_state is not None,
        "requires_grad": records,
        "decay per key channel": p.is_per_channel,
    }
    others = (*(None if x is None else x.dtype for x in (p.g, p.beta, p.initial_state)), p.lower_bound)
    return (
        ("num_tokens", plan.table.num_tokens), ("B", plan.batch), ("H", p.H), ("HV", p.HV), ("K", p.K),
        ("V", p.V), ("dtype", p.q.dtype),
        ("set of lower_bound and dtypes of g, beta and initial_state", Hashed(others)),
        ("flags", Flags(tuple(flags), tuple(flags.values()))), ("scale", p.scale),
        ("runs", Hashed(plan.table.runs)),
    )  # fmt: skip


def conv_words(
    x: Tensor, width: int, initial_state: Tensor | None, plan: Plan, records: bool
) -> tuple[tuple[str, Any], ...]:
    """Return the words of a signature that describe a call of the convolution with filters of `width`."""
    return (
        ("num_tokens", plan.table.num_tokens), ("B", plan.batch), ("D", x.shape[2]), ("W", width),
        ("dtype", x.dtype), ("dtype of initial_state", getattr(initial_state, "dtype", None)),
        ("requires_grad", records), ("runs", Hashed(plan.table.runs)),
    )  # fmt: skip


def signature_group(group: ProcessGroup) -> dist.ProcessGroupGloo:
    """Return a gloo group of the same ranks for signatures; the first call is collective over these ranks.

    It meets in the store of `group` and has its timeout. (`torch.distributed.new_group` would need every rank
    of the job, or equally many groups on all ranks of this one.)
    """
    gloo = _groups.get(group)
    if gloo is None:
        store = dist.PrefixStore("gdn_signatures", group_store(group))
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), group_timeout(group))
        _groups[group] = gloo
    return gloo


def start_agreement(signature: Signature, group: dist.ProcessGroupGloo) -> Callable[[], None]:
    """Start to gather the signatures of all ranks; return the function that waits for them and compares.

    It raises ValueError, with the same message on every rank, unless all ranks have the same signature, and
    RuntimeError on every other rank if a rank refuses its call, with the message of that rank.
    """
    wait = _start_gather(torch.tensor(signature.encode()), group)
    return lambda: _compare(signature, wait().tolist(), group)


def _compare(signature: Signature, rows: list[list[int]], group: dist.ProcessGroupGloo) -> None:
    """Raise for ranks that differ or refuse; see `start_agreement`."""
    refused = [rank for rank, row in enumerate(rows) if row[1] == OPERATIONS.index(REFUSED)]
    if refused:
        texts = _gather(torch.zeros(NUM_TEXT, dtype=torch.uint8), group)
        said = bytes(texts[refused[0]].tolist()).rstrip(b"\0").decode(errors="replace")
        others = ", ".join(map(str, refused))
        raise RuntimeError(
            f"cp_context: expected a valid call on all ranks, got an error on rank {others}: {said}"
        )
    message = signature.differences(rows)
    if message is not None:
        raise ValueError(message)


def refuse(error: Exception, group: dist.ProcessGroupGloo) -> None:
    """Tell the other ranks that this one raises `error`; wait at most PATIENCE for them."""
    text = f"{type(error).__name__}: {error}".encode()[:NUM_TEXT]
    message = torch.zeros(NUM_TEXT, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    signature = Signature(REFUSED, ())
    try:
        _gather(torch.tensor(signature.encode()), group, PATIENCE)
        # the others are there; they read it after local work, which may compile kernels
        _gather(message, group)
    except RuntimeError:
        # the others are not there: they know the plan, and wait in the payload for their timeout
        return


def gather_rows(values: Sequence[int], group: dist.ProcessGroupGloo) -> list[list[int]]:
    """Return the ints of every rank, which may have different numbers of them."""
    counts = _gather(torch.tensor([len(values)]), group).flatten().tolist()
    padded = torch.zeros(max(counts), dtype=torch.int64)
    padded[: len(values)] = torch.tensor(values)
    rows = _gather(padded, group).tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _gather(x: Tensor, group: dist.ProcessGroupGloo, timeout: timedelta | None = None) -> Tensor:
    return _start_gather(x, group)(timeout)


def _start_gather(x: Tensor, group: dist.ProcessGroupGloo) -> Callable[..., Tensor]:
    """Start to gather x, in a thread of gloo; return the function that waits for it."""
    out = [torch.empty_like(x) for _ in range(group.size())]
    work = group.allgather([out], [x])  # type: ignore[attr-defined]

    def wait(timeout: timedelta | None = None) -> Tensor:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
        return torch.stack(out)

    return wait
