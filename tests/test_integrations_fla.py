"""Test FLA's signatures, and patch_fla() with FLA if it is installed, else with a stand-in."""

import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from kit.serving import error
from kit.signatures import FLA, parameters, real
from torch import nn

from gdn.integrations import fallback, fla_patch
from gdn.integrations import fla as ours
from gdn.integrations.fla_patch import patch_fla, register_backend
from gdn.ops.rule import has_kernel
from gdn.reference import layer as reference_layers
from gdn.reference.recurrence import gated_delta_rule as reference

pytestmark = pytest.mark.usefixtures("default_backend_and_device")

N, T, H, HV, K, V, W = 3, 70, 2, 4, 8, 12, 4
RAW = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
    "state_v_first": True,
}
needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="no fla: make fla has it")


@pytest.fixture(autouse=True)
def originals_restored():
    yield
    package = fla_patch.PACKAGE
    assert not package._active and not package._replaced


@pytest.mark.parametrize("module, name", FLA)
def test_signatures(module, name):
    """Our signatures are the recorded ones, and the recorded ones are those of the installed package."""
    expected = FLA[module, name]
    if hasattr(ours, name):
        assert parameters(getattr(ours, name)) == expected
    else:
        assert parameters({m[1]: m[2] for m in fla_patch.PACKAGE.served}[name]) == expected
    package = real(module, name)
    assert package is None or parameters(package) == expected


def problem(B=N, T=T):
    x = (torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, HV, V))
    return *x, torch.randn(B, T, HV), torch.randn(B, T, HV)


def gates():
    return {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}


def test_chunk_by_position_agrees():
    x, more, S = problem(), gates(), torch.randn(N, HV, V, K)
    expected = reference(*x, initial_state=S, scale=0.3, **RAW, **more)
    rest = {name: RAW[name] for name in ("use_gate_in_kernel",)} | more | {"chunk_size": 32}
    got = ours.chunk_gated_delta_rule(*x, 0.3, S, True, True, True, True, True, **rest)
    assert all(error(a, b) < 1e-5 for a, b in zip(got, expected, strict=True))
    assert ours.chunk_gdn(*x)[1] is None and ours.chunk_gdn is ours.chunk_gated_delta_rule


def test_recurrent_by_position_agrees():
    """The recurrent form takes gk and gv after g, so beta is the seventh argument."""
    q, k, v, g, beta = x = problem()
    more, S = gates(), torch.randn(N, HV, V, K)
    expected = reference(*x, initial_state=S, scale=0.3, **RAW, **more)
    got = ours.fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, 0.3, S, True, True, True, *more.values(), True, True, True
    )
    assert all(error(a, b) < 1e-5 for a, b in zip(got, expected, strict=True))
    wrong = ours.fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, 0.3, S, True, True, True, *more.values(), True, False, True
    )
    assert error(wrong[0], expected[0]) > 1e-2


def test_packed_and_plain_gates():
    q, k, v, g, beta = problem(B=1)
    g, beta, ends = -g.abs(), beta.sigmoid(), torch.tensor([0, 1, 1, 33, T])
    k = nn.functional.normalize(k, dim=-1)
    expected = reference(q, k, v, g, beta, cu_seqlens=ends)
    for o, S in (
        ours.chunk_gated_delta_rule(q, k, v, g, beta, None, None, True, cu_seqlens=ends, chunk_indices=ends),
        ours.fused_recurrent_gdn(q, k, v, g, beta=beta, output_final_state=True, cu_seqlens=ends),
        # FLA ignores A_log without use_gate_in_kernel
        ours.fused_recurrent_gdn(
            q, k, v, g, beta=beta, output_final_state=True, cu_seqlens=ends, A_log=torch.ones(HV)
        ),
    ):
        assert error(o, expected[0]) < 1e-5 and error(S, expected[1]) < 1e-5


