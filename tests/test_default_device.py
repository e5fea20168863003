"""Check that every tensor gdn creates is on the device of its inputs, inside `with torch.device("meta")`."""

import ast
from pathlib import Path

import pytest
import torch
from kit import api
from kit.adapters import CALLS as ADAPTERS
from kit.serving import inputs, pool_of, same_bits, step_of

import gdn

PACKAGE = Path(gdn.__file__).parent
ENDS = (0, 30, 30, 70)
H, HV, K, V = 2, 4, 16, 24
L2 = {"use_qk_l2norm_in_kernel": True}
# functions that take no tensors, and `warmup`, which has its own test
WITHOUT_TENSORS = {
    "ContextParallel",
    "context_parallel",
    "GatedDeltaNetCache",
    "HistoryPool",
    "Int16Pool",
    "allocate_history_pool",
    "allocate_int16_pool",
    "load_kernels",
    "patch_fla",
    "patch_transformers",
    "warmup",
    "stages",
}


def with_gradients(function, *x, **options):
    """Return the outputs of a function, and the gradients of their sums for all floating tensors."""
    given = dict(enumerate(x)) | options
    leaves = {
        name: t.clone().requires_grad_()
        for name, t in given.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    given |= leaves
    positional = [given.pop(i) for i in range(len(x))]
    out = function(*positional, **given)
    outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    return *outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), list(leaves.values()))


def rule(function, is_packed, is_raw, **more):
    """Return a call of the rule with its backward, dense or packed, with raw logits or gates."""
    x = inputs(1, 70, H, HV, K, V, raw=is_raw)
    if is_raw:
        raw = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        x = x | {"g": x.pop("a"), "beta": x.pop("b")} | raw
    offsets = torch.tensor(ENDS)
    where = {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets.int()} if is_packed else {}
    state = pool_of(3 if is_packed else 1, HV=HV, K=K, V=V, v_first=False)
    return lambda: with_gradients(
        function, initial_state=state, output_final_state=True, **x, **where, **L2, **more
    )


def explain():
    x = inputs(1, 70, H, HV, K, V)
    q, k, v, offsets = x["q"], x["k"], x["v"], torch.tensor(ENDS)

    def call():
        assert gdn.explain(q, k, v, cu_seqlens=offsets).chosen == "eager"
        return ()

    return call


def pool_call(function, **more):
    """Return a call of a function that writes a pool, on a copy of the pool; raw logits, two tokens a row."""
    x, pool = inputs(3, 2, H, HV, K, V, raw=True), pool_of(5, HV=HV, K=K, V=V)
    slots = torch.tensor([4, -1, 0])
    if function is api.decode_functional:
        rows = pool[:3].clone()
        return lambda: function(**x, state=rows, state_v_first=True, **L2)

    def call():
        states = pool.clone()
        return function(**x, state=states, read_index=slots, state_v_first=True, **L2, **more), states

    return call


def step(function):
    """Return a call of decode_step or decode_packed."""
    x, options = step_of(3, H, HV, K, V, 4)
    if function is api.decode_packed:
        x = {name: x[name] for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "state", "read_index")}

    def call():
        mine = {name: t if t is None else t.clone() for name, t in x.items()}
        return function(**mine, **options, **L2), mine["state"]

    return call


def prefill(is_invariant):
    """Return a prefill with checkpoints and a snapshot."""
    x, pool = inputs(1, 200, H, HV, K, V, raw=True), pool_of(5, HV=HV, K=K, V=V)
    kept, offsets = torch.zeros(3, HV, V, K), torch.tensor([0, 130, 130, 200])
    where = {
        "state_index": torch.tensor([4, 1, 0]), "has_initial_state": torch.tensor([True, False, False]),
        "checkpoint_offsets": torch.tensor([0, 2, 2]), "snapshot_pos": torch.tensor([70, -1, -1]),
        "snapshot_index": torch.tensor([3, 0, 0]),
    }  # fmt: skip

    def call():
        states, rows = pool.clone(), kept.clone()
        o = api.prefill(
            **x, state=states, cu_seqlens=offsets, checkpoints=rows, checkpoint_every=64, state_v_first=True,
            batch_invariant=is_invariant, **where, **L2,
        )  # fmt: skip
        return o, states, rows

    return call


def commit():
    index, source = torch.tensor([2, -1]), torch.randn(1, 2, 3, 5)
    pool = torch.zeros(1, 4, 5)

    def call():
        target = pool.clone()
        gdn.commit(target, source, index, torch.tensor([0, 1], device="cpu"), index)
        return (target,)

    return call


