"""Export a layer's rule as programs that run elsewhere: decode and prefill on one state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from gdn.ops import portable as forms
from gdn.ops.rule import chunk_gated_delta_rule
from gdn.ops.serving import decode_functional

METHODS = ("decode", "prefill")
STATE = "session.state"  # the buffer's name in every program


class Session(nn.Module):
    """Hold the state of B rows and compute everything that follows a layer's projection and convolution.

    Args:
        rows, num_k_heads, num_v_heads, head_k_dim, head_v_dim    B, H, HV, K, V
        A_log, dt_bias   [HV], the gates' parameters; kept as buffers
        state_dtype      of the state [B, HV, V, K], a buffer that both methods write
        dtype, device    of mixed_qkv, and where

    Example:
        >>> import torch
        >>> from gdn.integrations.export import Session
        >>> session = Session(2, 1, 2, 8, 8, torch.zeros(2), torch.zeros(2))
        >>> o = session.prefill(torch.randn(2, 5, 32), *torch.randn(2, 2, 5, 2), torch.tensor([True, True]))
        >>> o.shape, session.decode(torch.randn(2, 32), *torch.randn(2, 2, 2)).shape
        (torch.Size([2, 5, 2, 8]), torch.Size([2, 2, 8]))
    """

    state: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        rows: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        A_log: Tensor,
        dt_bias: Tensor,
        *,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.rows, self.dtype = rows, dtype
        self.heads = (num_k_heads, head_k_dim), (num_k_heads, head_k_dim), (num_v_heads, head_v_dim)
        shape = (rows, num_v_heads, head_v_dim, head_k_dim)
        self.register_buffer("state", torch.zeros(shape, dtype=state_dtype, device=device))
        self.register_buffer("A_log", A_log.detach().to(device))
        self.register_buffer("dt_bias", dt_bias.detach().to(device))

    @property
    def channels(self) -> int:
        return sum(count * size for count, size in self.heads)

    def decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Decode one token per row: mixed_qkv [B, 2 H K + HV V], raw logits a, b [B, HV] -> o [B, HV, V]."""
        q, k, v = self._split(mixed_qkv.unsqueeze(1))
        o, after = decode_functional(
            q, k, v, self.state, a=a.unsqueeze(1), b=b.unsqueeze(1), A_log=self.A_log, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, state_v_first=True,
        )  # fmt: skip
        self.state.copy_(after)
        return o.squeeze(1)

    def prefill(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, is_new: Tensor) -> Tensor:
        """Prefill T tokens a row: mixed_qkv [B, T, ...]; a, b [B, T, HV]; is_new [B] bool -> o [B, T, HV, V].

        A row with is_new starts from a zero state; its old state is ignored.
        """
        q, k, v = self._split(mixed_qkv)
        o, after = chunk_gated_delta_rule(
            q, k, v, a, b, initial_state=self.state.masked_fill(is_new[:, None, None, None], 0),
            output_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True, A_log=self.A_log,
            dt_bias=self.dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        assert after is not None
        self.state.copy_(after)
        return o

    def _split(self, mixed_qkv: Tensor) -> tuple[Tensor, ...]:
        parts = mixed_qkv.split([count * size for count, size in self.heads], -1)
        return tuple(x.unflatten(-1, size) for x, size in zip(parts, self.heads, strict=True))

    def example(self, method: str, T: int = 70) -> tuple[Tensor, ...]:
        """Return zeros as inputs of a method."""
        lead = (self.rows,) if method == "decode" else (self.rows, T)
        new = lambda *shape, dtype=self.dtype: torch.zeros(shape, dtype=dtype, device=self.state.device)  # noqa: E731
        given = new(*lead, self.channels), *(new(*lead, self.A_log.shape[0]) for _ in range(2))
        return given if method == "decode" else (*given, new(self.rows, dtype=torch.bool))


class _Method(nn.Module):
    def __init__(self, session: Session, name: str) -> None:
        super().__init__()
        self.session, self.name = session, name

    def forward(self, *inputs: Tensor) -> Tensor:
        o: Tensor = getattr(self.session, self.name)(*inputs)
        return o


def export(session: Session, *, max_tokens: int = 4096, portable: bool = False) -> dict[str, ExportedProgram]:
    """Export both methods by `torch.export`, the state a mutable buffer; prefill has 2 to max_tokens tokens.

    portable: express decode in torch's own operators, so that it runs and compiles ahead of time without gdn.
    Otherwise programs keep gdn's operators. Compiled for a GPU, decode contains its kernel either way.
    """
    tokens = Dim("tokens", min=2, max=max_tokens)
    shapes: dict[str, Any] = {"decode": None, "prefill": (({1: tokens},) * 3 + (None,),)}
    programs = {}
    with torch.no_grad():
        for name in METHODS:
            given = session.example(name)
            program = torch.export.export(_Method(session, name), given, dynamic_shapes=shapes[name])
            programs[name] = (
                program.run_decompositions(forms.table()) if portable and name == "decode" else program
            )
    return programs


def needs_library(program: ExportedProgram) -> list[str]:
    """Return gdn's operators in a program: if there are any, the process that runs it must import gdn."""
    targets = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return sorted({name for name in targets if name.startswith("gdn.")})


def package(programs: Mapping[str, ExportedProgram], path: Path | str) -> str:
    """Compile the methods by AOTInductor into one package and return its path; it needs a C++ compiler."""
    from torch._inductor.package import package_aoti

    options = {"aot_inductor.package": True}
    files: dict[str, Any] = {}
    with torch.no_grad():
        for name, program in programs.items():
            args, kwargs = program.example_inputs
            files[name] = torch._inductor.aot_compile(program.module(), args, kwargs, options=options)
    return str(package_aoti(str(path), files))


class Loaded:
    """Run the methods of programs or a package on one state [B, HV, V, K]; the caller may read and set it."""

    def __init__(self, methods: Mapping[str, Any], state: Tensor) -> None:
        self.state, self._methods = state, dict(methods)

    def decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See `Session.decode`."""
        return self._run("decode", mixed_qkv, a, b)

    def prefill(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, is_new: Tensor) -> Tensor:
        """See `Session.prefill`."""
        return self._run("prefill", mixed_qkv, a, b, is_new)

    def _run(self, name: str, *inputs: Tensor) -> Tensor:
        # a compiled package assumes inputs as contiguous as the examples, and does not check
        o: Tensor = self._methods[name](*(x.contiguous() for x in inputs))
        return o


def load(source: Mapping[str, ExportedProgram] | Path | str, state: Tensor) -> Loaded:
    """Load programs, or the package at a path, with `state` as the buffer of all methods: updated in place.

    state: contiguous, of the session's shape, dtype and device. A_log and dt_bias are those of the export.
    """
    methods: dict[str, Any] = {}
    if isinstance(source, Mapping):
        for name, program in source.items():
            methods[name] = module = program.module()
            module.get_submodule("session").state = state
        return Loaded(methods, state)
    from torch._inductor.package import load_package

    for name in METHODS:
        methods[name] = runner = load_package(str(source), name)
        runner.load_constants({STATE: state}, check_full_update=False, user_managed=True)
    return Loaded(methods, state)
