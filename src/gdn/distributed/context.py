"""Define ContextParallel, the value that says how the tokens of a sequence lie on the ranks of a mesh."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gdn import settings
from gdn.distributed import calls, operators, redistribute
from gdn.distributed import check as comparison
from gdn.distributed.calls import Groups
from gdn.distributed.explain import ExchangeReport, explain
from gdn.distributed.plan import Piece, Plan, make_plan
from gdn.distributed.table import ORDERS, Table, equal_runs, make_table
from gdn.notation import Channels, ConvState, ConvWeight, Offsets, State, Values
from gdn.problem import Problem, host_offsets
from gdn.problem import check as argument

CHECKS = ("plan", "call", "never")
# A compiler may drop or repeat a collective on some ranks: those that are not in `operators` it may not see
_uncompiled = torch.compiler.disable(reason="the exchanges of gdn.ContextParallel are not compiled")
_LARGEST = 2**62  # offsets are compared with the table and not with a number of local tokens


@dataclass(frozen=True)
class ContextParallel:
    """Say which rank holds which tokens of every sequence, for context parallelism.

        S_end = M S_start + N over the tokens of a run;   S_in[j+1] = M_j S_in[j] + N_j over runs j

    Each rank computes its own tokens. One (M, N) per border is exchanged in the forward and one gradient of a
    state in the backward, whatever the number of tokens. The result is that of one device up to rounding.

    Args:
        mesh        DeviceMesh, or ProcessGroup: the ranks of one sequence. A mesh of two named dimensions is
                    (nodes, ranks of a node); rank r of the sequence is rank r % g of node r // g
        order       "contiguous": rank r holds block r of R. "headtail": blocks r and 2R-1-r of 2R, the order
                    of torch's ring attention. Blocks have ceil(T / R) or ceil(T / 2R) tokens, the last fewer
        runs        in place of `order`: (rank, start, stop) in the order of the tokens, every token of 0 .. T
                    once. A rank keeps its runs side by side in this order; it may have none
        num_tokens  T, the tokens on all ranks; needed with `order` if T is neither R times the local number
                    nor the last of the offsets on the host
        exchange    None: "gather", "owner" or, on a mesh of two dimensions, "nodes", by their costs.
                    "gather": every rank gets all maps. "owner": each rank folds some heads for all. "nodes":
                    that within each node, then between nodes. "heads": all-to-all of tokens and outputs, at
                    most H ranks; final states only where a sequence ends, zero elsewhere
        check       "plan": all ranks compare their calls before the first one of a kind. "call": before each
                    call (also with GDN_DEBUG=1). "never": not at all

    All ranks make the context, and make the same calls in the same order. The first context of a process
    group makes a gloo group for the comparisons; check="never" makes none.

    Raises: TypeError and ValueError for arguments that do not fit. A call raises ValueError with the same
            message on every rank if the calls differ, RuntimeError if another rank refuses its call.
    Cost:   4 HV K (K + V) bytes a border in the forward, 4 HV K V in the backward. No rank computes outputs
            or token gradients twice; where a sequence comes in and goes on, states are scanned twice.

    Example:
        >>> import torch, gdn
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
        >>> context = gdn.ContextParallel(distributed.group.WORLD)
        >>> q = torch.randn(1, 100, 2, 16)
        >>> o, _ = gdn.chunk_gated_delta_rule(q, q, q, use_qk_l2norm_in_kernel=True, cp_context=context)
        >>> o.shape
        torch.Size([1, 100, 2, 16])
        >>> distributed.destroy_process_group()
    """

    mesh: DeviceMesh | ProcessGroup
    order: str | None = None
    runs: Iterable[Any] | None = None
    num_tokens: int | None = None
    exchange: str | None = None
    check: str = "plan"
    _groups: Groups = field(init=False, repr=False)
    _table: Table | None = field(init=False, repr=False)
    _name: str = field(init=False, repr=False, compare=False)
    _compared: comparison.Compared = field(
        init=False, repr=False, compare=False, default_factory=comparison.Compared
    )

    def __post_init__(self) -> None:
        groups = calls.groups_of(self.mesh)
        group = groups.whole
        argument.choice("order", self.order, (None, *ORDERS))
        argument.choice("exchange", self.exchange, (None, *comparison.EXCHANGES))
        if self.exchange == "nodes" and groups.within is None:
            raise ValueError(
                "exchange: expected a mesh of two dimensions (nodes, ranks of a node) for 'nodes'"
            )
        argument.choice("check", self.check, CHECKS)
        table = None
        if self.runs is not None:
            if self.order is not None:
                raise ValueError(f"order: expected None with runs, got {self.order!r}")
            table = make_table(self.runs, group.size())
            if self.num_tokens not in (None, table.num_tokens):
                raise ValueError(
                    f"num_tokens: expected {table.num_tokens}, the end of the runs, got {self.num_tokens}"
                )
        elif self.num_tokens is not None:
            table = equal_runs(self.order or ORDERS[0], _positive(self.num_tokens), group.size())
        object.__setattr__(self, "runs", None if self.runs is None or table is None else table.runs)
        object.__setattr__(self, "_groups", groups)
        object.__setattr__(self, "_table", table)
        values = (self.order, self.runs, self.num_tokens, self.exchange, self.check)
        object.__setattr__(self, "_name", operators.name_context(self, values))
        if self.check != "never":
            comparison.signature_group(group)

    @property
    def rank(self) -> int:
        """Return the rank of this process within the mesh."""
        return self._groups.whole.rank()

    @property
    def world_size(self) -> int:
        """Return R, the number of ranks of the mesh."""
        return self._groups.whole.size()

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this rank along `dim`, in local order, from all tokens; no communication."""
        return redistribute.shard(x, self._table_of(x.shape[dim]), self.rank, dim)

    @_uncompiled
    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Return all tokens along `dim` on every rank, from those of each rank.

        The gradient of x is the sum of the gradients that all ranks have for these tokens; all ranks take it,
        or none.
        """
        with self._comparing("unshard") as compare:
            table = self._local_table("x", x.shape[dim])
            compare(*comparison.shape_words(x, dim), ("runs", comparison.Hashed(table.runs)))
        return redistribute.unshard(x, table, self.rank, dim, self._groups.whole)

    @_uncompiled
    def convert(self, x: Tensor, dim: int, *, to: "ContextParallel") -> Tensor:
        """Return the tokens that this rank holds by another context of the same mesh, in one all-to-all."""
        with self._comparing("convert") as compare:
            table = self._local_table("x", x.shape[dim])
            target = to._table_of(table.num_tokens)
            if (target.num_ranks, target.num_tokens) != (table.num_ranks, table.num_tokens):
                raise ValueError(
                    f"to: expected {table.num_tokens} tokens on {table.num_ranks} ranks, got "
                    f"{target.num_tokens} on {target.num_ranks}"
                )
            compare(
                *comparison.shape_words(x, dim),
                ("runs", comparison.Hashed(table.runs)),
                ("runs of `to`", comparison.Hashed(target.runs)),
            )
        return redistribute.convert(x, table, target, self.rank, dim, self._groups.whole)

    def pieces(
        self, cu_seqlens: Offsets | None = None, cu_seqlens_cpu: Offsets | None = None, *, batch: int = 1
    ) -> tuple[Piece, ...]:
        """Return the pieces of sequences on this rank: piece i is row i of the local states.

        A piece has `sequence`, its row in the states of all sequences, the global tokens `start` : `stop`,
        and `is_first` and `is_last`: the sequence begins, ends with this piece. `initial_state` is read where
        `is_first`; a returned state is the sequence's final state where `is_last`.
        """
        return self._plan("cu_seqlens", batch, None, cu_seqlens, cu_seqlens_cpu)[0].pieces

    def final_rows(
        self, cu_seqlens: Offsets | None = None, cu_seqlens_cpu: Offsets | None = None, *, batch: int = 1
    ) -> list[int]:
        """Return the rows of the local states that are final states of their sequences."""
        pieces = self.pieces(cu_seqlens, cu_seqlens_cpu, batch=batch)
        return [row for row, piece in enumerate(pieces) if piece.is_last]

    def shard_states(
        self, states: State, cu_seqlens: Offsets | None = None, cu_seqlens_cpu: Offsets | None = None
    ) -> State:
        """Return a row for each local piece from the states [N, ...] of all sequences: `initial_state`."""
        pieces = self.pieces(cu_seqlens, cu_seqlens_cpu, batch=1 if cu_seqlens is not None else len(states))
        return states[torch.tensor([p.sequence for p in pieces], dtype=torch.int64, device=states.device)]

    @_uncompiled
    def gather_states(
        self, states: State, cu_seqlens: Offsets | None = None, cu_seqlens_cpu: Offsets | None = None, *,
        batch: int = 1,
    ) -> State:  # fmt: skip
        """Return the final states [N, ...] of all sequences on every rank, from the local rows.

        The gradient of a row is the sum of the gradients of all ranks. On every rank it is taken or on none.
        """
        with self._comparing("gather_states") as compare:
            plan, offsets = self._plan("states", batch, None, cu_seqlens, cu_seqlens_cpu)
            if states.shape[0] != len(plan.pieces):
                raise ValueError(
                    f"states: expected {len(plan.pieces)} rows, pieces of rank {self.rank} in cp_context, "
                    f"got {states.shape[0]}"
                )
            compare(
                *comparison.shape_words(states, 0),
                ("B", batch),
                ("runs", comparison.Hashed(plan.table.runs)),
                ("cu_seqlens", comparison.Hashed(offsets)),
            )
        return redistribute.gather_states(states, plan, offsets, self._groups.whole)

    def rule(
        self, arguments: Mapping[str, Any], work: Callable[[], Any] | None = None
    ) -> tuple[Values, State | None]:
        """Compute `chunk_gated_delta_rule` for the tokens of this rank; arguments: those of `parse`.

        work: runs while the exchange is on its way
        """
        if torch.compiler.is_compiling() and operators.can_trace(self, arguments):
            return operators.compiled_rule(self._name, arguments)
        return self._rule(arguments, work)

    @_uncompiled
    def _rule(self, arguments: Mapping[str, Any], work: Callable[[], Any] | None) -> calls.Results:
        finish = calls.begin_rule(self, arguments)
        _run(work)
        return finish()

    def causal_conv1d(
        self,
        x: Channels,
        weight: ConvWeight,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        initial_state: ConvState | None = None,
        output_final_state: bool = False,
        cu_seqlens: Offsets | None = None,
        cu_seqlens_cpu: Offsets | None = None,
        backend: str | None = None,
        work: Callable[[], Any] | None = None,
    ) -> tuple[Channels, ConvState | None]:
        """Compute `gdn.causal_conv1d` for the tokens of this rank, after fetching W-1 inputs before each run.

        Arguments and results are those of `gdn.causal_conv1d`; offsets are global, and states have a row for
        each local piece as in `pieces`. `work` runs while the inputs are on their way.
        Cost: W-1 inputs a border, in one all-to-all, forward and backward.
        """
        options = {
            "activation": activation, "initial_state": initial_state, "cu_seqlens": cu_seqlens,
            "output_final_state": output_final_state, "cu_seqlens_cpu": cu_seqlens_cpu, "backend": backend,
        }  # fmt: skip
        if torch.compiler.is_compiling() and operators.can_trace(self, options):
            return operators.compiled_conv(self._name, x, weight, bias, options)
        return self._conv(x, weight, bias, options, work)

    @_uncompiled
    def _conv(
        self, x: Channels, weight: ConvWeight, bias: Tensor | None, options: Mapping[str, Any],
        work: Callable[[], Any] | None,
    ) -> calls.Results:  # fmt: skip
        finish = calls.begin_conv(self, x, weight, bias, options)
        _run(work)
        return finish()

    def explain(self, arguments: Mapping[str, Any]) -> tuple[Problem, ExchangeReport]:
        """Return the problem of this rank and the model of its exchange, for `gdn.explain`."""
        return explain(self, arguments)

    def overlap(self, work: Callable[[], Any]) -> "ContextParallel | Overlap":
        """Return a context for one call that runs `work` while the exchange of the call is on its way.

        In a compiled graph an exchange is one operator: `work` runs before it.
        """
        if torch.compiler.is_compiling():
            work()
            return self
        return Overlap(self, work)

    def _plan(
        self, name: str, batch: int, num_local: int | None, cu_seqlens: Any, cu_seqlens_cpu: Any
    ) -> tuple[Plan, tuple[int, ...] | None]:
        """Return the plan of this rank and the global offsets, after checking the lengths."""
        offsets = None
        if cu_seqlens is not None:
            argument.offsets(name, cu_seqlens, cu_seqlens_cpu, {"B": batch})
            ends = host_offsets(cu_seqlens, cu_seqlens_cpu, _LARGEST, read_device=cu_seqlens_cpu is None)
            offsets = None if ends is None else tuple(ends)
        elif cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu: expected None without cu_seqlens, got a tensor")
        if offsets is not None:
            table = self._table_of(offsets[-1])
            if table.num_tokens != offsets[-1]:
                raise ValueError(
                    f"cu_seqlens: expected global offsets ending at {table.num_tokens}, got {offsets[-1]}; "
                    "give those before sharding"
                )
        elif num_local is None:
            # which rank begins and ends a sequence does not depend on the number of tokens of equal shards
            table = self._table or self._table_of(2 * self.world_size)
        else:
            table = self._local_table(name, num_local)
        self._check_local(name, table, num_local)
        return make_plan(table, offsets, batch, self.rank), offsets

    @property
    def _num_slots(self) -> int:
        """Return the largest number of runs that a rank may have."""
        if self._table is not None:
            return self._table.num_slots
        return 2 if self.order == "headtail" else 1

    def _table_of(self, num_tokens: int) -> Table:
        if self._table is not None:
            return self._table
        return equal_runs(self.order or ORDERS[0], num_tokens, self.world_size)

    def _local_table(self, name: str, num_local: int) -> Table:
        """Return the table for a number of local tokens: equally many on all ranks unless T is known."""
        table = self._table_of(num_local * self.world_size)
        self._check_local(name, table, num_local)
        return table

    def _check_local(self, name: str, table: Table, num_local: int | None) -> None:
        mine = table.num_local[self.rank]
        if num_local not in (None, mine):
            raise ValueError(
                f"{name}: expected {mine} tokens, runs of rank {self.rank} in cp_context, got {num_local}"
            )

    @contextmanager
    def _comparing(
        self, operation: str, pending: list[Callable[[], None]] | None = None
    ) -> Iterator[Callable[..., None]]:
        """Yield a function that compares the words of a call on all ranks; send an error to the others.

        pending: gets the function that waits for the other ranks, which the caller calls before any payload
        """
        signature: list[comparison.Signature] = []
        try:
            yield lambda *words: signature.append(comparison.Signature(operation, words))
        except Exception as error:
            if self.check != "never":
                comparison.refuse(error, comparison.signature_group(self._groups.whole))
            raise
        (sent,) = signature
        if self.check == "never" or (
            sent in self._compared and self.check == "plan" and not settings.debug()
        ):
            return
        finish = comparison.start_agreement(sent, comparison.signature_group(self._groups.whole))

        def agree() -> None:
            finish()
            self._compared.add(sent)

        agree() if pending is None else pending.append(agree)


class Overlap:
    """Run `work` during one call of a context, while its exchange is on its way."""

    def __init__(self, context: ContextParallel, work: Callable[[], Any]) -> None:
        self.context, self.work = context, work

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    def rule(self, arguments: Mapping[str, Any]) -> tuple[Values, State | None]:
        return self.context.rule(arguments, self.work)

    def causal_conv1d(
        self, x: Channels, weight: ConvWeight, bias: Tensor | None = None, **options: Any
    ) -> tuple[Channels, ConvState | None]:
        return self.context.causal_conv1d(x, weight, bias, work=self.work, **options)

    def explain(self, arguments: Mapping[str, Any]) -> tuple[Problem, ExchangeReport]:
        return self.context.explain(arguments)

    def overlap(self, work: Callable[[], Any]) -> "ContextParallel | Overlap":
        return self.context.overlap(work)


def _run(work: Callable[[], Any] | None) -> None:
    if work is not None:
        work()


def _positive(num_tokens: Any) -> int:
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool):
        raise TypeError(f"num_tokens: expected an int, got {type(num_tokens).__name__}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens: expected at least 1, got {num_tokens}")
    return num_tokens