def test_the_old_name_of_state_v_first():
    x = problem()
    S = torch.randn(N, HV, V, K)
    for rule, (q, k, v, g, beta) in ((ours.chunk_gdn, x), (ours.fused_recurrent_gdn, x)):
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": S}
        with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`") as caught:
            o, _ = rule(**given, transpose_state_layout=True)
        assert [w.filename for w in caught] == [__file__]
        assert torch.equal(o, rule(**given, state_v_first=True)[0])


@pytest.mark.parametrize(
    "kind, message, options",
    [
        (TypeError, "use_qk_l2norm_in_kernal: expected no such argument", {"use_qk_l2norm_in_kernal": True}),
        (ValueError, "head_first: expected False", {"head_first": True}),
        (ValueError, "chunk_size: expected 16, 32 or 64", {"chunk_size": 128}),
        (ValueError, "one of it and state_v_first", {"state_v_first": True, "transpose_state_layout": True}),
        (NotImplementedError, "cp_context: expected a gdn.ContextParallel", {"cp_context": object()}),
    ],
)
def test_refusals(kind, message, options):
    with pytest.raises(kind, match=message):
        ours.chunk_gated_delta_rule(*problem(), **options)


def test_decays_per_channel_are_refused():
    q, k, v, g, beta = problem()
    with pytest.raises(NotImplementedError, match="gk, gv"):
        ours.fused_recurrent_gated_delta_rule(q, k, v, g, q)
    with pytest.raises(NotImplementedError, match="beta: expected shape"):
        ours.fused_recurrent_gated_delta_rule(q, k, v, g, beta=v)


# a stand-in: modules with FLA's names, whose functions raise where FLA would need a GPU


class Dispatch:
    """Imitate FLA's choice among backends, as far as a backend sees it."""

    class BaseBackend:
        priority, env_var = 5, None

        def is_enabled(self):
            return self.env_var is None or os.environ.get(self.env_var, "1") != "0"

    def __init__(self):
        self.backends = {"gated_delta_rule": {}, self.chunk_kda: {}}

    def register(self, operation):
        def add(cls):
            self.backends[operation][cls.backend_type] = cls()
            return cls

        return add

    def chunk_gated_delta_rule(self, *args, **kwargs):
        return self.choose("gated_delta_rule", "chunk_gated_delta_rule", args, kwargs)

    def chunk_kda(self, *args, **kwargs):
        return self.choose(self.chunk_kda, "chunk_kda", args, kwargs)

    def choose(self, operation, name, args, kwargs):
        for backend in sorted(self.backends[operation].values(), key=lambda b: b.priority):
            if backend.is_enabled():
                verifier = getattr(backend, f"{name}_verifier", None)
                try:
                    accepted, _ = (True, None) if verifier is None else verifier(*args, **kwargs)
                except Exception:
                    accepted = False
                if accepted:
                    return getattr(backend, name)(*args, **kwargs)
        return "fla's own"


def stand_in():
    dispatch = Dispatch()
    names = {module for module, _ in FLA} | {
        "fla", "fla.backends", "fla.ops.gated_delta_rule.backends", "fla.layers", "fla.ops.gated_delta_rule",
    }  # fmt: skip
    modules = {name: types.ModuleType(name) for name in names}
    for module, name in FLA:
        vars(modules[module])[name] = lambda *args, **kwargs: "fla's own"
    modules["fla.ops.gated_delta_rule.chunk"].chunk_gated_delta_rule = dispatch.chunk_gated_delta_rule
    modules["fla.ops.kda.chunk"].chunk_kda = dispatch.chunk_kda
    modules["fla"].__version__ = "0.6.0"
    backends = modules["fla.backends"]
    backends.BaseBackend, backends.register = dispatch.BaseBackend, dispatch.register
    backends._DISPATCH_DISABLED = False
    recurrent = modules["fla.ops.gated_delta_rule.fused_recurrent"].fused_recurrent_gated_delta_rule
    modules["fla.layers"].renamed = recurrent
    return modules


@pytest.fixture(params=["stand-in", pytest.param("fla", marks=needs_fla)])
def fla(request, monkeypatch):
    """Return a function of (module, name) that finds FLA's function as its own modules do."""
    if request.param == "stand-in":
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    return lambda module, name: vars(importlib.import_module(module))[name]


def function(fla, name):
    return fla({n: module for module, n in FLA}[name], name)


def test_the_rule_is_served(fla):
    q, k, v, g, beta = x = problem(B=2, T=5)
    options = RAW | gates() | {"initial_state": torch.randn(2, HV, V, K)}
    expected = reference(*x, **options)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "output_final_state": True}
    with patch_fla() as patch:
        assert patch.is_active
        for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            got = function(fla, name)(**named, **options)
            assert all(error(a, b) < 1e-5 for a, b in zip(got, expected, strict=True)), name
    assert not patch.is_active


def channel_problem(B=2, T=5):
    """Return the tensors of a call, and its options for FLA and for the reference."""
    q, k, v, _, b = problem(B=B, T=T)
    bias = torch.randn(HV, K)
    raw = {**RAW, "A_log": torch.randn(HV), "initial_state": torch.randn(B, HV, V, K)}
    ours_too = raw | {"dt_bias": bias.flatten(), "lower_bound": -5.0, "output_final_state": True}
    return (q, k, v, torch.randn(B, T, HV, K), b), ours_too, raw | {"dt_bias": bias, "lower_bound": -5.0}


def test_the_rule_of_key_channels_is_served(fla):
    """chunk_kda through FLA's dispatch, fused_recurrent_kda wherever it is held; hints change nothing."""
    (q, k, v, g, beta), options, same = channel_problem()
    expected = reference(q, k, v, g, beta, **same)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **options}
    hints = {"safe_gate": True, "disable_recompute": True, "use_graph": True, "max_num_seqs": 2}
    with patch_fla():
        for name, more in (("chunk_kda", hints | {"chunk_size": 32}), ("fused_recurrent_kda", {})):
            got = function(fla, name)(**named, **more)
            assert all(error(a, b) < 1e-5 for a, b in zip(got, expected, strict=True)), name
        # without raw logits the bound is a hint, too, and A_log is not read
        plain = {"q": q, "k": k / 9, "v": v, "g": -g.abs(), "beta": beta.sigmoid(), "A_log": g[0, 0, :, 0]}
        wanted, _ = reference(*(plain[name] for name in ("q", "k", "v", "g", "beta")))
        for name in ("chunk_kda", "fused_recurrent_kda"):
            assert error(function(fla, name)(**plain, lower_bound=-5.0)[0], wanted) < 1e-5


def test_calls_of_key_channels_that_stay_with_fla(monkeypatch):
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    x, options, _ = channel_problem()
    chunk = sys.modules["fla.ops.kda.chunk"].chunk_kda
    recurrent = sys.modules["fla.ops.kda.fused_recurrent"]
    rest = {"return_intermediate_states": True}, {"cp_context": object()}, {"chunk_size": 16}, {"unknown": 1}
    with patch_fla():
        assert torch.is_tensor(chunk(*x, **options)[0])
        for more in rest:
            assert chunk(*x, **options, **more) == "fla's own", more
        assert recurrent.fused_recurrent_kda(*x, **options, unknown=1) == "fla's own"
        wrong = options | {"dt_bias": torch.zeros(7)}
        assert recurrent.fused_recurrent_kda(*x, **wrong) == "fla's own"
        monkeypatch.setattr(fla_patch, "has_kernel", lambda q, v, g, is_recurrent: is_recurrent)
        assert chunk(*x, **options) == "fla's own"
        assert torch.is_tensor(recurrent.fused_recurrent_kda(*x, **options)[0])
    assert chunk(*x, **options) == "fla's own"


@pytest.mark.parametrize("packed", [False, True])
def test_the_convolution_is_served(fla, packed):
    """Windows of W columns are read and written, with gradients through both."""
    D, ends = 6, torch.tensor([0, 3, 3, 8]) if packed else None
    x, weight, bias = torch.randn(1 if packed else N, 8, D), torch.randn(D, W), torch.randn(D)
    window = torch.randn(N, D, W)
    y, after = reference_layers.causal_conv1d(
        x, weight, bias, activation="silu", initial_state=window[..., 1:], cu_seqlens=ends
    )
    weight.requires_grad_(), window.requires_grad_()
    with patch_fla():
        conv, update = (function(fla, name) for name in ("causal_conv1d", "causal_conv1d_update"))
        got = conv(x, weight, bias, None, window, True, "swish", cu_seqlens=ends)
        assert error(got[0].detach(), y) < 1e-5 and got[1].shape == (N, D, W)
        assert error(got[1][..., 1:].detach(), after) < 1e-5
        dweight, dwindow = torch.autograd.grad(got[0].square().sum() + got[1].sum(), (weight, window))
        assert dweight.abs().sum(0).min() > 0 and dwindow[..., 1:].abs().sum() > 0
        assert conv(x, weight.detach(), activation="silu")[1] is None
        with torch.no_grad():
            token, cache = torch.randn(1, N, D) if packed else torch.randn(N, 1, D), window.detach().clone()
            step, same = update(token, cache, None, weight, bias, "silu")
    rows = token.reshape(N, 1, D)
    y, after = reference_layers.causal_conv1d(
        rows, weight, bias, activation="silu", initial_state=window[..., 1:]
    )
    assert same is cache and step.shape == token.shape and error(step.reshape(N, 1, D), y.detach()) < 1e-5
    assert error(cache[..., 1:], after.detach()) < 1e-5


def test_the_norm_is_served(fla):
    x, z, weight = torch.randn(2, 5, HV, V), torch.randn(2, 5, HV, V), torch.randn(V)
    with patch_fla():
        for name in ("swish", "sigmoid"):
            got = function(fla, "rms_norm_gated")(x, z, weight, None, activation=name, eps=1e-5)
            gate = {"swish": "silu"}.get(name, name)
            assert error(got, reference_layers.rms_norm_gated(x, z, weight, eps=1e-5, activation=gate)) < 1e-5


def test_the_last_undo_restores_everything(fla):
    names = [name for name in (n for _, n in FLA) if name not in fla_patch.CHUNKED]
    before = [function(fla, name) for name in names]
    first, second = patch_fla(), patch_fla()
    kept = [function(fla, name) for name in names]
    assert all(a is not b for a, b in zip(kept, before, strict=True))
    first.undo(), first.undo()
    assert [function(fla, name) for name in names] == kept
    second.undo()
    assert [function(fla, name) for name in names] == before
    assert not sys.modules["fla.backends"].BaseBackend.__subclasses__()[-1]().is_enabled()


def test_flas_convention_switches_the_backend(monkeypatch):
    """A registered backend serves without a patch and outlives patches; FLA_GDN=0 turns it off."""
    modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    chunk, x = modules["fla.ops.gated_delta_rule.chunk"].chunk_gated_delta_rule, problem(B=1, T=5)
    assert chunk(*x) == "fla's own"
    with patch_fla():
        register_backend()
        assert torch.is_tensor(chunk(*x)[0])
    register_backend()
    with patch_fla():
        pass
    assert torch.is_tensor(chunk(*x)[0]) and chunk(*x, cp_context=object()) == "fla's own"
    monkeypatch.setenv("FLA_GDN", "0")
    assert chunk(*x) == "fla's own"
    with patch_fla():
        assert chunk(*x) == "fla's own"
    (backend,) = modules["fla.backends"].BaseBackend.__subclasses__()[-1:]
    assert (backend.backend_type, backend.package_name, backend.env_var) == ("gdn", "gdn", "FLA_GDN")
    monkeypatch.setenv("FLA_GDN", "1")
    assert torch.is_tensor(chunk(*x)[0])


PLUGGED = """
import os, sys, torch
# FLA leaves out what cannot be imported: its layers and models take seconds
sys.modules |= {"fla.layers": None, "fla.models": None}
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
x = [torch.ones(1, 5, 2, 8) for _ in range(3)] + [-torch.ones(1, 5, 2), torch.ones(1, 5, 2)]
served = chunk_gated_delta_rule(*x)[0].shape
os.environ["FLA_GDN"] = "0"
try:
    chunk_gated_delta_rule(*x)
except Exception as error:
    print(list(served), type(error).__module__.split(".")[0] != "gdn")
"""


@needs_fla
def test_fla_finds_gdn_by_itself(tmp_path):
    """With one file more in a copy of FLA, a CPU call that names gdn nowhere runs on gdn."""
    (package,) = importlib.util.find_spec("fla").submodule_search_locations
    shutil.copytree(package, tmp_path / "fla")
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule" / "backends"
    (folder / "gdn.py").write_text(
        "from gdn.integrations.fla_patch import register_backend\n\nregister_backend()\n"
    )
    with (folder / "__init__.py").open("a") as file:
        file.write("from fla.ops.gated_delta_rule.backends import gdn\n")
    # what FLA needs may lie beside it, in a folder that PYTHONPATH names relative to this process
    paths = (tmp_path, Path(fla_patch.__file__).parents[2], Path(package).resolve().parent)
    inherited = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), inherited])}
    done = subprocess.run(
        [sys.executable, "-c", PLUGGED], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout.split("\n")[-2] == "[1, 5, 2, 8] True", done.stderr


def test_the_deprecation_warning_of_fla_is_kept(fla):
    """A call gives one of FLA's deprecation warnings, at the caller's line; FLA's own tests expect it."""
    q, k, v, g, beta = problem(B=2, T=5)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        with patch_fla(), pytest.warns(DeprecationWarning, match="`transpose_state_layout` is dep") as caught:
            function(fla, name)(**named, transpose_state_layout=True)
        assert len(caught) == 1 and caught[0].filename != fallback.__file__


def test_what_gdn_refuses_stays_with_fla(monkeypatch):
    modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    x = problem(B=1, T=5)
    q, k, v, g, beta = x
    channel = torch.randn(1, 5, 6)
    with patch_fla():
        chunk = modules["fla.ops.gated_delta_rule.chunk"].chunk_gated_delta_rule
        assert chunk(*x, cp_context=object()) == chunk(*x, unheard_of=1) == "fla's own"
        assert torch.is_tensor(chunk(*x)[0])
        recurrent = modules["fla.layers"].renamed
        assert recurrent(q, k, v, g, q) == recurrent(q, k, v, g, unheard_of=1) == "fla's own"
        assert torch.is_tensor(recurrent(q, k, v, g)[0])
        # FLA's own tests pass q and k in fp32, v and beta in fp16
        assert recurrent(q, k, v.half(), g, beta=beta.half()) == chunk(q, k, v.half(), g, beta) == "fla's own"
        assert recurrent(q, k[..., 1:], v) == recurrent(q, k, v, head_first=True) == "fla's own"
        # gdn reads these offsets only after it has accepted the call
        assert chunk(*x, cu_seqlens=torch.tensor([0, 4, 3], device="cpu")) == "fla's own"
        assert torch.is_tensor(chunk(*x)[0])
        conv = modules["fla.modules.causal_conv1d.ops"]
        assert conv.causal_conv1d(channel, torch.ones(6, W), residual=channel) == "fla's own"
        assert conv.causal_conv1d_update(channel[0], None, channel[0], torch.ones(6, W)) == "fla's own"
        for more in ({"activation": "relu"}, {"seq_idx": torch.zeros(1, 5)}):
            assert conv.causal_conv1d(channel, torch.ones(6, W), **more) == "fla's own"
        assert conv.causal_conv1d(channel, torch.ones(5, W)) == "fla's own"
        norm = modules["fla.modules.norm.fused_norm_gate"].rms_norm_gated
        assert norm(v, v, torch.ones(V), torch.ones(V)) == norm(v, v, None, None, prenorm=True) == "fla's own"
    assert recurrent(q, k, v, g) == "fla's own" and chunk(*x) == "fla's own"


def test_sizes_without_a_kernel_stay_with_fla(monkeypatch):
    """On a GPU sizes without a kernel go to FLA, since `eager` would need far more memory."""
    modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    x = problem(B=1, T=5)
    chunk = modules["fla.ops.gated_delta_rule.chunk"].chunk_gated_delta_rule
    with patch_fla():
        assert torch.is_tensor(chunk(*x)[0])
        monkeypatch.setattr(fla_patch, "has_kernel", lambda *_, **__: False)
        assert chunk(*x) == modules["fla.layers"].renamed(*x[:4]) == "fla's own"


@pytest.mark.gpu
def test_the_sizes_with_a_kernel(monkeypatch):
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    q, wide = torch.empty(1, 1, 1, 128, device="cuda"), torch.empty(1, 1, 1, 512, device="cuda")
    assert has_kernel(q, q) and not has_kernel(q, wide) and not has_kernel(q.double(), q.double())
    assert has_kernel(q.cpu(), wide.cpu())


def test_versions_and_switches(monkeypatch):
    modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(modules["fla"], "__version__", "0.5.2")
    with pytest.raises(ImportError, match="version 0.6 or newer, got 0.5.2"):
        patch_fla()
    monkeypatch.setattr(modules["fla"], "__version__", "0.6.1")
    monkeypatch.setattr(modules["fla.backends"], "_DISPATCH_DISABLED", True)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
        patch_fla()


# FLA's own layer and model


def reference_layer(layer, hidden):
    """Compute FLA's GatedDeltaNet, or its KimiDeltaAttention, in fp64 from its weights."""
    p = {name: x.detach().double() for name, x in layer.state_dict().items()}
    x = hidden.double()

    def project(name):
        y = x
        for part in ("", ".0", ".1"):
            if f"{name}_proj{part}.weight" in p:
                y = nn.functional.linear(y, p[f"{name}_proj{part}.weight"], p.get(f"{name}_proj{part}.bias"))
        return y

    def mixed(name):
        y, _ = reference_layers.causal_conv1d(
            project(name), p[f"{name}_conv1d.weight"][:, 0], activation="silu"
        )
        return y.unflatten(-1, (-1, V if name == "v" else K))

    raw = {name: value for name, value in RAW.items() if name != "allow_neg_eigval"}
    raw |= {"A_log": p["A_log"], "dt_bias": p["dt_bias"]}
    if "a_proj.weight" in p:
        a, activation = project("a"), "silu"
    else:
        a, activation = project("f").unflatten(-1, (HV, K)), "sigmoid"
        raw |= {"dt_bias": p["dt_bias"].view(HV, K), "lower_bound": layer.lower_bound}
    o, _ = reference(*map(mixed, "qkv"), a, project("b"), **raw)
    z = project("g").unflatten(-1, (-1, V))
    o = reference_layers.rms_norm_gated(o, z, p["o_norm.weight"], eps=layer.o_norm.eps, activation=activation)
    return o.flatten(-2) @ p["o_proj.weight"].T


@needs_fla
def test_flas_layer_agrees_with_the_reference():
    from fla.layers import GatedDeltaNet

    layer = GatedDeltaNet(32, expand_v=V / K, head_dim=K, num_heads=H, num_v_heads=HV)
    x = torch.randn(2, T, 32)
    expected = reference_layer(layer, x)
    with patch_fla():
        assert error(layer(x)[0].detach(), expected) < 1e-5
        layer(x)[0].square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        layer.eval()
        with torch.no_grad():
            # the recurrent form with left padding, which a mask packs
            mask = (torch.arange(20) >= torch.tensor([[0], [7]])).long()
            got, _, _ = layer(x[:, :20], attention_mask=mask)
            assert error(got[0], reference_layer(layer, x[:1, :20])[0]) < 1e-5
            assert error(got[1, 7:], reference_layer(layer, x[1:, 7:20])[0]) < 1e-5


@needs_fla
@pytest.mark.parametrize("options", [{}, {"safe_gate": True, "lower_bound": -5.0}])
def test_flas_layer_of_key_channels_agrees_with_the_reference(options):
    from fla.layers import KimiDeltaAttention

    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, expand_v=V / K, head_dim=K, num_heads=H, num_v_heads=HV, **options)
    x = torch.randn(2, T, 32)
    expected = reference_layer(layer, x)
    with patch_fla():
        assert error(layer(x)[0].detach(), expected) < 1e-5
        layer(x)[0].square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        layer.eval()
        with torch.no_grad():
            # the recurrent form
            assert error(layer(x[:, :20])[0], reference_layer(layer, x[:, :20])) < 1e-5


@needs_fla
def test_flas_model_generates(monkeypatch):
    """A prompt and its continuation through FLA's cache equal one pass over the whole sequence."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    from fla.modules import mlp

    # gdn has no MLP, and FLA's needs a GPU
    monkeypatch.setattr(mlp, "swiglu", lambda x, y: nn.functional.silu(x) * y)
    config = GatedDeltaNetConfig(
        hidden_size=32, head_dim=8, num_heads=2, num_v_heads=4, num_hidden_layers=2, vocab_size=50,
        fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False, initializer_range=0.2,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GatedDeltaNetForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 70))
    with patch_fla(), torch.no_grad():
        # do not call `generate`: FLA 0.6.0 does not know the name of its cache in Transformers 5.24
        words, out = ids, model(ids, use_cache=True)
        for _ in range(6):
            words = torch.cat((words, out.logits[:, -1:].argmax(-1)), 1)
            out = model(words[:, -1:], past_key_values=out.past_key_values, use_cache=True)
        logits = model(words, use_cache=False).logits
    assert torch.equal(logits[:, 69:-1].argmax(-1), words[:, 70:])
