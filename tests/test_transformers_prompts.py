"""Test replayed prompts of gdn.patch_transformers(graphs=True), on a CPU with a stand-in for the recorder."""

import copy
import gc
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")

import test_transformers as families  # noqa: E402
from test_transformers_graphs import NEW, Recorder, eager, options, recordings  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_capture as capturing  # noqa: E402
from gdn.integrations import transformers_graphs as graphing  # noqa: E402
from gdn.integrations import transformers_model_key as keys  # noqa: E402
from gdn.integrations import transformers_prompts as prompting  # noqa: E402
from gdn.integrations import transformers_recording as recording_steps  # noqa: E402

# the recording of a step is one graph, that of a prompt another
STEPS = NEW - 1


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


@pytest.fixture
def model():
    """Return a model whose next cache has the length that it asks for."""
    model = copy.deepcopy(families.make_model("qwen3_5"))
    vars(model).pop("_previous_max_cache_length", None)
    return model


def generate(model, number, rows=2, length=12, **more):
    """Return the tokens of `number` prompts of one shape, each checked against steps that run as they are."""
    for seed in range(number):
        ids = families.tokens(rows, length, seed=seed)
        text = model.generate(ids, **options(**more))
        assert torch.equal(text, eager(model, ids, **more))
        gc.collect()


def kinds(model):
    return list(graphing._calls[model].prompt_kinds.values())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_prompts_of_one_shape_are_replayed_with_the_bits_of_a_run(recorder, family):
    """The third prompt is recorded, the others replay it; padding and contents may differ.

    Without padding Transformers gives no mask to layers of linear attention, which is another kind.
    """
    model = copy.deepcopy(families.make_model(family))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    more = {"output_logits": True, "return_dict_in_generate": True}
    with gdn.patch_transformers(graphs=True):
        for seed, given in enumerate([mask, mask.flip(0), mask, mask.flip(0), mask]):
            ids = families.tokens(2, 12, seed=seed)
            # the replay of the recording itself is compared with the run
            before = recorder.num_replays
            one = model.generate(ids, **options(attention_mask=given, **more))
            replays = recorder.num_replays - before
            assert replays == [STEPS - graphing.EAGER_STEPS, STEPS, STEPS + 1, STEPS + 1, STEPS + 1][seed]
            other = eager(model, ids, attention_mask=given, **more)
            assert torch.equal(one.sequences, other.sequences)
            assert all(torch.equal(x, y) for x, y in zip(one.logits, other.logits, strict=True))
            del one, other
            gc.collect()
        assert recorder.num_graphs == 2 and [len(x.prompts) for x in recordings(model)] == [1]


def test_a_prompt_and_its_first_token_alone_are_a_replay(recorder, model):
    with gdn.patch_transformers(graphs=True):
        generate(model, 3)
        before = recorder.num_replays
        generate(model, 2, max_new_tokens=1, min_new_tokens=1)
        assert recorder.num_replays == before + 2


def test_other_shapes_have_graphs_of_their_own(monkeypatch, recorder, model):
    monkeypatch.setattr(prompting, "MOST_GRAPHS", 2)
    with gdn.patch_transformers(graphs=True):
        generate(model, 3, length=12, max_new_tokens=20)
        for length in (10, 11, 12):
            generate(model, 3, length=length, max_new_tokens=32 - length, min_new_tokens=4)
        (recording,) = recordings(model)
        assert [key[0][1][1] for key in recording.prompts] == [11, 12]
        # four were recorded: the one of 12 tokens was used in between, but two came after it
        assert recorder.num_graphs == 1 + 4


@pytest.mark.parametrize("new", [1, NEW])
def test_a_cache_that_its_caller_keeps_is_not_written(recorder, model, new):
    """Neither one that has a prompt alone, nor one of decode steps."""
    more = {"max_new_tokens": new, "min_new_tokens": new, "return_dict_in_generate": True}
    with gdn.patch_transformers(graphs=True):
        generate(model, 4)
        kept = model.generate(families.tokens(2, 12, seed=9), **options(**more))
        cache = kept[families.CACHE]
        assert any(x.owner.cache() is cache for x in recordings(model))
        contents = [x.clone() for x in recording_steps.CacheState(cache).tensors()]
        generate(model, 2)
        after = recording_steps.CacheState(cache).tensors()
        assert all(torch.equal(x, y) for x, y in zip(contents, after, strict=True))
        assert not any(x.is_idle for x in recordings(model) if x.owner.cache() is cache)


