"""Test the masks of decode steps that patch_transformers() creates, and the deferred check for an end."""

import inspect
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

import test_transformers as families  # noqa: E402
from transformers import cache_utils, masking_utils  # noqa: E402
from transformers.generation import utils  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_generate as generating  # noqa: E402

pytestmark = pytest.mark.usefixtures("originals_restored")
LENGTH = 24  # of a cache
(CACHE,) = [
    x for x in generating.CACHES if x in inspect.signature(utils.create_masks_for_generate).parameters
]


@pytest.fixture
def served(monkeypatch):
    """Return a list of the masks that were created here."""
    found, create = [], generating.causal_mask

    def causal_mask(*args):
        found.append(create(*args))
        return found[-1]

    monkeypatch.setattr(generating, "causal_mask", causal_mask)
    return found


@pytest.fixture
def masks():
    """Return the method of a model."""
    return generating.masks_method([object()]).__func__


def make_cache(config, count):
    """Return a static cache with `count` tokens, None: none yet."""
    cache = transformers.StaticCache(config=config, max_cache_len=LENGTH)
    for layer in cache.layers if count is not None else ():
        if isinstance(layer, cache_utils.StaticLayer):
            layer.lazy_initialization(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
            layer.cumulative_length.fill_(count)
    return cache


def make_given(rows=2, count=9, *, padding="left", width=None, attention="sdpa", first="linear_attention"):
    """Return what `generate` gives to the function for one token per row."""
    config = families.make_config("qwen3_5")
    if first == "full_attention":
        config.layer_types = config.layer_types[1:]
    config._attn_implementation = attention
    width = (count or 0) + 1 if width is None else width
    mask = torch.ones(rows, width, dtype=torch.long)
    if padding == "left":
        mask[-1, : width // 3] = 0
    elif padding == "right":
        mask[-1, -(width // 3 + 1) :] = 0
    elif padding == "random":
        mask = torch.randint(0, 2, (rows, width), generator=torch.Generator().manual_seed(width))
    elif padding == "bool":
        mask = mask.bool()
    elif padding == "numbers":
        mask = mask.float() * 0.5
    return {
        "config": config, "inputs_embeds": torch.empty(rows, 1, 0, dtype=torch.bfloat16),
        "attention_mask": None if padding == "none" else mask, CACHE: make_cache(config, count),
        "position_ids": torch.full((rows, 1), count or 0), "block_sequence_ids": None,
        "token_type_ids": None, "mm_token_type_ids": None, "is_first_iteration": False,
    }  # fmt: skip


def assert_same(one, other):
    assert list(one) == list(other)
    for kind in one:
        x, y = one[kind], other[kind]
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
            assert torch.equal(x, y)


def test_a_layer_without_buffers_has_no_tokens(masks, served):
    given = make_given(count=None, width=9)
    next(x for x in given[CACHE].layers if hasattr(x, "cumulative_length")).cumulative_length.fill_(7)
    assert_same(masks(**given), utils.create_masks_for_generate(**given))
    assert len(served) == 1


@pytest.mark.parametrize("padding", ["ones", "left", "right", "random", "bool", "numbers", "none"])
@pytest.mark.parametrize("rows", [1, 3])
def test_masks_are_those_of_transformers(masks, served, padding, rows):
    """Also where the 2-D mask is shorter or longer than the cache, which may be full or empty."""
    number = 0
    for count in (None, 0, 1, 9, LENGTH - 1):
        for width in (None, 1, LENGTH - 1, LENGTH, LENGTH + 5):
            given = make_given(rows, count, padding=padding, width=width)
            if width == LENGTH:
                del given["position_ids"]
            assert_same(masks(**given), utils.create_masks_for_generate(**given))
            number += 1
    assert len(served) == number


@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_kinds_of_attention_and_orders_of_layers(masks, served, attention, first):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = make_given(attention=attention, first=first)
        given["inputs_embeds"] = given["inputs_embeds"].to(dtype)
        found = masks(**given)
        assert_same(found, utils.create_masks_for_generate(**given))
        assert found["full_attention"].dtype == (torch.bool if attention == "sdpa" else dtype)
    assert len(served) == 3


def two_tokens(given, monkeypatch):
    given["inputs_embeds"] = torch.empty(2, 2, 0)


def dynamic_cache(given, monkeypatch):
    given[CACHE] = transformers.DynamicCache(config=given["config"])


def no_cache(given, monkeypatch):
    given[CACHE] = None


def own_cache(given, monkeypatch):
    class Cache(transformers.StaticCache):
        def get_query_offset(self, layer_idx=0):
            return super().get_query_offset(layer_idx) + 1

    given[CACHE].__class__ = Cache


def own_layer(given, monkeypatch):
    class Layer(cache_utils.StaticLayer):
        def get_seq_length(self):
            return super().get_seq_length() - 1

    given["config"].layer_types = ["linear_attention", "full_attention", "full_attention"]
    given[CACHE] = make_cache(given["config"], 9)
    given[CACHE].layers[1].__class__ = Layer


def sliding_window(given, monkeypatch):
    config = given["config"]
    config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    config.sliding_window = 4
    given[CACHE] = make_cache(config, 9)


def or_function(given, monkeypatch):
    given["or_mask_function"] = lambda b, h, q, k: k == 3


def and_function(given, monkeypatch):
    given["and_mask_function"] = lambda b, h, q, k: k != 3


def blocks(given, monkeypatch):
    given["block_sequence_ids"] = torch.zeros(2, LENGTH, dtype=torch.long)


def own_attention(given, monkeypatch):
    mapping = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(mapping, "sdpa", lambda **_: torch.ones(3))


def unknown_attention(given, monkeypatch):
    given["config"]._attn_implementation = "paged"


def own_kind(given, monkeypatch):
    mapping = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    monkeypatch.setitem(mapping, "full_attention", lambda **_: torch.ones(4))


def unknown_kind(given, monkeypatch):
    given["config"].layer_types = ["linear_attention", "full_attention", "other"]


def both_directions(given, monkeypatch):
    given["config"].is_causal = False


def four_dimensions(given, monkeypatch):
    given["attention_mask"] = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)


def own_function(given, monkeypatch):
    monkeypatch.setattr(utils, "create_masks_for_generate", lambda **_: {"other": torch.ones(5)})


@pytest.mark.parametrize(
    "change",
    [
        two_tokens, dynamic_cache, no_cache, own_cache, own_layer, sliding_window, or_function, and_function,
        blocks, own_attention, unknown_attention, own_kind, unknown_kind, both_directions, four_dimensions,
        own_function,
    ],
)  # fmt: skip
def test_everything_else_is_left_to_transformers(masks, served, monkeypatch, change):
    given = make_given()
    change(given, monkeypatch)
    found, expected = masks(**given), utils.create_masks_for_generate(**given)
    assert not served
    if isinstance(expected, dict):
        assert_same(found, expected)
    else:
        assert torch.equal(found, expected)


def test_compilers_and_modes_see_the_function_of_transformers(masks, served, monkeypatch):
    given = make_given()
    compiled = torch.compile(lambda: masks(**given), backend="eager")
    expected = utils.create_masks_for_generate(**given)
    # a compiler orders a set in its own way
    assert_same(dict(sorted(compiled().items())), dict(sorted(expected.items())))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        masks(**given)
    traced = {**given}

    def run(mask):
        traced["attention_mask"] = mask
        return masks(**traced)["full_attention"]

    torch.jit.trace(run, given["attention_mask"], check_trace=False)
    with monkeypatch.context() as exporting:
        exporting.setattr(torch.compiler, "_is_exporting_flag", True)
        masks(**given)
    assert not served
    masks(**given)
    assert len(served) == 1


def test_a_function_with_other_arguments_stays(monkeypatch):
    monkeypatch.setattr(utils, "create_masks_for_generate", lambda config, cache, more, **_: None)
    assert generating.masks_method([object()]) is None
    monkeypatch.delattr(utils, "create_masks_for_generate")
    assert generating.masks_method([object()]) is None


def test_models_have_the_method_while_a_patch_is_in_force(served):
    name = generating.NAME
    cls = transformers.Qwen3_5ForCausalLM
    assert not hasattr(cls, name) and not hasattr(transformers.LlamaForCausalLM, name)
    with gdn.patch_transformers():

        class Own(cls):
            def create_masks_for_generate(self, **given):
                return "own"

        method = getattr(cls, name)
        with gdn.patch_transformers():
            assert getattr(cls, name) is method and getattr(Own, name) is not method
        assert getattr(cls, name) is method and not hasattr(transformers.LlamaForCausalLM, name)
        assert_same(method(**make_given()), utils.create_masks_for_generate(**make_given()))
        assert len(served) == 1
    assert not hasattr(cls, name)
    # a caller has kept it
    assert_same(method(**make_given()), utils.create_masks_for_generate(**make_given()))
    assert len(served) == 1


def generate(model, ids, **more):
    given = {
        "cache_implementation": "static", "disable_compile": True, "max_new_tokens": 12, "do_sample": False,
        **more,
    }  # fmt: skip
    return model.generate(ids, **given)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_generate_has_the_same_bits(monkeypatch, served, family):
    model, ids = families.make_model(family), families.tokens(3, 10)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    more = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    with gdn.patch_transformers():
        one = generate(model, ids, **more)
        assert len(served) == one.sequences.shape[1] - ids.shape[1] - 1
        monkeypatch.setattr(generating._Masks, "find", lambda self, **given: None)
        other = generate(model, ids, **more)
    assert torch.equal(one.sequences, other.sequences)
    assert all(torch.equal(x, y) for x, y in zip(one.logits, other.logits, strict=True))


class Event:
    """Stand for an event of a GPU's queue, which a CPU does not have."""

    def __init__(self, device, blocking):
        assert blocking

    def record(self):
        pass

    def synchronize(self):
        pass


class Streamer:
    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, tokens):
        self.tokens.append(tokens.clone())

    def end(self):
        self.has_ended = True


def count_steps(model, run):
    """Return what run() does, and how often the model was called."""
    number = 0

    def count(*_):
        nonlocal number
        number += 1

    hook = model.register_forward_pre_hook(count)
    try:
        return run(), number
    finally:
        hook.remove()


def test_a_deferred_check_ends_texts_at_the_same_token(monkeypatch):
    """One step more is computed after an end, and cut off; texts of the greatest length have none."""
    monkeypatch.setattr(torch, "Event", Event)
    model = families.make_model("qwen3_5")
    for rows in (1, 2):
        ids = families.tokens(rows, 10)
        with gdn.patch_transformers():
            whole = generate(model, ids, eos_token_id=None)[:, 10:]
            ends = {int(whole[0, 4]), int(whole[-1, 7])}
            for more in ({"eos_token_id": None}, {"eos_token_id": list(ends)}):
                monkeypatch.setattr(generating, "QUEUES", ())
                expected, steps = count_steps(model, lambda: generate(model, ids, **more))  # noqa: B023
                monkeypatch.setattr(generating, "QUEUES", ("cpu",))
                found, deferred = count_steps(model, lambda: generate(model, ids, **more))  # noqa: B023
                assert torch.equal(found, expected)
                assert deferred == steps + (expected.shape[1] < 22)
        assert expected.shape[1] < 22


def test_a_streamer_gets_each_token_once(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    model, ids = families.make_model("qwen3_5"), families.tokens(1, 10)
    found = []
    with gdn.patch_transformers():
        end = int(generate(model, ids, eos_token_id=None)[0, 15])
        for queues in ((), ("cpu",)):
            monkeypatch.setattr(generating, "QUEUES", queues)
            streamer = Streamer()
            text = generate(model, ids, eos_token_id=end, streamer=streamer)
            assert streamer.has_ended and torch.equal(
                torch.cat([x.view(-1) for x in streamer.tokens]), text[0]
            )
            found.append(text)
    assert torch.equal(*found)


def test_what_is_deferred(monkeypatch):
    """A cache that the caller gets back would hold the step that is cut off."""
    gpu, config = torch.device("cuda"), families.make_config("qwen3_5")
    cache = make_cache(config, 9)
    others = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=4)

    def ask(device=gpu, cache=cache, *, is_returned=False, is_assistant=False):
        return utils.DeferredStopCheck.is_supported(device, cache, is_returned, is_assistant=is_assistant)

    assert not ask()
    with gdn.patch_transformers():
        # outside of `generate`
        assert not ask()
        reset = generating._is_deferrable.set(True)
        assert ask()
        assert not ask(torch.device("cpu")) and not ask(is_returned=True) and not ask(is_assistant=True)
        assert not ask(cache=transformers.DynamicCache(config=config)) and not ask(cache=None)
        assert not ask(cache=transformers.StaticCache(config=others, max_cache_len=8))
        kept = utils.DeferredStopCheck.is_supported
        # Transformers' own devices
        assert ask(types.SimpleNamespace(type="mps"))
    assert not ask() and not kept(gpu, cache, False, is_assistant=False)
    generating._is_deferrable.reset(reset)


def path_after(length, path):
    """Return a prefix_allowed_tokens_fn that allows one text alone, and nothing after its end."""
    return lambda row, sentence: path[len(sentence) - length :][:1]


class Counter(transformers.LogitsProcessor, transformers.StoppingCriteria):
    """Count the steps, as a processor of logits or as a criterion."""

    def __init__(self):
        self.number = 0

    def __call__(self, ids, scores):
        self.number += 1
        return scores if scores is not None else torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("what", ["prefix", "processor", "criterion"])
def test_functions_of_the_caller_see_no_step_after_the_end(monkeypatch, what):
    """A function of prefixes allows no token after the end, and generate raises an error for it."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(generating, "QUEUES", ("cpu",))
    model, ids, counter = families.make_model("qwen3_5"), families.tokens(1, 10), Counter()
    end = int(generate(model, ids, eos_token_id=None)[0, 15])
    more = {
        "prefix": {"prefix_allowed_tokens_fn": path_after(10, [3, 5, end])},
        "processor": {"logits_processor": [counter]},
        "criterion": {"stopping_criteria": [counter]},
    }[what]
    with gdn.patch_transformers():
        text, steps = count_steps(model, lambda: generate(model, ids, eos_token_id=end, **more))
    if what == "prefix":
        assert text[0, 10:].tolist() == [3, 5, end]
    else:
        assert counter.number == text.shape[1] - 10
    assert steps == text.shape[1] - 10 and int(text[0, -1]) == end


def test_a_sampled_text_leaves_the_same_random_numbers(monkeypatch):
    """The next call under the same seed has the text that it has without a patch."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(generating, "QUEUES", ("cpu",))
    model, ids = families.make_model("qwen3_5"), families.tokens(1, 10)
    torch.manual_seed(1)
    end = int(generate(model, ids, eos_token_id=None, do_sample=True)[0, 14])

    def texts():
        torch.manual_seed(1)
        calls = [generate(model, ids, eos_token_id=end, do_sample=True) for _ in range(2)]
        return [x.tolist() for x in calls]

    with gdn.patch_transformers():
        patched = texts()
        monkeypatch.setattr(generating, "QUEUES", ())
        expected = texts()
    assert patched == expected and len(expected[0][0]) < 22


def test_a_check_on_another_device_than_the_current_one_is_not_deferred(monkeypatch):
    """Its event would be recorded on a stream of the current device, and the flag read before it is there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    reset = generating._is_deferrable.set(True)
    cache = make_cache(families.make_config("qwen3_5"), 9)
    with gdn.patch_transformers():
        found = [
            utils.DeferredStopCheck.is_supported(torch.device("cuda", i), cache, False, is_assistant=False)
            for i in range(3)
        ]
    generating._is_deferrable.reset(reset)
    assert found == [False, True, False]


def test_each_stream_has_its_positions(monkeypatch):
    """A stream may be far behind another one, which would read positions that are not written yet."""
    stream = types.SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    gpu = torch.device("cuda", 0)
    first = generating._stream_of(gpu)
    stream.cuda_stream = 2
    streams = first, generating._stream_of(gpu), generating._stream_of(torch.device("cpu"))
    assert streams == (1, 2, 0)
    one, same, other = (generating._positions(5, torch.device("cpu"), x) for x in (1, 1, 2))
    assert one is same and other is not one and torch.equal(one, other)


def test_another_check_is_left_as_it_is(monkeypatch):
    class Check:
        @staticmethod
        def is_supported(device, cache):
            return False

    monkeypatch.setattr(utils, "DeferredStopCheck", Check)
    original = Check.is_supported
    with gdn.patch_transformers():
        assert Check.is_supported is original
    monkeypatch.delattr(utils, "DeferredStopCheck")
    with gdn.patch_transformers():
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_deferred_checks_on_a_gpu(monkeypatch, graphs):
    model, ids = families.make_model("qwen3_5"), families.tokens(2, 10).cuda()
    model = type(model)(model.config).cuda().eval()
    more = {"disable_compile": not graphs}
    with gdn.patch_transformers(graphs=graphs):
        whole = generate(model, ids, eos_token_id=None, **more)[:, 10:]
        for end in (None, [int(whole[0, 4]), int(whole[1, 7])]):
            found = generate(model, ids, eos_token_id=end, **more)
            with monkeypatch.context() as undeferred:
                undeferred.setattr(generating, "QUEUES", ())
                assert torch.equal(found, generate(model, ids, eos_token_id=end, **more))