def replay():
    """Return a packet of drafts on histories, and the commit that folds them."""
    x, state = inputs(3, 2, H, HV, K, V), pool_of(3, HV=HV, K=K, V=V)
    u, k, G = torch.randn(3, 4, HV, V), torch.randn(3, 4, H, K), -torch.rand(3, 4, HV).double().cumsum(1)
    cursor, index, accepted = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2])

    def call():
        states, histories, places = state.clone(), [t.clone() for t in (u, k, G)], cursor.clone()
        o = api.replay_decode(**x, state=states, **named(histories), cursor=places, state_v_first=True, **L2)
        stacked = [t[None] for t in (states, *histories)]
        api.replay_commit(*stacked, places, index, accepted, room=2, state_v_first=True)
        return o, states, *histories, places

    def named(histories):
        return dict(zip(("history_u", "history_k", "history_G"), histories, strict=True))

    return call


def history():
    """Return a decode that appends to histories, and the fold of some of them."""
    x, index = inputs(3, 1, H, HV, K, V), torch.tensor([4, -1, 0])
    sizes = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    pool = gdn.allocate_history_pool(5, **sizes, places=4, state_v_first=True)
    pool.state.copy_(pool_of(5, HV=HV, K=K, V=V))

    def call():
        mine = gdn.HistoryPool(*(t.clone() for t in pool.tensors()), pool.room)
        o = api.decode_with_history(**x, pool=mine, read_index=index, use_history=True)
        gdn.fold_history(mine, index[:1], state_v_first=True)
        return o, *mine.tensors()

    return call


def chunk_decoder():
    """Return the first tokens of two packed rows, and one more of each."""
    x, state = inputs(1, 71, H, HV, K, V), pool_of(2, HV=HV, K=K, V=V, v_first=False)
    q, k, v, g, beta = x.values()
    offsets = torch.tensor([0, 66, 69])
    one = [t[:, 69:].transpose(0, 1) for t in (q, k, v, g, beta)]

    def call():
        decoder = gdn.ChunkDecoder(state, **L2)
        before = decoder.prefill(*(t[:, :69] for t in (q, k, v, g, beta)), cu_seqlens=offsets)
        return before, decoder.decode(*one), decoder.state

    return call


def convolution(is_packed):
    x, weight, bias = torch.randn(1, 70, 6), torch.randn(6, 4), torch.randn(6)
    windows = torch.randn(3 if is_packed else 1, 6, 3)
    where = {"cu_seqlens": torch.tensor(ENDS)} if is_packed else {}
    return lambda: with_gradients(
        gdn.causal_conv1d, x, weight, bias, activation="silu", initial_state=windows, output_final_state=True,
        **where,
    )  # fmt: skip


def convolution_step():
    x, weight, windows, slots = (
        torch.randn(3, 2, 6),
        torch.randn(6, 4),
        torch.randn(5, 6, 5),
        torch.tensor([4, -1, 0]),
    )

    def call():
        pool = windows.clone()
        return gdn.causal_conv1d_update(x, pool, weight, activation="silu", state_index=slots), pool

    return call


def norm():
    x, z, weight = torch.randn(5, 3, 8), torch.randn(5, 3, 8), torch.randn(8)
    return lambda: with_gradients(gdn.rms_norm_gated, x, z, weight)


def gate():
    x = torch.randn(1, 5, 2), torch.randn(1, 5, 2), torch.randn(2), torch.randn(2)
    return lambda: with_gradients(gdn.gate, *x)


def layer(has_cache, kind=gdn.GatedDeltaNet):
    """Return a layer's forward and backward on packed rows, or its steps with a cache."""
    net = kind(32, num_k_heads=H, num_v_heads=HV, head_k_dim=8, head_v_dim=8)
    x, offsets = torch.randn(1, 70, 32), torch.tensor(ENDS)

    def trained():
        y = net(x, cu_seqlens=offsets)
        return y, *torch.autograd.grad(y.sum(), list(net.parameters()))

    def served():
        cache = gdn.GatedDeltaNetCache()
        with torch.no_grad():
            return tuple(net(part, cache=cache) for part in x.split([68, 1, 1], dim=1))

    return served if has_cache else trained