def test_a_text_that_goes_on_in_its_cache_is_no_prompt_of_a_graph(recorder, model):
    with gdn.patch_transformers(graphs=True):
        for seed in range(4):
            ids = families.tokens(2, 12, seed=seed)
            cache = transformers.StaticCache(config=model.config, max_cache_len=48)
            given = {**options(), families.CACHE: cache}
            del given["cache_implementation"]
            first = model.generate(ids, **given)
            more = torch.cat([first, families.tokens(2, 5, seed=seed)], 1)
            both = model.generate(more, **given)
            assert torch.equal(both, eager(model, more))
            del cache, given, first
            gc.collect()
        assert {key[0][1][1] for key in graphing._calls[model].prompt_kinds} == {12}


def test_a_later_prompt_of_a_cache_enters_the_order_of_streams(monkeypatch, model):
    """It writes the tensors of a recorded step, which another stream may give to the next cache."""
    Recorder(monkeypatch)
    entered = []
    with gdn.patch_transformers(graphs=True):
        cache = transformers.StaticCache(config=model.config, max_cache_len=48)
        given = {**options(), families.CACHE: cache}
        del given["cache_implementation"]
        first = model.generate(families.tokens(2, 12), **given)
        assert len(recordings(model)) == 1
        monkeypatch.setattr(capturing.StreamOrder, "enter", lambda self, device: entered.append(device))
        model.generate(torch.cat([first, families.tokens(2, 5)], 1), **given)
        # the prompt and all steps
        assert len(entered) == 1 + NEW - 1


@pytest.mark.parametrize("why", ["many tokens", "not compiled", "no graphs", "sampled logits", "an image"])
def test_what_is_left_to_the_model(monkeypatch, recorder, model, why):
    if why == "many tokens":
        monkeypatch.setattr(prompting, "MOST_TOKENS", 23)
    elif why == "sampled logits":
        prepare = model.prepare_inputs_for_generation
        monkeypatch.setattr(
            model,
            "prepare_inputs_for_generation",
            lambda *x, **more: {**prepare(*x, **more), "logits_to_keep": 2},
        )
    elif why == "an image":
        prepare = model.prepare_inputs_for_generation
        image = torch.zeros(1)
        monkeypatch.setattr(
            model, "prepare_inputs_for_generation", lambda *x, **more: {**prepare(*x, **more), "image": image}
        )
    with gdn.patch_transformers(graphs=why != "no graphs"):
        if why in ("not compiled", "no graphs"):
            if why == "not compiled":
                # a call that somebody got outside of `generate`
                model.get_compiled_call(None)
            for seed in range(4):
                eager(model, families.tokens(2, 12, seed=seed))
            assert recorder.num_graphs == 0
            assert model not in graphing._calls or kinds(model) == []
        else:
            generate(model, 4)
            assert recorder.num_graphs == 1 and kinds(model) == []


def test_a_replay_with_other_bits_is_not_kept(monkeypatch, recorder, model):
    record = recorder.record

    def record_otherwise(run, memory):
        replay, output = record(run, memory)
        if recorder.num_graphs == 1:
            return replay, output

        def replay_otherwise():
            replay()
            output["logits"] = output["logits"] * (1 + 2**-20)

        return replay_otherwise, output

    monkeypatch.setattr(capturing, "record", record_otherwise)
    with gdn.patch_transformers(graphs=True):
        generate(model, 5)
        assert [x.is_refused for x in kinds(model)] == [True] and recorder.num_graphs == 2
        assert not recordings(model)[0].prompts


def change_while_recording(monkeypatch, recorder, model, error=None):
    """Let a recording set an attribute of a module, and raise `error` if given; return the old value."""
    record, before = recorder.record, torch.zeros(1)
    model.model.offset = before

    def record_and_change(run, memory):
        if recorder.num_graphs == 1:
            model.model.offset = torch.ones(1)
            if error is not None:
                raise error
        return record(run, memory)

    monkeypatch.setattr(capturing, "record", record_and_change)
    return before


def test_a_prompt_that_changes_modules_is_not_recorded(monkeypatch, recorder, model):
    """A replay would not change them, and tensors of a graph must not stay there."""
    before = change_while_recording(monkeypatch, recorder, model)
    with gdn.patch_transformers(graphs=True):
        generate(model, 4)
        assert [x.is_refused for x in kinds(model)] == [True] and model.model.offset is before


