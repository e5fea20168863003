"""Test what a replay of patch_transformers(graphs=True) must not miss, on a CPU with stand-ins for graphs."""

import copy
import gc
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

import test_transformers as families  # noqa: E402
from test_transformers_graphs import Recorder, Steps, eager, options, recordings, whole  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_capture as capturing  # noqa: E402
from gdn.integrations import transformers_graphs as graphing  # noqa: E402
from gdn.integrations import transformers_model_key as model_keys  # noqa: E402
from gdn.integrations import transformers_recording as recording_steps  # noqa: E402


@pytest.fixture
def recorder(monkeypatch):
    with torch.no_grad():
        yield Recorder(monkeypatch)


@pytest.fixture
def model():
    return copy.deepcopy(families.make_model("qwen3_5"))


def layer_of(cache):
    """Return the first layer of a cache that has keys."""
    return next(x for x in cache.layers if hasattr(x, "keys"))


def recorded_steps(model, recorder, ids):
    """Return steps of which two are replays."""
    steps = Steps(model, ids)
    for _ in range(4):
        steps()
    assert recorder.num_replays == 2
    return steps


def test_a_call_outside_of_generate_leaves_prompts_alone(recorder, model):
    """Beam search does not ask for a call, so nobody has compared the model with that of the recordings."""
    ids, beams = families.tokens(2, 12), 3
    with gdn.patch_transformers(graphs=True):
        for _ in range(4):
            model.generate(ids.repeat_interleave(beams, 0), **options())
            gc.collect()
        assert any(x.prompts for x in recordings(model))
        model.get_compiled_call(None)
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
        replays = recorder.num_replays
        assert torch.equal(
            model.generate(ids, **options(num_beams=beams)), eager(model, ids, num_beams=beams)
        )
        assert recorder.num_replays == replays


def test_inputs_on_another_device_are_not_recorded(recorder, model):
    """A number in a tensor on the CPU becomes a constant of the kernel that reads it."""
    with gdn.patch_transformers(graphs=True):
        steps = Steps(model, families.tokens(2, 20))
        for _ in range(4):
            steps(scale={"a": torch.zeros((), device="meta")})
    assert recorder.num_graphs == 0


def test_a_step_that_cannot_be_recorded_leaves_the_cache_its_tensors(monkeypatch, recorder, model):
    """Those that a layer creates in a capture are never written."""
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True):
        steps = Steps(model, ids)
        layer = layer_of(steps.cache)

        def fail(run, memory):
            layer.keys, layer.other = torch.full_like(layer.keys, float("nan")), torch.zeros(1)
            model.lm_head.count = 1
            raise RuntimeError("operation not permitted")

        monkeypatch.setattr(capturing, "record", fail)
        with pytest.warns(RuntimeWarning, match="not permitted"):
            logits = torch.cat([steps() for _ in range(4)], 1)
        assert families.error(logits, whole(model, ids)[:, 6:10]) <= 2e-5
        assert not hasattr(layer, "other") and not hasattr(model.lm_head, "count")


def test_an_offloaded_cache_is_not_recorded(recorder, model):
    """Its layers move to the CPU and back in each step."""
    with gdn.patch_transformers(graphs=True):
        steps = Steps(model, families.tokens(2, 20))
        assert graphing.is_static(steps.cache)
        for name, value in {"offloading": True, "count": torch.zeros(1)}.items():
            setattr(steps.cache, name, value)
            assert not graphing.is_static(steps.cache)
            delattr(steps.cache, name)


def test_tensors_of_a_cache_with_another_memory_are_not_replayed(recorder, model):
    """A caller moves a cache to the CPU and back by `.data`: the tensors are the same objects."""
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True):
        steps = recorded_steps(model, recorder, ids)
        layer, kept = layer_of(steps.cache), []
        kept.append(layer.keys.data)
        layer.keys.data = layer.keys.data.clone()
        steps()
        # recorded anew
        assert recorder.num_graphs == 2
        assert [x.is_current(steps.cache) for x in recordings(model)] == [False, True]
        del steps, layer
        gc.collect()
        # the next cache gets the second graph
        assert [x.may_serve for x in recordings(model)] == [False, True]
        later = Steps(model, ids)
        later()
        assert recorder.num_graphs == 2 and recordings(model)[1].owner.cache() is later.cache


