"""Check that an argument has one default in all functions, so that they can share states."""

import inspect

import pytest
import torch

import gdn
from gdn.reference import serving

PUBLIC = [getattr(gdn, name) for name in gdn.__all__ if inspect.isfunction(getattr(gdn, name))]
# arguments of the layer and of warmup that no call has
OWN = {"backend"}


def defaults() -> dict[str, dict[object, list[str]]]:
    """Return, for each argument name, its defaults and the functions that have them."""
    found: dict[str, dict[object, list[str]]] = {}
    for function in PUBLIC:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                found.setdefault(name, {}).setdefault(parameter.default, []).append(function.__name__)
    return found


def test_an_argument_has_one_default_in_every_public_function():
    # gates are positional tensors in one function and options in another
    differ = {name: values for name, values in defaults().items() if len(values) > 1}
    # decode_step has the activations of a layer; elsewhere None means no activation
    assert set(differ) <= {"activation"}, differ


@pytest.mark.parametrize("name", ["decode", "prefill", "replay_decode", "replay_commit"])
def test_the_reference_has_the_defaults_of_the_function(name):
    ours = inspect.signature(getattr(gdn, name)).parameters
    for argument, parameter in inspect.signature(getattr(serving, name)).parameters.items():
        # the reference computes in a dtype, and takes the parts of a pool of integers beside its states
        if argument not in ("dtype", "column_scale", "remainder"):
            assert parameter.default == ours[argument].default, argument


@pytest.mark.parametrize("options", [{}, {"state_v_first": True}, {"use_qk_l2norm_in_kernel": True}])
def test_a_final_state_goes_into_a_pool_as_it_is(options):
    """With K = V a transposed state or a missing norm raises no error, so the numbers are compared."""
    T, H, K = 9, 2, 16
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, T, H, K), dim=-1).unbind()
    v, g, beta = torch.randn(1, T, H, K), -torch.rand(1, T, H), torch.rand(1, T, H)
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = 3 * q, 3 * k
    expected, last = gdn.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, **options)
    first = slice(0, T - 3)
    x = [t[:, first] for t in (q, k, v, g, beta)]
    _, pool = gdn.chunk_gated_delta_rule(*x, output_final_state=True, **options)
    by_prefill = torch.zeros_like(pool)
    offsets, slot = torch.tensor([0, T - 3]), torch.tensor([0])
    gdn.prefill(*x[:3], by_prefill, g=x[3], beta=x[4], cu_seqlens=offsets, state_index=slot, **options)
    torch.testing.assert_close(by_prefill, pool)
    rest = [t[:, T - 3 :] for t in (q, k, v, g, beta)]
    o = gdn.decode(*rest[:3], pool, g=rest[3], beta=rest[4], **options)
    torch.testing.assert_close(o, expected[:, T - 3 :])
    torch.testing.assert_close(pool, last)