def test_an_interrupted_recording_leaves_the_model_as_it_is(monkeypatch, recorder, model):
    before = change_while_recording(monkeypatch, recorder, model, KeyboardInterrupt)
    with gdn.patch_transformers(graphs=True):
        with pytest.raises(KeyboardInterrupt):
            generate(model, 4)
        assert model.model.offset is before
        generate(model, 3)


def test_a_prompt_that_cannot_be_recorded_runs_as_it_is(monkeypatch, recorder, model):
    record = recorder.record

    def fail(run, memory):
        if recorder.num_graphs == 0:
            return record(run, memory)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(capturing, "record", fail)
    with (
        gdn.patch_transformers(graphs=True),
        pytest.warns(
            RuntimeWarning, match="a prompt runs without a graph: operation not permitted"
        ) as caught,
    ):
        generate(model, 5)
    assert len([x for x in caught if issubclass(x.category, RuntimeWarning)]) == 1


def test_a_changed_model_does_not_replay_its_prompt(recorder, model):
    with gdn.patch_transformers(graphs=True):
        generate(model, 4)
        graphs = recorder.num_graphs
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
        generate(model, 4)
        # a step and a prompt again
        assert recorder.num_graphs == graphs + 2


def test_settings_of_the_caller_have_graphs_of_their_own(monkeypatch, recorder, model):
    with gdn.patch_transformers(graphs=True):
        generate(model, 4)
        monkeypatch.setenv("GDN_BACKEND", "eager")
        generate(model, 4)
        assert recorder.num_graphs == 4


def test_graphs_do_not_keep_a_model(recorder, model):
    model = copy.deepcopy(model)
    with gdn.patch_transformers(graphs=True):
        # the stand-in for a recorded step would keep the model
        model.generate(families.tokens(2, 12), **options(max_new_tokens=2, min_new_tokens=2))
        end = weakref.ref(model)
        assert graphing._calls[model].has_seen(model)
        del model
        gc.collect()
        assert end() is None


def test_nothing_is_left_of_a_patch(recorder, model):
    mixin = transformers.GenerationMixin
    before = mixin._sample, mixin._prefill
    with gdn.patch_transformers(graphs=True):
        assert mixin._sample is not before[0] and mixin._prefill is not before[1]
    assert (mixin._sample, mixin._prefill) == before


CHANGES = {
    "nothing": lambda m: None,
    "a weight": lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach().clone())),
    "a weight's data": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.clone()),
    "a weight's shape": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data[:9]),
    "a module": lambda m: setattr(m, "lm_head", copy.deepcopy(m.lm_head)),
    "a module more": lambda m: m.lm_head.add_module("adapter", torch.nn.Identity()),
    "no module": lambda m: setattr(m.model, "norm", None),
    "a hook": lambda m: m.lm_head.register_forward_hook(lambda *args: None),
    "a hook before": lambda m: m.lm_head.register_forward_pre_hook(lambda *args: None),
    "a forward": lambda m: setattr(m.lm_head, "forward", lambda x: x),
    "the mode": lambda m: m.model.norm.train(),
    "a number": lambda m: setattr(m.model.norm, "eps", 0.5),
    "another name": lambda m: (delattr(m.model.norm, "eps"), setattr(m.model.norm, "epsilon", 0.5)),
    "an attribute": lambda m: setattr(m.lm_head, "scale", 2.0),
    "a dictionary": lambda m: m.lm_head.scales.update(default=2.0),
    "a list": lambda m: m.lm_head.adapters.append("other"),
    "a tensor": lambda m: setattr(m.lm_head, "offset", m.lm_head.offset.clone()),
    "a tensor's data": lambda m: setattr(m.lm_head.offset, "data", m.lm_head.offset.clone()),
    "a tensor of a list": lambda m: m.lm_head.offsets.append(torch.ones(1)),
    "a dictionary of one": lambda m: m.lm_head.scales["more"].update(default=2.0),
    "a function": lambda m: setattr(m.lm_head, "act", torch.tanh),
    "an object for a number": lambda m: setattr(m.model.norm, "eps", object()),
    "a stride": lambda m: setattr(m.lm_head.offset, "data", m.lm_head.offset.data.t()),
    "a weight's stride": lambda m: setattr(m.lm_head.square, "data", m.lm_head.square.data.t()),
    "attention": lambda m: m.set_attn_implementation("eager"),
    "a configuration's value": lambda m: setattr(m.config, "norm_topk_prob", True),
    "a configuration's list": lambda m: m.config.layer_types.append("other"),
    "a configuration's dictionary": lambda m: m.config.rope_parameters.update(factor=2.0),
    "a dictionary of that": lambda m: m.config.rope_parameters["full_attention"].update(factor=2.0),
    "another configuration": lambda m: setattr(m.lm_head, "config", copy.deepcopy(m.config)),
    "a part of a configuration": lambda m: setattr(m.config.part, "chunk_size", 8),
    "attention of a part": lambda m: setattr(m.config.part, "_attn_implementation", "eager"),
    "another part": lambda m: setattr(m.config, "part", copy.deepcopy(m.config.part)),
    "registered attention": lambda m: transformers.AttentionInterface.register("sdpa", lambda *args: None),
    "a tuple": lambda m: setattr(m.lm_head, "sizes", (1, 3)),
    "a list in a tuple": lambda m: m.lm_head.mixed[0].append(1),
    "a class": lambda m: setattr(m.lm_head, "__class__", type("Head", (torch.nn.Linear,), {})),
}


