"""Test the checks of a call: every error by its message, and that no tensor is touched if a call raises."""

import pytest
import torch

import gdn
from gdn.problem import parse

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6


def call(**changes):
    """Call the rule with valid arguments, some of them replaced; a callable is applied to the argument."""
    arguments = {
        "q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, HV, V),
        "g": -torch.rand(B, T, HV), "beta": torch.rand(B, T, HV),
    }  # fmt: skip
    for name, value in changes.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    return arguments


def packed(offsets, **changes):
    tensors = {name: (x[:1] if x is not None else None) for name, x in call(**changes).items()}
    return tensors | {"cu_seqlens": offsets}


GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
CASES = [
    (call(q=[1, 2]), TypeError, "q: expected a tensor, got list"),
    (call(q=lambda x: x.int()), TypeError,
     "q: expected a tensor of float16, bfloat16, float32 or float64, got torch.int32"),
    (call(beta=lambda x: x > 0), TypeError, "beta: expected a tensor of float16"),
    (call(scale="big"), TypeError, "scale: expected a number, got str"),
    (call(scale=True), TypeError, "scale: expected a number, got bool"),
    (call(output_final_state=1), TypeError, "output_final_state: expected a bool, got int"),
    (call(backend=3), TypeError, "backend: expected a name or None, got int"),
    (call(q=lambda x: x[0]), ValueError, r"q: expected shape \[B, T, H, K\], got \[5, 2, 8\]"),
    (call(k=lambda x: x[:, :4]), ValueError, r"k: expected shape \[B=2, T=5, H=2, K=8\], got \[2, 4, 2, 8\]"),
    (call(g=lambda x: x[..., :2]), ValueError, r"g: expected shape \[B=2, T=5, HV=4\], got \[2, 5, 2\]"),
    (call(beta=lambda x: x[:, :1]), ValueError, r"beta: expected shape \[B=2, T=5, HV=4\], got \[2, 1, 4\]"),
    (call(k=lambda x: x.half()), ValueError,
     r"k: expected dtype torch.float32 \(that of q\), got torch.float16"),
    (call(v=lambda x: x.double()), ValueError, "v: expected dtype torch.float32"),
    (call(v=lambda x: x[:, :, :3], g=None, beta=None), ValueError,
     "v: expected HV to be a multiple of H=2, got HV=3"),
    (call(v=lambda x: x[:, :, :1], g=None, beta=None), ValueError,
     "v: expected HV to be a multiple of H=2, got HV=1"),
    (call(v=lambda x: x[..., :0]), ValueError, "expected K >= 1 and V >= 1, got K=8, V=0"),
    (call(k=lambda x: x.to("meta")), ValueError, r"k: expected device cpu \(that of q\), got meta"),
    (call(initial_state=torch.zeros(2, HV, V, K)), ValueError,
     r"initial_state: expected shape \[N=2, HV=4, K=8, V=6\], got \[2, 4, 6, 8\]"),
    (call(initial_state=torch.zeros(2, HV, K, V), state_v_first=True), ValueError,
     "initial_state: expected shape"),
    (call(initial_state=torch.zeros(2, HV, K, V, dtype=torch.int64)), TypeError,
     "initial_state: expected a tensor of"),
    (call(use_gate_in_kernel=True), ValueError,
     r"A_log: expected a tensor \[HV\] with use_gate_in_kernel=True, got None"),
    (call(g=None, **GATE), ValueError,
     r"g: expected the raw logits \[B, T, HV\] with use_gate_in_kernel=True, got None"),
    (call(A_log=torch.zeros(HV)), ValueError,
     "A_log: expected None without use_gate_in_kernel=True, got a tensor"),
    (call(dt_bias=torch.zeros(HV)), ValueError, "dt_bias: expected None without use_gate_in_kernel=True"),
    (call(**GATE, dt_bias=torch.zeros(3)), ValueError, r"dt_bias: expected shape \[HV=4\], got \[3\]"),
    (call(beta=None, use_beta_sigmoid_in_kernel=True), ValueError, "beta: expected the logits"),
    (call(allow_neg_eigval=True), ValueError, "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True"),
    (call(cu_seqlens=torch.tensor([0, 5])), ValueError, "q: expected B=1 with cu_seqlens, got B=2"),
    (call(cu_seqlens_cpu=torch.tensor([0, 5])), ValueError,
     "cu_seqlens_cpu: expected None without cu_seqlens"),
    (packed(torch.tensor([0.0, 5.0])), TypeError,
     "cu_seqlens: expected an int32 or int64 tensor, got torch.float32"),
    (packed(torch.zeros(0, dtype=torch.int64)), ValueError,
     r"cu_seqlens: expected shape \[N\+1\], got \[0\]"),
    (packed(torch.tensor([[0, 5]])), ValueError, r"cu_seqlens: expected shape \[N\+1\], got \[1, 2\]"),
    (packed(torch.tensor([1, 5])), ValueError, "cu_seqlens: expected the first offset 0, got 1"),
    (packed(torch.tensor([0, 4, 3])), ValueError,
     "cu_seqlens: expected non-decreasing offsets, got 4 then 3 at position 1"),
    (packed(torch.tensor([0, -2, 3])), ValueError,
     "cu_seqlens: expected non-decreasing offsets, got 0 then -2"),
    (packed(torch.tensor([0, 6])), ValueError,
     "cu_seqlens: expected the last offset to be at most T=5, got 6"),
    (packed(torch.tensor([0, 5])) | {"cu_seqlens_cpu": torch.tensor([0, 3, 5])}, ValueError,
     r"cu_seqlens_cpu: expected shape \[N\+1=2\], got \[3\]"),
    (packed(torch.tensor([0, 3, 5])) | {"cu_seqlens_cpu": torch.tensor([0, 4, 5])}, ValueError,
     r"cu_seqlens: expected the numbers of cu_seqlens_cpu \[0, 4, 5\], got \[0, 3, 5\]"),
    (call(backend="cuda"), ValueError, "backend: expected None or one of hopper, triton, eager, got 'cuda'"),
    (call(backend="triton"), NotImplementedError, "no backend supports this call: triton: "),
    (call(backend="hopper"), NotImplementedError, "no backend supports this call: hopper: "),
    (call(cp_context=object()), TypeError,
     "cp_context: expected a gdn.ContextParallel or None, got object"),
]  # fmt: skip


