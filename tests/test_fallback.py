"""Test the rule of all patches: a call that gdn rejects goes to the package's own function, no other does."""

import importlib
import logging
import sys
import types
import warnings

import pytest
import torch
from kit.serving import inputs, pool_of, same_bits

from gdn.integrations import fallback, fla_patch, lmdeploy, sglang, vllm

PACKAGES = {"fla": fla_patch, "vllm": vllm, "sglang": sglang, "lmdeploy": lmdeploy}
FUNCTIONS = [
    (package, module, name)
    for package, adapter in PACKAGES.items()
    for module, name, serve in adapter.PACKAGE.served
    if not isinstance(serve, type)
]
METHODS = [
    (package, module, name, method)
    for package, adapter in PACKAGES.items()
    for module, name, serve in adapter.PACKAGE.served
    if isinstance(serve, type)
    for method, value in vars(serve).items()
    if callable(value) and not method.startswith("_") and method != "arguments_of_original"
]


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def package_class(name, results):
    """Return a class of the package, each method of which returns its name and arguments."""

    def method_of(method):
        return lambda self, *args, **kwargs: (method, args, kwargs)

    return type(name, (), {method: method_of(method) for method in results})


@pytest.fixture
def modules(monkeypatch):
    """Return modules with the packages' names, each function of which returns its arguments."""
    made = {}
    for adapter in PACKAGES.values():
        for module, name, serve in adapter.PACKAGE.served:
            own = made.setdefault(module, types.ModuleType(module))
            methods = [m for _, _, n, m in METHODS if n == name]
            is_class = isinstance(serve, type)
            value = (
                package_class(name, methods) if is_class else lambda *args, **kwargs: ("own", args, kwargs)
            )
            setattr(own, name, value)
        for module, name, method, _ in adapter.PACKAGE.wrapped:
            own = made.setdefault(module, types.ModuleType(module))
            vars(own).setdefault(name, type(name, (), {}))
            setattr(vars(own)[name], method, lambda *args: args)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("package, module, name", FUNCTIONS)
def test_every_function_falls_back(modules, monkeypatch, package, module, name):
    """If gdn rejects a call for any reason, the package's function gets the call unchanged."""
    adapter = PACKAGES[package].PACKAGE
    errors = iter([ValueError, TypeError, NotImplementedError])

    def reject(*args, **kwargs):
        raise next(errors)("x: expected this, got that")

    reject.__name__ = name
    monkeypatch.setattr(
        adapter, "served", tuple((m, n, reject if n == name else s) for m, n, s in adapter.served)
    )
    with adapter.patch():
        served = vars(modules[module])[name]
        for _ in range(3):
            assert served(1, b=2) == ("own", (1,), {"b": 2})
    assert next(errors, None) is None, "each error was raised"


@pytest.mark.parametrize("package, module, name, method", METHODS)
def test_every_method_falls_back(modules, monkeypatch, package, module, name, method):
    adapter = PACKAGES[package].PACKAGE
    (serve,) = (s for _, n, s in adapter.served if n == name)
    x = torch.ones(1, 2, 4, 3)
    monkeypatch.setattr(serve, method, raising(ValueError("x: expected this, got that")))
    with adapter.patch():
        kernel = vars(modules[module])[name]()
        called, args, kwargs = getattr(kernel, method)(x, x, x, scale=2)
    assert called == method and kwargs == {"scale": 2} and all(torch.equal(a, x) for a in args)


def test_a_call_of_wrong_tensors_falls_back(modules):
    """gdn's own checks cause the fallback: dtypes, shapes, a state that is no tensor."""
    x, raw, state = inputs(1, 1), inputs(1, 1, raw=True), pool_of(1)
    gates = (raw["A_log"], raw["a"], raw["b"], raw["dt_bias"], raw["q"], raw["k"])
    before = state.clone()
    update = modules["vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"]
    with vllm.patch_vllm():
        for v, pool in ((raw["v"].half(), state), (raw["v"][..., :5], state), (raw["v"], 5)):
            got = update.fused_sigmoid_gating_delta_rule_update(*gates, v, initial_state=pool)
            assert got[0] == "own" and got[2]["initial_state"] is pool
        chunk = modules["vllm.third_party.flash_linear_attention.ops.chunk"].chunk_gated_delta_rule
        assert chunk(x["q"], x["k"], x["v"].double(), x["g"], x["beta"])[0] == "own"
    assert same_bits(state, before)