def stages(is_packed):
    """Return all stages of a forward and all adjoints, one after the other."""
    x = inputs(1, 70, H, HV, K, V, raw=True)
    q, k, v, a, b, A_log, dt_bias = x.values()
    beta, S0 = b.sigmoid(), pool_of(3 if is_packed else 1, HV=HV, K=K, V=V, v_first=False)
    where = {"cu_seqlens": torch.tensor(ENDS)} if is_packed else {}

    def call():
        s = gdn.stages
        g = s.chunk_cumsum(a, **where)
        G = s.chunk_gate_cumsum(a, A_log, dt_bias, **where)
        A = s.chunk_kkt(k, beta, G, **where)
        A_inv = s.solve_tril(A, **where)
        w, u = s.wy_transform(k, v, beta, G, A_inv, **where)
        S_in, v_new, S = s.chunk_state(k, w, u, G, S0, **where)
        o = s.chunk_output(q, k, v_new, G, S_in, **where)
        gradients = [
            s.chunk_output_bwd(q, k, v_new, G, S_in, o, **where),
            s.chunk_state_bwd(k, w, u, G, S0, S_in, v_new, S_in, v_new, S, **where),
            s.wy_transform_bwd(k, v, beta, G, A_inv, w, u, **where),
            (s.solve_tril_bwd(A_inv, A, **where),),
            s.chunk_kkt_bwd(k, beta, G, A, **where),
            s.chunk_gate_cumsum_bwd(a, A_log, dt_bias, G, **where),
            (s.chunk_cumsum_bwd(a, G, **where),),
        ]
        return o, S, g, *(t for group in gradients for t in group)

    return call


# name -> function that creates the tensors outside the context, and returns the call
CALLS = {
    "chunk_gated_delta_rule": lambda: rule(gdn.chunk_gated_delta_rule, False, False),
    "chunk_gated_delta_rule packed": lambda: rule(gdn.chunk_gated_delta_rule, True, False),
    "chunk_gated_delta_rule packed, raw": lambda: rule(gdn.chunk_gated_delta_rule, True, True),
    "chunk_gated_delta_rule packed, alone": lambda: rule(
        gdn.chunk_gated_delta_rule, True, False, batch_invariant=True
    ),
    "fused_recurrent_gated_delta_rule": lambda: rule(gdn.fused_recurrent_gated_delta_rule, False, True),
    "fused_recurrent_gated_delta_rule packed": lambda: rule(
        gdn.fused_recurrent_gated_delta_rule, True, False
    ),
    "explain": explain,
    "decode": lambda: pool_call(api.decode),
    "decode_functional": lambda: pool_call(api.decode_functional),
    "decode_packed": lambda: step(api.decode_packed),
    "decode_step": lambda: step(api.decode_step),
    "prefill": lambda: prefill(False),
    "prefill alone": lambda: prefill(True),
    "commit": commit,
    "replay_decode and replay_commit": replay,
    "decode_with_history and fold_history": history,
    "ChunkDecoder": chunk_decoder,
    "causal_conv1d": lambda: convolution(False),
    "causal_conv1d packed": lambda: convolution(True),
    "causal_conv1d_update": convolution_step,
    "rms_norm_gated": norm,
    "gate": gate,
    "GatedDeltaNet": lambda: layer(False),
    "GatedDeltaNet with a cache": lambda: layer(True),
    "KimiDeltaAttention": lambda: layer(False, gdn.KimiDeltaAttention),
    "stages": lambda: stages(False),
    "stages packed": lambda: stages(True),
}


def test_every_public_function_has_a_call():
    """Every public function has a call here, also one that is added later."""
    named = {word for name in CALLS for word in name.replace(",", "").split()}
    aliases = {"chunk_gdn", "chunk_kda", "fused_recurrent_gdn", "fused_recurrent_kda"}
    assert set(gdn.__all__) - aliases - WITHOUT_TENSORS - named == set()


@pytest.mark.parametrize("name", CALLS)
def test_cpu_tensors_under_another_default_device(name):
    """Outputs, gradients and pools have the bits that they have outside the context."""
    call = CALLS[name]()
    expected = call()
    with torch.device("meta"):
        found = call()
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.device.type == "cpu" and same_bits(x, y)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_under_another_default_device(name):
    """The engines' functions run on CPU tensors inside the context."""
    make, arguments = ADAPTERS[name]
    call = make(*arguments)
    with torch.device("meta"):
        call()


def test_warmup_under_another_default_device():
    """`warmup` creates the tensors of all engines' calls on the device that it was given."""
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    engines = ("gdn", "vllm", "sglang", "lmdeploy", "history")
    with torch.device("meta"):
        lines = api.warmup("cpu", **sizes, max_tokens=2, max_rows=2, engines=engines, training=True)
    assert lines


FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def without_device(source):
    """Return the lines on which a factory of torch is called without a device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


@pytest.mark.parametrize("room", ["backends/eager", "problem", "ops", "layers", "integrations"])
def test_every_factory_names_its_device(room):
    """Every tensor factory in the package names its device, since the default device may be another."""
    assert without_device("torch.zeros(3)\ntorch.zeros(3, device=x.device)\ntorch.tensor(\n  y)") == [1, 3]
    found = {path.name: without_device(path.read_text()) for path in (PACKAGE / room).rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}