# a model with hooks gets no graph
NOT_IN_VALUES = {"a hook", "a hook before", "an object for a number", "another configuration", "another part"}
IN_VALUES = CHANGES.keys() - NOT_IN_VALUES


@pytest.mark.parametrize("what", CHANGES)
def test_a_snapshot_tells_a_changed_model(monkeypatch, model, what):
    model.lm_head.scales, model.lm_head.adapters = {"default": 1.0, "more": {"default": 1.0}}, ["one"]
    model.lm_head.offset, model.lm_head.offsets, model.lm_head.act = torch.ones(2, 2), [], torch.sigmoid
    model.lm_head.square, model.lm_head.sizes = torch.nn.Parameter(torch.ones(3, 3)), (1, 2)
    model.lm_head.mixed = ([], 1)
    model.config.rope_parameters["full_attention"] = {"factor": 1.0}
    model.config.part = copy.deepcopy(model.config)
    registered = transformers.AttentionInterface._global_mapping
    monkeypatch.setattr(transformers.AttentionInterface, "_global_mapping", dict(registered))
    snapshot = keys.Snapshot(keys.modules_of(model))
    values = keys.values_of(keys.modules_of(model))
    assert snapshot.is_of(model) and not snapshot.is_of(copy.deepcopy(model))
    kept = model.lm_head
    CHANGES[what](model)
    assert snapshot.is_of(model) == (what == "nothing") and kept is not None
    if what == "nothing" or what in IN_VALUES:
        assert (keys.values_of(keys.modules_of(model)) == values) == (what == "nothing")


def test_positions_of_images_are_no_part_of_a_model(model):
    """A multimodal model replaces them in each `generate`, and would be recorded each time."""
    model.model.rope_deltas = torch.zeros(1)
    values = keys.values_of(keys.modules_of(model))
    model.model.rope_deltas = torch.zeros(1)
    assert keys.values_of(keys.modules_of(model)) == values


def dictionaries_of(model):
    own = [m.__dict__ for m in keys.modules_of(model)]
    return own, [x.__dict__ for x in keys.configs_of(own)]


def test_a_snapshot_tells_a_value_at_the_address_of_an_object(model):
    model.lm_head.scale = object()
    snapshot = keys.Snapshot(keys.modules_of(model))
    model.lm_head.scale = 2.0
    snapshot.identities = list(map(id, snapshot._attributes(*dictionaries_of(model))))
    assert not snapshot.is_of(model)


def test_a_snapshot_tells_another_forward_of_a_class(monkeypatch, model):
    snapshot = keys.Snapshot(keys.modules_of(model))
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: -x)
    assert not snapshot.is_of(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replayed_prompt_has_the_bits_of_a_run(family, dtype):
    model = copy.deepcopy(families.make_model(family)).to("cuda", dtype)
    more = {"output_logits": True, "return_dict_in_generate": True}
    given = options(**more)
    del given["compile_config"]
    with gdn.patch_transformers(graphs=True):
        for seed in range(5):
            ids = families.tokens(2, 70, seed=seed).cuda()
            one, other = model.generate(ids, **given), eager(model, ids, **more)
            assert torch.equal(one.sequences, other.sequences)
            assert all(torch.equal(x, y) for x, y in zip(one.logits, other.logits, strict=True))
            # the next generate finds the graph of a cache that is gone
            del one, other
            gc.collect()
        # a recording whose first replay has other bits is refused: seen once on an H200, qwen3_next in fp32
        refused = [x.is_refused for x in kinds(model)]
        assert [len(x.prompts) for x in recordings(model)] == [int(not x) for x in refused]
        assert len(refused) == 1 and (dtype is torch.float32 or not refused[0])