def test_other_layers_of_a_cache_are_not_replayed(recorder, model):
    """A replay writes the tensors of the layers that were recorded."""
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True):
        steps = recorded_steps(model, recorder, ids)
        first = copy.copy(steps.cache)
        steps.cache.layers = copy.deepcopy(steps.cache.layers)
        steps()
        assert recorder.num_graphs == 2 and [x.owner.cache() for x in recordings(model)] == [steps.cache] * 2
        assert [x.owner.serves(steps.cache) for x in recordings(model)] == [False, True]
        assert [x.owner.serves(first) for x in recordings(model)] == [True, False]


@pytest.mark.parametrize("place", ["the cache", "a module"])
def test_a_step_that_counts_in_python_is_not_replayed(recorder, model, place):
    """A replay runs no Python."""
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True):
        steps = Steps(model, ids)
        layer, owner = layer_of(steps.cache), steps.cache if place == "the cache" else model.lm_head
        update, owner.count = layer.update, 0

        def update_and_count(*args, **kwargs):
            owner.count += 1
            return update(*args, **kwargs)

        layer.update = update_and_count
        # `generate` asks once
        call = model.get_compiled_call(None)
        steps.model = types.SimpleNamespace(get_compiled_call=lambda config: call)
        for number in range(1, 7):
            steps()
            assert owner.count == number
        # no two steps are of one kind where the cache differs
        assert recorder.num_replays == (place == "a module") and recordings(model) == []


def test_a_quantised_weight_that_is_replaced_is_seen(recorder, model):
    """A tensor of tensors has no memory of its own: its address is 0."""
    head = model.lm_head

    def weight(sign):
        x = sign * head.weight.detach()
        return torch.nn.Parameter(TwoTensor(x, x.clone()), requires_grad=False)

    first, second = weight(1), weight(-1)
    head.weight = first
    call = graphing.GraphedCall(model)
    call.look_at(model_keys.modules_of(model))
    before = call.model_key
    assert call.has_seen(model)
    head.weight = second
    assert not call.has_seen(model)
    call.look_at(model_keys.modules_of(model))
    assert call.model_key != before and call.has_seen(model)
    # the same object with another part
    second.a = second.a.clone()
    assert not call.has_seen(model)


def test_all_tensors_of_an_output_are_the_callers(recorder, model):
    """A later replay writes those of the graph: of a mixture of experts, the logits of its router."""
    x = {name: torch.ones(2) for name in ("logits", "router_logits", "first", "second", "third")}
    output = transformers.modeling_outputs.MoeCausalLMOutputWithPast(
        logits=x["logits"],
        router_logits=(x["router_logits"],),
        hidden_states=([x["first"]], {"a": x["second"]}),
    )
    other = recording_steps.copy_of(output)
    for y in x.values():
        y.zero_()
    found = [other.logits, other.router_logits[0], other.hidden_states[0][0], other.hidden_states[1]["a"]]
    assert all(bool((y == 1).all()) for y in found)


@pytest.mark.parametrize("is_static", [True, False])
def test_padding_on_the_left_is_no_document(model, recwarn, is_static):
    """The masks of a static cache come as a dictionary, in which that of linear attention has two axes."""
    ids, mask = families.tokens(1, 12), torch.ones(1, 12, dtype=torch.long)
    mask[:, :5] = 0
    with gdn.patch_transformers():
        more = {} if is_static else {"cache_implementation": None}
        eager(model, ids, attention_mask=mask, **more)
    assert not [x for x in recwarn if "position_ids restart" in str(x.message)]
