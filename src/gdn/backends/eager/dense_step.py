"""Repeat a layer's decode step on whole fp32 states on a CPU: the arithmetic of `step` without its problems.

One token takes a CPU some 50 operators of a microsecond, so problems, slots and blocks of rows cost more than
the arithmetic, and so do views and new tensors. This form is for the call that a plain model makes: row n has
slot n, nothing is padding, and the states are fp32. The functions are those of `causal_conv1d_update`,
`decode` and `rms_norm_gated`, in their order, with their roundings to a dtype of 16 bits, so the bits are
theirs. The tensors between them lie in a workspace, whose views are made once.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from gdn.backends.eager.alignment import align_rows
from gdn.backends.eager.decode import advance_token
from gdn.backends.eager.norm import activate_gate, l2norm_
from gdn.problem.step import StepProblem

F32, F64 = torch.float32, torch.float64
FLOATS = {F32, torch.bfloat16, torch.float16}
LARGEST = 1 << 20  # bytes of a workspace that is kept for the next call


class Given(NamedTuple):
    """Hold the tensors of a call that this form reads and writes, by their names in StepProblem."""

    mixed_qkv: Tensor
    conv_state: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    state: Tensor
    z: Tensor | None
    norm_weight: Tensor | None
    out: Tensor


def plan_dense_step(p: StepProblem) -> Callable[..., None] | None:
    """Return a function of the tensors of such a call, in their order, for repeats; None for other calls."""
    floats = (
        p.mixed_qkv, p.conv_state, p.conv_weight, p.conv_bias, p.a, p.b, p.A_log, p.dt_bias, p.z,
        p.norm_weight,
    )  # fmt: skip
    is_float = p.state.dtype == F32 and all(x is None or x.dtype in FLOATS for x in floats)
    is_by_row = p.conv_index is None and p.read_index is None and p.write_index is None
    is_dense = p.state.stride()[-2:] == p.state.shape[-1:] + (1,) and p.conv_state.shape[2] > 0
    is_usual = p.A_log is not None and p.lower_bound is None and not p.is_per_channel and p.null_slot is None
    if (
        p.x.device.type != "cpu"
        or not (is_float and is_by_row and is_dense and is_usual)
        or p.x.shape[0] == 0
    ):
        return None
    # the tensors of this call must not live as long as its plan
    step = DenseStep(p)
    pick = itemgetter(*map(p.declaration.tensors.index, Given._fields))

    def launch(*tensors: Tensor | None) -> None:
        # without autograd's bookkeeping these operators take a CPU 15 % less time, and views half
        with torch.inference_mode():
            # the operators below are those of PyTorch, which autocast would run in 16 bits
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    step.run(Given(*pick(tensors)))
            else:
                step.run(Given(*pick(tensors)))

    return launch


class Sizes(NamedTuple):
    """Hold the sizes of a call, and the dtype in which the windows and the new inputs are joined."""

    B: int
    D: int
    L: int
    W: int
    H: int
    HV: int
    K: int
    V: int
    joined: torch.dtype

    @staticmethod
    def of_problem(p: StepProblem) -> "Sizes":
        B, D = p.mixed_qkv.shape
        joined = torch.promote_types(p.conv_state.dtype, p.x.dtype)
        return Sizes(B, D, p.conv_state.shape[2], p.W, p.H, p.HV, p.K, p.V, joined)


class Workspace:
    """Hold the tensors between the functions of a step, and their views; for one row without an axis of rows.

    line [B, D, L+1] are the windows and the new inputs, mixed [B, D] the convolved rows, kq [B, 2 HV, K] the
    key and the query of each value head. logits are x = a + dt_bias and b, in fp64 beside A_log, and
    activated e^g and beta in fp32.
    """

    def __init__(self, n: Sizes) -> None:
        lead = (n.HV,) if n.B == 1 else (n.B, n.HV)
        self.line = new(n.B, n.D, n.L + 1, dtype=n.joined)
        self.kept = self.line.narrow(2, 1, n.L)
        self.wide = self.line if n.joined == F32 else new(*self.line.shape)
        self.first, *self.inputs = self.wide.unbind(2)[-n.W :]
        self.mixed = new(n.B, n.D)
        qk, v = self.mixed.split_with_sizes((2 * n.H * n.K, n.HV * n.V), 1)
        self.rows, v = qk.view(n.B, 2 * n.H, n.K), v.view(*lead, 1, n.V)
        count = n.B * n.HV
        self.gates = new(2 * count + n.HV, dtype=F64)
        self.logits, self.rate = self.gates.split((2 * count, n.HV))
        self.x, self.b = (x.view(n.B, n.HV) for x in self.logits.split(count))
        self.softplus = new(n.B, n.HV, dtype=F64)
        self.activated = new(2 * count)
        decay, beta = (x.view(*lead, 1, 1) for x in self.activated.split(count))
        self.kq = new(n.B, 2 * n.HV, n.K)
        # each operand of a product begins where that of a single row does
        aligned = align_rows(self.kq.view(n.B, n.HV, 2, n.K))
        self.aligned = None if aligned.stride() == self.kq.view(aligned.shape).stride() else aligned
        kq = aligned.view(*lead, 2, n.K)
        self.key, self.query = kq.chunk(2, -2)
        self.product, self.qk = new(*lead, 1, n.K), new(*lead, 1, 1)
        self.beta_v, self.o = new(*lead, 1, n.V), new(*lead, 1, n.V)
        self.y, self.squares, self.rstd = self.o.view(n.B, n.HV, n.V), new(n.B, n.HV, n.V), new(n.B, n.HV, 1)
        token = (kq, self.key, self.beta_v, self.o, beta, self.qk, decay)
        self.values = (beta, v)
        self.tokens = [token] if n.B == 1 else list(zip(*(x.unbind(0) for x in token), strict=True))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors, some of which are views that are counted again."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))


def new(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def number(x: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(x, dtype=dtype, device="cpu")


class DenseStep:
    """Hold the options of such a call, its constants, and workspaces that no call uses at the moment.

    Numbers are tensors: an operator takes a tensor in half the time of a number. order [2 HV] are the key and
    the query of each value head among the rows q | k [2 H, K].
    """

    def __init__(self, p: StepProblem) -> None:
        self.options, self.sizes, self.dtype = p.without_tensors(), Sizes.of_problem(p), p.x.dtype
        head = torch.arange(p.HV, device="cpu") // (p.HV // p.H)
        self.order = torch.stack((p.H + head, head), 1).flatten()
        self.scale, self.norm_eps, self.l2_eps = number(p.scale), number(p.norm_eps), number(1e-6)
        self.num_values = number(p.V)
        self.zero, self.one, self.minus_one = number(0, F64), number(1, F64), number(-1, F64)
        self.largest = number(torch.finfo(F64).max, F64)
        self.idle: list[Workspace] = []

    def run(self, x: Given) -> None:
        """Write x.conv_state, x.state and x.out."""
        try:
            # one of its own for each thread: pop and append are atomic
            w = self.idle.pop()
        except IndexError:
            w = Workspace(self.sizes)
        self._convolve(x, w)
        self._load_gates(x, w)
        self._advance(x, w)
        self._normalise(x, w)
        if not self.idle and w.nbytes <= LARGEST:
            self.idle.append(w)

    def _convolve(self, x: Given, w: Workspace) -> None:
        """Write the convolved rows; shift the inputs into the windows."""
        n, windows = self.sizes, x.conv_state
        windows = windows if windows.shape[0] == n.B else windows.narrow(0, 0, n.B)
        torch.cat((windows, x.mixed_qkv.unsqueeze(2)), 2, out=w.line)
        windows.copy_(w.kept)
        if w.wide is not w.line:
            w.wide.copy_(w.line)
        tap, *taps = x.conv_weight.float().unbind(1)
        mixed = torch.mul(w.first, tap, out=w.mixed)
        for inputs, tap in zip(w.inputs, taps, strict=True):
            mixed.addcmul_(inputs, tap)
        if x.conv_bias is not None:
            mixed.add_(x.conv_bias)
        if self.options.conv_activation == "silu":
            torch.nn.functional.silu(mixed, inplace=True)
        self._round(mixed)

    def _load_gates(self, x: Given, w: Workspace) -> None:
        """Write e^g and beta, computed in fp64 by the operators of `log_decay` and `sigmoid`.

        Both logits change their signs first, which is exact: -g = e^A (log(1 + e^-|x|) - min(-x, 0)).
        """
        w.x.copy_(x.a)
        w.b.copy_(x.b)
        w.rate.copy_(x.A_log)
        if x.dt_bias is not None:
            w.x.add_(x.dt_bias)
        w.logits.neg_()
        torch.minimum(w.x, self.zero, out=w.softplus)
        w.x.copysign_(self.minus_one)
        w.gates.exp_()
        w.softplus.sub_(w.x.log1p_())
        torch.mul(w.softplus, w.rate.clamp_max_(self.largest), out=w.x).exp_()
        w.b.add_(self.one).reciprocal_()
        if self.options.allow_neg_eigval:
            w.b.add_(w.b)
        w.activated.copy_(w.logits)

    def _advance(self, x: Given, w: Workspace) -> None:
        """Write w.y = o / scale; advance the states by one token."""
        is_v_first = self.options.state_v_first
        if self.options.use_qk_l2norm_in_kernel:
            l2norm_(w.rows, self.l2_eps)
        # each key head once for each of its value heads
        torch.index_select(w.rows, 1, self.order, out=w.kq)
        if w.aligned is not None:
            w.aligned.copy_(w.kq.view(w.aligned.shape))
        torch.mul(*w.values, out=w.beta_v)
        torch.sum(torch.mul(w.key, w.query, out=w.product), -1, keepdim=True, out=w.qk)
        if len(w.tokens) == 1:
            advance_token(x.state[0], w.tokens[0], is_v_first)
        else:
            for S, token in zip(x.state.narrow(0, 0, self.sizes.B), w.tokens, strict=True):
                advance_token(S, token, is_v_first)

    def _normalise(self, x: Given, w: Workspace) -> None:
        """Write the scaled and normalised rows to x.out."""
        y = w.y.mul_(self.scale)
        if x.z is not None or x.norm_weight is not None:
            self._round(y)
            # a mean is a sum and a division, which take half the time of `mean`
            torch.sum(torch.mul(y, y, out=w.squares), -1, keepdim=True, out=w.rstd)
            y.mul_(w.rstd.div_(self.num_values).add_(self.norm_eps).rsqrt_())
        if x.norm_weight is not None:
            y.mul_(x.norm_weight)
        if x.z is None:
            x.out.copy_(y)
        else:
            torch.mul(y, activate_gate(x.z.float(), self.options.norm_activation), out=x.out)

    def _round(self, x: Tensor) -> None:
        """Give x, fp32, the digits of the inputs' dtype."""
        if self.dtype != F32:
            x.copy_(x.to(self.dtype))