@pytest.mark.parametrize("function", [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize(("arguments", "error", "message"), CASES, ids=[c[2][:40] for c in CASES])
def test_refusals_name_the_tensor_and_touch_nothing(function, arguments, error, message):
    before = {
        n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"
    }
    first = {name: arguments[name] for name in ("q", "k", "v")}
    others = {name: x for name, x in arguments.items() if name not in first}
    with pytest.raises(error, match=message):
        function(*first.values(), **others)
    for name, x in before.items():
        assert torch.equal(arguments[name], x)


@pytest.mark.parametrize("function", [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule])
def test_unknown_arguments_and_a_sixth_tensor_are_type_errors(function):
    arguments = call()
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernal"):
        function(**arguments, use_qk_l2norm_in_kernal=True)
    with pytest.raises(TypeError, match="positional"):
        function(*arguments.values(), 1.0)


def test_a_parsed_problem_knows_its_sizes_and_is_frozen():
    problem = parse(**packed(torch.tensor([0, 0, 3, 5])))
    assert (problem.B, problem.T, problem.H, problem.HV, problem.K, problem.V, problem.N) == (
        1,
        5,
        2,
        4,
        8,
        6,
        3,
    )
    assert problem.scale == pytest.approx(K**-0.5)
    assert problem.num_chunks >= 2
    with pytest.raises(AttributeError):
        problem.scale = 1.0


def test_num_chunks_bounds_every_packing():
    for lengths in ([0], [1], [64, 65, 0], [63] * 7, [1] * 100, [200, 0, 1, 64]):
        total = sum(lengths)
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        problem = parse(*(torch.zeros(1, total, 1, 1) for _ in range(3)), cu_seqlens=offsets)
        assert problem.num_chunks >= sum(-(-n // 64) for n in lengths)


def test_debug_mode_checks_finiteness(monkeypatch):
    monkeypatch.setenv("GDN_DEBUG", "1")
    gdn.chunk_gated_delta_rule(**call())
    bad = call()
    bad["v"][0, 0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="got NaN or Inf in o; inputs that hold them: v"):
        gdn.chunk_gated_delta_rule(**bad)


def test_backend_from_the_environment_never_falls_back(monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", "triton")
    with pytest.raises(NotImplementedError, match="triton"):
        gdn.chunk_gated_delta_rule(**call())
    gdn.chunk_gated_delta_rule(**call(), backend="eager")


def test_explain_names_the_taker_and_the_reasons():
    report = gdn.explain(**call())
    assert report.chosen == "eager" and set(report.refusals) == {"hopper", "triton"}
    assert "-> eager" in str(report) and all(report.refusals.values())
    assert gdn.explain(**call(), backend="triton").chosen is None