@pytest.mark.parametrize("error", [ValueError("tile"), TypeError("kernel"), NotImplementedError("dtype")])
def test_an_error_of_a_backend_at_work_does_not_fall_back(modules, monkeypatch, error):
    """An error in a backend, launch, operator or autograd is raised, since the pool may be half written."""
    monkeypatch.setenv("GDN_BACKEND", "eager")
    x, state = inputs(1, 3), pool_of(1)
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    for module, name in (("decode", "advance_token"), ("prefill", "_run_rule")):
        monkeypatch.setattr(importlib.import_module(f"gdn.backends.eager.{module}"), name, raising(error))
    step = modules["vllm.third_party.flash_linear_attention.ops.fused_recurrent"]
    chunk = modules["sglang.kernels.ops.attention.fla.chunk"]
    with vllm.patch_vllm(), sglang.patch_sglang(), pytest.raises(type(error), match=str(error)):
        step.fused_recurrent_gated_delta_rule(*five, initial_state=state)
    with vllm.patch_vllm(), sglang.patch_sglang(), pytest.raises(type(error), match=str(error)):
        chunk.chunk_gated_delta_rule(*five)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, FloatingPointError])
def test_other_errors_do_not_fall_back(error):
    with pytest.raises(error, match="no memory"):
        fallback.call_with_fallback("rule", raising(error("no memory")), lambda: "own")


def test_the_caller_sees_the_error_of_the_package():
    with pytest.raises(AssertionError, match="initial_state is required") as caught:
        fallback.call_with_fallback(
            "rule",
            raising(TypeError("state: expected a tensor")),
            raising(AssertionError("initial_state is required")),
        )
    assert "state: expected a tensor" in str(caught.value.__context__)


def test_a_reason_is_logged_once(caplog):
    fallback._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "gdn"):
        for reason in ("q: expected this", "q: expected this", "k: expected that"):
            fallback.call_with_fallback("rule", raising(ValueError(reason)), lambda: None)
    assert [r.getMessage() for r in caplog.records] == [
        "rule is left to its package: q: expected this",
        "rule is left to its package: k: expected that",
    ]


def test_lmdeploys_method_gets_a_key_head_for_each_value_head(modules):
    """lmdeploy's prepare_inputs copies key heads and ours does not, so a rejected call copies them then."""
    x = inputs(1, 5)
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    backend = modules["lmdeploy.pytorch.backends.cuda.gated_delta_rule"]
    with lmdeploy.patch_lmdeploy():
        rule = backend.CudaGatedDeltaRuleImpl()
        method, args, kwargs = rule.chunk_gated_delta_rule(*five, initial_state=None, state_indices=None)
        assert method == "chunk_gated_delta_rule" and kwargs == {"initial_state": None, "state_indices": None}
        ratio = x["v"].shape[2] // x["q"].shape[2]
        assert ratio > 1 and torch.equal(args[0], x["q"].repeat_interleave(ratio, 2)) and args[2] is x["v"]
        _, args, kwargs = rule.fused_recurrent_gated_delta_rule(
            q=x["q"], k=x["k"], v=x["v"].half(), initial_state=None
        )
        assert torch.equal(args[1], x["k"].repeat_interleave(ratio, 2)) and kwargs == {"initial_state": None}


def test_lmdeploys_method_names_what_is_missing(modules):
    """A call without keys falls back unchanged: no error of the conversion hides lmdeploy's error."""
    backend = modules["lmdeploy.pytorch.backends.cuda.gated_delta_rule"]
    with lmdeploy.patch_lmdeploy():
        rule = backend.CudaGatedDeltaRuleImpl()
        assert rule.chunk_gated_delta_rule(5, v=None) == ("chunk_gated_delta_rule", (5,), {"v": None})


def test_snapshots_that_sglangs_method_would_not_write_are_an_error(modules):
    x, state = inputs(1, 5), pool_of(2)
    five = [x[name] for name in ("q", "k", "v", "g", "beta")]
    named = {"ssm_states": state, "cache_indices": torch.tensor([0]), "query_start_loc": torch.tensor([0, 9])}
    own = modules["sglang.srt.layers.attention.linear.kernels.gdn_triton"].TritonGDNKernel
    for is_supported in (False, True):
        own.supports_track_state_snapshot = is_supported
        with sglang.patch_sglang():
            kernel = modules["sglang.srt.layers.attention.linear.kernels.gdn_triton"].TritonGDNKernel()
            assert kernel.extend(*five, **named)[0] == "extend"
            snapshots = {"track_state": state.clone(), "track_chunk_idx": torch.tensor([0])}
            if is_supported:
                assert kernel.extend(*five, **named, **snapshots)[0] == "extend"
            else:
                with pytest.raises(ValueError, match="cu_seqlens: expected"):
                    kernel.extend(*five, **named, **snapshots)


def test_a_warning_names_the_line_of_the_caller():
    """A warning names the caller's line; Python's filter hides deprecations of a line of this library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fallback.call_with_fallback("rule", lambda: fallback.warn_caller("old", DeprecationWarning), None)
    assert [w.filename for w in caught] == [__file__]
