"""Test gdn.patch_transformers(graphs=True), on a CPU with a stand-in for the recorder of graphs."""

import collections
import contextlib
import copy
import gc
import inspect
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

import test_transformers as families  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_branches as branches  # noqa: E402
from gdn.integrations import transformers_capture as capturing  # noqa: E402
from gdn.integrations import transformers_graphs as graphing  # noqa: E402
from gdn.integrations import transformers_modes as modes  # noqa: E402
from gdn.integrations import transformers_prompts as prompting  # noqa: E402
from gdn.integrations import transformers_recording as recording_steps  # noqa: E402

NEW = 9


class Recorder:
    """Stand for CUDA graphs: a replay runs the recorded step again, with what is in its inputs by then."""

    def __init__(self, monkeypatch, fails=False):
        self.num_graphs, self.num_replays, self.fails = 0, 0, fails
        self.spares, self.are_held = [], recording_steps.are_held
        monkeypatch.setattr(graphing, "DEVICES", ("cpu",))
        monkeypatch.setattr(capturing, "record", self.record)
        monkeypatch.setattr(recording_steps, "are_held", self.are_held_by_others)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def are_held_by_others(self, lists):
        """Drop the tensors that a recorded prompt has in its cache: a CUDA graph keeps no tensors."""
        for spare in filter(None, (x() for x in self.spares)):
            for holder, name in recording_steps.CacheState(spare).tensor_places:
                holder[name] = None
        return self.are_held(lists)

    def record(self, run, memory):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_graphs += 1
        variables = inspect.getclosurevars(run).nonlocals
        self.spares += [weakref.ref(variables["spare"])] if "spare" in variables else []
        output = transformers.modeling_outputs.CausalLMOutputWithPast()

        def replay():
            self.num_replays += 1
            output["logits"] = run().logits

        return replay, output


def options(**more):
    """Return the arguments of generate that make it ask for a compiled call, on a CPU too."""
    compile_config = transformers.CompileConfig()
    compile_config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": compile_config}
    greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return {**static, **greedy, **more}


def eager(model, ids, **more):
    """Return the tokens of steps that run as they are."""
    given = options(**more)
    del given["compile_config"]
    return model.generate(ids, disable_compile=True, **given)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_steps_are_replayed_with_the_same_tokens(monkeypatch, family):
    """One graph for each generate: two steps run as they are, the others replay the third."""
    recorder, model = Recorder(monkeypatch), families.make_model(family)
    with gdn.patch_transformers(graphs=True) as patch:
        assert "graphs=True" in repr(patch)
        for rows in (1, 3):
            ids = families.tokens(rows, 12, seed=rows)
            assert torch.equal(model.generate(ids, **options()), eager(model, ids))
            assert recorder.num_graphs == 1 and recorder.num_replays == NEW - 1 - graphing.EAGER_STEPS
            recorder.num_graphs = recorder.num_replays = 0
        padded = torch.ones(2, 12, dtype=torch.long)
        padded[1, :5] = 0
        ids = families.tokens(2, 12)
        more = {"attention_mask": padded, "output_scores": True, "return_dict_in_generate": True}
        one, other = model.generate(ids, **options(**more)), eager(model, ids, **more)
        assert torch.equal(one.sequences, other.sequences) and recorder.num_replays > 0
        assert all(torch.equal(x, y) for x, y in zip(one.scores, other.scores, strict=True))


@pytest.mark.parametrize(
    "more", [{"num_beams": 3}, {"output_hidden_states": True}, {"output_attentions": True}], ids=str
)
def test_what_a_graph_cannot_give_runs_as_it_is(monkeypatch, more):
    recorder, ids = Recorder(monkeypatch), families.tokens(2, 9)
    model = copy.deepcopy(families.make_model("qwen3_5"))
    model.set_attn_implementation("eager")
    more = {**more, "return_dict_in_generate": True}
    with gdn.patch_transformers(graphs=True):
        served = model.generate(ids, **options(**more)).sequences
        assert torch.equal(served, eager(model, ids, **more).sequences)
    assert recorder.num_graphs == 0


def test_hooks_training_and_other_models_get_the_compiled_call(monkeypatch):
    """A replay would skip hooks; a model without layers of a patched file is none of ours."""
    Recorder(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda call, **options: "compiled")
    model = copy.deepcopy(families.make_model("qwen3_5"))
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    with gdn.patch_transformers():
        assert model.get_compiled_call(None) == "compiled"
        with gdn.patch_transformers(graphs=True):
            call = model.get_compiled_call(None)
            assert isinstance(call, graphing.GraphedCall) and call is model.get_compiled_call(None)
            assert copy.deepcopy(model).get_compiled_call(None) is not call
            assert other.get_compiled_call(None) == "compiled"
            hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
            assert model.get_compiled_call(None) == "compiled"
            hook.remove()
            hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
            try:
                assert model.get_compiled_call(None) == "compiled"
            finally:
                hook.remove()
            model.model.layers[0].mlp._hf_hook = object()
            assert model.get_compiled_call(None) == "compiled"
            del model.model.layers[0].mlp._hf_hook
            assert model.get_compiled_call(None) is call
        assert model.get_compiled_call(None) == "compiled"
    ids, cache = families.tokens(1, 1), transformers.StaticCache(config=model.config, max_cache_len=16)
    inputs = {"input_ids": ids, families.CACHE: cache}
    with torch.no_grad():
        assert graphing.asks_for_logits(model, inputs) and graphing.is_static(cache)
        assert not graphing.is_static(transformers.DynamicCache(config=model.config))
        assert not graphing.asks_for_logits(model.train(), inputs)
        assert not graphing.asks_for_logits(model.eval(), {**inputs, "labels": ids})
        assert not graphing.asks_for_logits(model, {"input_ids": families.tokens(1, 2)})
    assert not graphing.asks_for_logits(model, inputs)


class Device:
    """Stand for a GPU whose context is entered, and note what a graph is captured on."""

    def __init__(self, monkeypatch):
        self.current, self.captures, self.handles = 0, [], iter(range(1, 99))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(capturing, "_new_stream", self.new_stream)
        monkeypatch.setattr(capturing, "_unused_streams", collections.defaultdict(list))
        monkeypatch.setattr(capturing, "_branch_streams", {})

    def new_stream(self, index):
        return types.SimpleNamespace(index=index, cuda_stream=next(self.handles))

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        self.captures.append((self.current, stream.index))
        yield


def test_a_graph_is_captured_on_the_device_of_the_model(monkeypatch):
    """The kernels of a model on a second GPU run beside a capture on the first, whose graph is empty."""
    device, model = Device(monkeypatch), families.make_model("qwen3_5")
    ids, call = types.SimpleNamespace(is_cuda=True), graphing.GraphedCall(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    recording = recording_steps.Recording("key", {}, cache, recording_steps.CacheState(cache))
    recording.inputs["input_ids"] = ids
    for index in (1, 0):
        ids.device = torch.device("cuda", index)
        recording.record(lambda inputs, cache: "output", call.memory_of(recording.device))
        assert recording.output == "output"
    assert device.captures == [(1, 1), (0, 0)] and device.current == 0


def streams_of(memory):
    """Return the handles of the streams on which PyTorch has workspaces for a capture."""
    branches_of = [capturing.branch_stream(memory.stream, number) for number in range(capturing.NUM_BRANCHES)]
    return {x.cuda_stream for x in (memory.stream, *branches_of)}


def test_graphs_of_two_models_have_no_workspace_in_common(monkeypatch):
    """PyTorch has one for each stream of a capture, in the pool of the graph that needed it first."""
    Device(monkeypatch)
    model, device = families.make_model("qwen3_5"), torch.device("cuda", 0)
    calls = [graphing.GraphedCall(model) for _ in range(2)]
    one, other = (call.memory_of(device) for call in calls)
    assert one is calls[0].memory_of(device) and one.pool != other.pool
    assert len(streams_of(one)) == len(streams_of(other)) == 1 + capturing.NUM_BRANCHES
    assert not streams_of(one) & streams_of(other)


def test_a_stream_serves_other_graphs_after_the_last_of_its_own(monkeypatch):
    """cuBLAS keeps a workspace for each stream; PyTorch 2.13 frees it with any graph of the stream."""
    Device(monkeypatch)
    memory = capturing.GraphMemory(0)
    streams, (replay, _) = streams_of(memory), capturing.record(lambda: None, memory)
    del memory
    second = capturing.GraphMemory(0)
    assert not streams & streams_of(second)
    replay()
    del replay
    assert streams_of(capturing.GraphMemory(0)) == streams
    assert not streams & streams_of(capturing.GraphMemory(1))


def test_a_memory_without_graphs_is_not_used_again(monkeypatch):
    """PyTorch refuses the handle of a pool whose last graph is gone. Its own GPU has then ended its work."""
    Device(monkeypatch)
    ended = []
    monkeypatch.setattr(torch.cuda, "synchronize", ended.append)
    call, device = graphing.GraphedCall(families.make_model("qwen3_5")), torch.device("cuda", 1)
    recording = types.SimpleNamespace(is_idle=False, device=device)
    call.recordings = {"key": [recording]}
    memory = call.memory_of(device)
    call._free_idle()
    assert call.memory_of(device) is memory
    recording.is_idle = True
    call._free_idle()
    assert call.recordings == {} and call.memory_of(device) is not memory
    assert ended == [1, 1]


@pytest.mark.parametrize("has_driver", [True, False])
def test_streams_of_captures_are_the_drivers(monkeypatch, has_driver):
    """`torch.cuda.Stream` returns one of 32 in turn, which a caller may have as well."""

    def create(handle, flags):
        handle._obj.value = 7
        assert flags == 1

    def load(name):
        if not has_driver:
            raise OSError(name)
        return types.SimpleNamespace(cuStreamCreate=create)

    monkeypatch.setattr(capturing.ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("external", handle, device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: ("of PyTorch", index))
    expected = ("external", 7, 1) if has_driver else ("of PyTorch", 1)
    assert capturing._new_stream(1) == expected


class Stream:
    """Stand for a CUDA stream, and note which streams it waits for."""

    def __init__(self, name):
        self.name, self.waits = name, []

    def wait_stream(self, other):
        self.waits.append(other.name)


def test_streams_of_one_model_wait_for_each_other(monkeypatch):
    """All graphs of a model share buffers, which a replay on another stream would overwrite."""
    one, other = Stream("one"), Stream("other")
    current = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    order = capturing.StreamOrder()
    for stream in (one, one, other, other, one):
        current[0] = stream
        order.enter(torch.device("cuda", 0))
        order.enter(torch.device("cpu"))
    assert other.waits == ["one"] and one.waits == ["other"]


def test_a_cache_waits_for_the_stream_of_the_one_before(monkeypatch):
    """The caller may have queued work on the cache that is gone after another cache's call."""
    Recorder(monkeypatch)
    streams = {name: Stream(name) for name in ("first", "second", "third")}
    current = ["first"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    enter = capturing.StreamOrder.enter
    monkeypatch.setattr(
        capturing.StreamOrder, "enter", lambda self, device: enter(self, torch.device("cuda", 0))
    )
    model, ids = copy.deepcopy(families.make_model("qwen3_5")), families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = {}
        for current[0] in ("first", "second"):
            steps[current[0]] = Steps(model, ids)
            for _ in range(3):
                steps[current[0]]()
        del steps["first"]
        gc.collect()
        current[0] = "third"
        third = Steps(model, ids)
        third()
        assert streams["third"].waits == ["second", "first"]
        assert [x.owner.stream.name for x in recordings(model)] == ["third", "second"]


def test_steps_and_prompts_enter_the_order_of_streams(monkeypatch):
    Recorder(monkeypatch)
    entered, model, ids = [], copy.deepcopy(families.make_model("qwen3_5")), families.tokens(2, 12)
    monkeypatch.setattr(capturing.StreamOrder, "enter", lambda self, device: entered.append(device))
    with gdn.patch_transformers(graphs=True):
        for number in range(4):
            model.generate(ids, **options())
            # the third prompt is recorded, the fourth a replay
            assert len(entered) == NEW - 1 + (number > 1), number
            entered.clear()
            gc.collect()


@contextlib.contextmanager
def flag(owner, name, value):
    """Set an attribute of a module of PyTorch."""
    before = getattr(owner, name)
    assert before != value
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def setting(getter, setter, value):
    before = getter()
    assert before != value
    setter(value)
    try:
        yield
    finally:
        setter(before)


CUDA, CUDNN, MATMUL = torch.backends.cuda, torch.backends.cudnn, torch.backends.cuda.matmul


@contextlib.contextmanager
def matmul_precision(value):
    """Set what `torch.set_float32_matmul_precision` sets, which a second call of it would not restore."""
    owners = MATMUL, torch.backends.mkldnn.matmul
    kept, before = [owner.fp32_precision for owner in owners], torch.get_float32_matmul_precision()
    try:
        with setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value):
            yield
    finally:
        for owner, precision in zip(owners, kept, strict=True):
            owner.fp32_precision = precision
        assert torch.get_float32_matmul_precision() == before


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "deterministic algorithms": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "device": lambda: torch.device("meta"),
    "tf32": lambda: flag(MATMUL, "fp32_precision", "tf32"),
    "tf32 by another name": lambda: matmul_precision("high"),
    "sums in bf16": lambda: flag(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "sums in fp16": lambda: flag(MATMUL, "allow_fp16_reduced_precision_reduction", False),
    "accumulators in fp16": lambda: flag(MATMUL, "allow_fp16_accumulation", True),
    # PyTorch for a CPU has one only
    "the library of matmuls": lambda: mock.patch.object(
        torch._C, "_get_blas_preferred_backend", lambda: "other"
    ),
    "cuDNN": lambda: flag(CUDNN, "enabled", False),
    "cuDNN, deterministic": lambda: flag(CUDNN, "deterministic", True),
    "cuDNN, benchmark": lambda: flag(CUDNN, "benchmark", True),
    "tf32 of convolutions": lambda: flag(CUDNN.conv, "fp32_precision", "ieee"),
    "kernels of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "their order": lambda: torch.nn.attention.sdpa_kernel(
        [
            torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.MATH,
            torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
        ],
        set_priority=True,
    ),
    "sums of attention": lambda: setting(
        CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MODES)
def test_modes_and_flags_have_graphs_of_their_own(what):
    before = modes.key_of_modes("cpu")
    with MODES[what]():
        assert modes.key_of_modes("cpu") != before
    assert modes.key_of_modes("cpu") == before


@pytest.mark.parametrize("name", ["GDN_BACKEND", "GDN_DEBUG", "GDN_SEGMENTS"])
def test_settings_of_gdn_have_graphs_of_their_own(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = modes.key_of_modes("cpu")
    monkeypatch.setenv(name, {"GDN_BACKEND": "eager", "GDN_DEBUG": "1", "GDN_SEGMENTS": "0"}[name])
    assert modes.key_of_modes("cpu") != before


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Operators, lambda: torch.device("cpu")])
def test_a_mode_that_sees_functions_or_operators_gets_no_replay(monkeypatch, mode):
    """A counter of operators, a profiler of modules: a replay would hide the step from them."""
    recorder, model = Recorder(monkeypatch), families.make_model("qwen3_5")
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, families.tokens(2, 20))
        for _ in range(4):
            steps()
        replays = recorder.num_replays
        with mode():
            steps()
            # the mode of a default device sees nothing; its steps have another key
            num_keys = len(graphing._calls[model].eager_steps)
            assert recorder.num_replays == replays and num_keys == 1 + (mode not in (Functions, Operators))
        steps()
        assert recorder.num_replays == replays + 1


def test_a_step_that_cannot_be_recorded_runs_as_it_is(monkeypatch):
    recorder, ids = Recorder(monkeypatch, fails=True), families.tokens(2, 9)
    model = families.make_model("qwen3_5")
    with gdn.patch_transformers(graphs=True):
        with pytest.warns(RuntimeWarning, match="runs without a graph: operation not permitted") as caught:
            text = model.generate(ids, **options())
        assert torch.equal(text, eager(model, ids)) and len(caught) == 1
    assert recorder.num_replays == 0


class Steps:
    """Decode token by token through the compiled call of a patched model, with a cache of one's own."""

    def __init__(self, model, ids, start=6, length=32):
        self.model, self.ids, self.at = model, ids, start
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        model(ids[:, :start], **{families.CACHE: self.cache})

    def __call__(self, **more):
        """Return the logits of the next token."""
        rows, given = self.ids.shape[0], {families.CACHE: self.cache, **more}
        given["position_ids"] = torch.full((rows, 1), self.at, device=self.ids.device)
        given["input_ids"] = self.ids[:, self.at : self.at + 1]
        self.at += 1
        output = self.model.get_compiled_call(None)(**given)
        assert output[families.CACHE] is self.cache
        return output.logits


def recordings(model):
    return [x for found in graphing._calls[model].recordings.values() for x in found]


def whole(model, ids):
    return model(ids, use_cache=False).logits


def test_a_graph_serves_the_next_cache(monkeypatch):
    """The graph of a cache that is gone serves the next from its first step; a live cache keeps its own."""
    recorder, model = Recorder(monkeypatch), families.make_model("qwen3_5")
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        first = Steps(model, ids)
        logits = torch.cat([first() for _ in range(6)], 1)
        assert families.error(logits, whole(model, ids)[:, 6:12]) <= 2e-5
        assert recorder.num_graphs == 1 and recorder.num_replays == 4

        # the first cache is alive: another one has a graph of its own
        other_ids = families.tokens(2, 20, seed=1)
        other = Steps(model, other_ids)
        logits = torch.cat([other() for _ in range(6)], 1)
        assert families.error(logits, whole(model, other_ids)[:, 6:12]) <= 2e-5
        assert recorder.num_graphs == 2 and recorder.num_replays == 4 + 6

        end = weakref.ref(first.cache)
        del first
        gc.collect()
        assert end() is None
        third_ids = families.tokens(2, 20, seed=2)
        third = Steps(model, third_ids)
        logits = torch.cat([third(), other(), third()], 1)[:, ::2]
        assert families.error(logits, whole(model, third_ids)[:, 6:8]) <= 2e-5
        assert recorder.num_graphs == 2 and recorder.num_replays == 4 + 6 + 3
        assert len(recordings(model)) == 2
    assert len(graphing._calls) == 0


def test_layers_without_their_cache_keep_their_contents(monkeypatch):
    """The tensors of a cache are the graph's own: another cache may have them when no layer is left."""
    Recorder(monkeypatch)
    model, ids = families.make_model("qwen3_5"), families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        first = Steps(model, ids)
        for _ in range(4):
            first()
        layers = first.cache.layers
        kept = next(x for x in layers if hasattr(x, "keys"))
        before = kept.keys.clone()
        del first, layers
        gc.collect()
        second = Steps(model, ids.flip(1))
        second()
        assert torch.equal(kept.keys, before) and len(recordings(model)) == 2
        del kept
        gc.collect()
        assert [x.is_idle for x in recordings(model)] == [True, False]


KEPT = {
    "a tensor": lambda layer: next(iter(layer.recurrent_states.values())),
    "a dictionary": lambda layer: layer.recurrent_states,
    "a view": lambda layer: next(iter(layer.recurrent_states.values()))[0, 1:],
    "a detached tensor": lambda layer: next(iter(layer.recurrent_states.values())).detach(),
    "a storage": lambda layer: next(iter(layer.recurrent_states.values())).untyped_storage(),
    "an array of another library": lambda layer: np.from_dlpack(next(iter(layer.recurrent_states.values()))),
}


def contents_of(kept):
    """Return a copy of what a caller has kept."""
    kept = next(iter(kept.values())) if isinstance(kept, dict) else kept
    return kept.tolist() if isinstance(kept, torch.UntypedStorage | np.ndarray) else kept.clone().tolist()


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("with_prompts", [True, False])
def test_tensors_that_their_caller_keeps_are_not_written(monkeypatch, what, with_prompts):
    """Neither by the decode steps of the next cache nor by its prompt."""
    Recorder(monkeypatch)
    if not with_prompts:
        monkeypatch.setattr(prompting, "MOST_TOKENS", 0)
    model = copy.deepcopy(families.make_model("qwen3_5"))
    more = {"return_dict_in_generate": True}
    with gdn.patch_transformers(graphs=True):
        for seed in range(4):
            output = model.generate(families.tokens(2, 12, seed=seed), **options(**more))
            layer = next(x for x in output[families.CACHE].layers if hasattr(x, "recurrent_states"))
            kept = KEPT[what](layer) if seed == 3 else None
            del output, layer
            gc.collect()
        assert [x.is_idle for x in recordings(model)] == [False]
        before = contents_of(kept)
        for seed in range(4, 7):
            model.generate(families.tokens(2, 12, seed=seed), **options(**more))
            gc.collect()
        assert contents_of(kept) == before
        assert [x.is_idle for x in recordings(model)] == [False, True]
        del kept
        assert [x.is_idle for x in recordings(model)] == [True, True]


def test_two_caches_that_have_the_same_layers_have_one_owner(monkeypatch):
    """Two later caches must not get the tensors of these layers at a time."""
    Recorder(monkeypatch)
    model, ids = copy.deepcopy(families.make_model("qwen3_5")), families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, ids)
        for _ in range(3):
            steps()
        other = copy.copy(steps.cache)
        steps.cache = other
        gc.collect()
        # a live cache with other arguments is recorded again
        for _ in range(3):
            steps(use_cache=True)
        one, second = recordings(model)
        assert one.owner is second.owner and one.owner.cache() is other
        del steps, other
        gc.collect()
        assert one.is_idle and second.is_idle


def test_two_live_caches_of_the_same_layers_share_a_graph(monkeypatch):
    """Steps of either in turn are not recorded again, whichever had the graph first."""
    recorder = Recorder(monkeypatch)
    model, ids = copy.deepcopy(families.make_model("qwen3_5")), families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, ids)
        for _ in range(3):
            steps()
        first, graphs = steps.cache, recorder.num_graphs
        other = copy.copy(first)
        for cache in (other, first) * 3:
            steps.cache = cache
            steps()
        assert recorder.num_graphs == graphs == 1


def test_each_generate_of_a_kind_replays_one_graph(monkeypatch):
    recorder, model = Recorder(monkeypatch), copy.deepcopy(families.make_model("qwen3_5"))
    # the graphs of steps alone
    monkeypatch.setattr(prompting, "MOST_TOKENS", 0)
    # generate makes no shorter cache than it made before
    vars(model).pop("_previous_max_cache_length", None)
    with gdn.patch_transformers(graphs=True):
        for seed in range(3):
            ids = families.tokens(2, 12, seed=seed)
            assert torch.equal(model.generate(ids, **options()), eager(model, ids))
            gc.collect()
        assert recorder.num_graphs == 1
        assert recorder.num_replays == 3 * (NEW - 1) - graphing.EAGER_STEPS
        # another kind frees the graph, whose cache is gone
        model.generate(families.tokens(2, 13), **options())
        assert recorder.num_graphs == 2 and len(recordings(model)) == 1


@pytest.mark.parametrize("what", ["a weight", "an attribute", "a dictionary", "attention", "a forward"])
def test_a_changed_model_is_recorded_again(monkeypatch, what):
    """A replay has the addresses of the weights, and what Python decided, at the time of its recording."""
    recorder, ids = Recorder(monkeypatch), families.tokens(2, 12)
    model = copy.deepcopy(families.make_model("qwen3_5"))
    head = model.lm_head
    head.scales = {"default": 1.0}
    with gdn.patch_transformers(graphs=True):
        model.generate(ids, **options())
        if what == "a weight":
            head.weight = torch.nn.Parameter(-head.weight.detach())
        elif what == "an attribute":
            head.scale = 2.0
        elif what == "a dictionary":
            head.scales["default"] = 2.0
        elif what == "attention":
            model.set_attn_implementation("eager")
        else:
            monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: -x @ self.weight.mT)
        assert torch.equal(model.generate(ids, **options()), eager(model, ids))
    assert recorder.num_graphs == 2


def test_a_graph_makes_its_own_copies_of_weights_under_autocast(monkeypatch):
    """Autocast keeps its copies of fp32 weights until its `with` block ends, and frees what a graph reads."""
    recorder, ids = Recorder(monkeypatch), families.tokens(2, 12)
    model = copy.deepcopy(families.make_model("qwen3_5"))
    kept, forward = [], torch.nn.Linear.forward

    def note(self, x):
        kept.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return forward(self, x)

    def record(run, memory):
        monkeypatch.setattr(torch.nn.Linear, "forward", note)
        return recorder.record(run, memory)

    monkeypatch.setattr(capturing, "record", record)
    with gdn.patch_transformers(graphs=True), torch.autocast("cpu", torch.bfloat16):
        text = model.generate(ids, **options())
        assert recorder.num_replays > 0 and set(kept) == {(True, False)}
        assert torch.is_autocast_cache_enabled() and torch.equal(text, eager(model, ids))


def test_a_live_cache_sees_a_changed_model(monkeypatch):
    """A conversation goes on with its cache, and other weights or settings than its graph has."""
    recorder, model = Recorder(monkeypatch), copy.deepcopy(families.make_model("qwen3_5"))
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, ids)
        for _ in range(4):
            steps()
        before, replays = model.lm_head.weight, recorder.num_replays
        assert replays == 2
        model.lm_head.weight = torch.nn.Parameter(-before.detach())
        steps()
        assert recorder.num_replays == replays
        model.lm_head.weight = before
        steps()
        assert recorder.num_replays == replays + 1
        monkeypatch.setenv("GDN_BACKEND", "eager")
        steps()
        assert recorder.num_replays == replays + 1


def test_a_cache_with_other_tensors_or_values_is_not_replayed(monkeypatch):
    """reorder_cache replaces tensors, and a layer of a sliding window counts tokens in Python."""
    recorder, model = Recorder(monkeypatch), families.make_model("qwen3_5")
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, ids)
        for _ in range(4):
            steps()
        replays = recorder.num_replays
        assert replays == 2
        steps.cache.reorder_cache(torch.tensor([1, 0]))
        steps.ids = ids.flip(0)
        assert families.error(steps(), whole(model, ids)[:, 10:11].flip(0)) <= 2e-5
        assert recorder.num_graphs == 2 and recorder.num_replays == replays + 1

        for change in (1, torch.zeros(1)):
            # an int: no two steps are of one kind; a new tensor: a replay would leave the recorded one
            changing = Steps(model, ids, length=33)
            layer = next(x for x in changing.cache.layers if hasattr(x, "keys"))
            layer.change, update = change, layer.update

            def update_and_change(*args, layer=layer, update=update, **kwargs):
                layer.change = layer.change + 1
                return update(*args, **kwargs)

            layer.update, before = update_and_change, recorder.num_replays
            logits = torch.cat([changing() for _ in range(6)], 1)
            assert families.error(logits, whole(model, ids)[:, 6:12]) <= 2e-5
            assert recorder.num_replays == before + isinstance(change, torch.Tensor)
            assert not any(x.owner.cache() is changing.cache for x in recordings(model))


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_cache_that_keeps_its_past_or_grows_is_not_recorded(monkeypatch, has_graph):
    recorder, model = Recorder(monkeypatch), families.make_model("qwen3_5")
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, ids)
        if has_graph:
            for _ in range(4):
                steps()
            steps.cache.activate_past_recording()
        else:
            steps.cache = transformers.DynamicCache(config=model.config)
            model(ids[:, :6], **{families.CACHE: steps.cache})
        call, graphs, replays = model.get_compiled_call(None), recorder.num_graphs, recorder.num_replays
        kinds = dict(call.eager_steps)
        for _ in range(5):
            steps()
        assert call.eager_steps == kinds
        assert (recorder.num_graphs, recorder.num_replays) == (graphs, replays)
        assert graphs == has_graph


def test_a_recording_depends_on_all_inputs_but_the_contents_of_tensors():
    def key(**given):
        tensors, others = [], []
        assert recording_steps.describe(given, tensors, others)
        copies = []
        recording_steps.clone(given, copies)
        assert all(torch.equal(x, y) and x is not y for x, y in zip(tensors, copies, strict=True))
        return tuple(others)

    x, wide = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)
    assert key(x=x, mask={"a": x, "b": None}) == key(x=x + 1, mask={"a": x + 1, "b": None})
    different = [
        key(x=x), key(y=x), key(x=wide), key(x=x.int()), key(x={"x": x}), key(x={}), key(x=None), key(x=1),
        key(x=True), key(x=1.0), key(x="1"), key(x=2), key(x=x, y=1), key(y=1, x=x), key(x={}, y=x),
        key(x={"y": x}),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_caches_do_not_share_the_tensors_of_one_that_is_gone(monkeypatch):
    """Two recordings of one cache have its tensors: no two later caches may get them at a time."""
    recorder, model = Recorder(monkeypatch), copy.deepcopy(families.make_model("qwen3_5"))
    ids = families.tokens(2, 20)
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, ids)
        for backend in ("eager", ""):
            monkeypatch.setenv("GDN_BACKEND", backend)
            for _ in range(3):
                steps()
        assert recorder.num_graphs == 2
        del steps
        gc.collect()
        one, other = Steps(model, ids), Steps(model, ids.flip(1))
        one()
        state = recording_steps.CacheState(one.cache)
        before = [x.clone() for x in state.tensors()]
        monkeypatch.setenv("GDN_BACKEND", "eager")
        other()
        assert all(map(torch.equal, state.tensors(), before))
        # the first cache has both graphs
        replays = recorder.num_replays
        one()
        assert recorder.num_replays == replays + 1


def test_two_threads_do_not_take_one_graph(monkeypatch):
    """Both find the graph of a cache that is gone."""
    recorder, model = Recorder(monkeypatch), families.make_model("qwen3_5")
    adopt = recording_steps.Recording.adopt

    def adopt_slowly(*given):
        time.sleep(0.3)
        adopt(*given)

    monkeypatch.setattr(recording_steps.Recording, "adopt", adopt_slowly)
    with gdn.patch_transformers(graphs=True):
        model.generate(families.tokens(2, 12), **options())
        gc.collect()
        prompts = [families.tokens(2, 12, seed=seed) for seed in (1, 2)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda ids: model.generate(ids, **options()), prompts))
        for ids, text in zip(prompts, found, strict=True):
            assert torch.equal(text, eager(model, ids))
        assert recorder.num_graphs == 2


def test_a_recording_of_another_thread_does_not_send_a_model_to_the_compiler(monkeypatch):
    """While a step is recorded, linear layers have forwards of their own: such a model gets no graph."""
    recorder, model = Recorder(monkeypatch), copy.deepcopy(families.make_model("qwen3_5"))
    monkeypatch.setattr(torch, "compile", lambda call, **options: "compiled")
    asked = []

    def record(run, memory):
        with branches.with_branches(model):
            asked.append(pool.submit(model.get_compiled_call, None))
            time.sleep(0.3)
        return recorder.record(run, memory)

    monkeypatch.setattr(capturing, "record", record)
    with gdn.patch_transformers(graphs=True), ThreadPoolExecutor(1) as pool:
        model.generate(families.tokens(2, 12), **options())
        assert [x.result() for x in asked] == [graphing._calls[model]]


def test_another_choice_of_packing_frees_the_graphs(monkeypatch):
    """A replay has the prompt's layers as they were recorded, and looks for no documents."""
    Recorder(monkeypatch)
    model = copy.deepcopy(families.make_model("qwen3_5"))
    with gdn.patch_transformers(graphs=True):
        model.generate(families.tokens(2, 12), **options())
        with gdn.patch_transformers():
            assert len(recordings(model)) == 1
        with gdn.patch_transformers(infer_packing=True):
            assert len(graphing._calls) == 0
            model.generate(families.tokens(2, 12), **options())
        assert len(graphing._calls) == 0


def test_the_kind_of_a_cache_has_its_classes_and_shared_memory():
    """Buffers of two layers serve neither layers that share one nor layers of another class."""

    class Layer:
        def __init__(self, keys):
            self.keys = keys

    class Other(Layer):
        pass

    def key(*layers):
        return recording_steps.CacheState(types.SimpleNamespace(layers=layers)).key()

    def new():
        return torch.zeros(2, 3)

    one, both = new(), torch.zeros(4, 3)
    apart = key(Layer(new()), Layer(new()))
    assert apart == key(Layer(new()), Layer(new())) and apart != key(Layer(one), Layer(one))
    assert apart != key(Layer(new()), Other(new()))
    assert apart != key(Layer(both[:2]), Layer(both[2:])) != key(Layer(both[:2]), Layer(both[1:3]))


def test_inputs_that_are_objects_are_not_recorded(monkeypatch):
    """Two masks of flex attention have one text, and other contents."""

    class Mask:
        def __repr__(self):
            return "Mask(shape=(2, 1, 1, 32))"

    recorder, model = Recorder(monkeypatch), families.make_model("qwen3_5")
    with gdn.patch_transformers(graphs=True), torch.no_grad():
        steps = Steps(model, families.tokens(2, 20))
        for _ in range(4):
            steps(mask=Mask())
    assert recorder.num_graphs == 0


def test_options_are_checked():
    with pytest.raises(TypeError, match="graphs: expected a bool, got int"):
        gdn.patch_transformers(graphs=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_has_the_bits_of_eager_steps(monkeypatch, family, dtype):
    model, ids = copy.deepcopy(families.make_model(family)).to("cuda", dtype), families.tokens(2, 12).cuda()
    counted, make = [], branches.branch_stream
    monkeypatch.setattr(branches, "branch_stream", lambda stream, n: counted.append(n) or make(stream, n))
    more = {"output_logits": True, "return_dict_in_generate": True}
    given = options(**more)
    del given["compile_config"]
    with gdn.patch_transformers(graphs=True):
        for _ in range(2):
            one, other = model.generate(ids, **given), eager(model, ids, **more)
            assert torch.equal(one.sequences, other.sequences)
            assert all(torch.equal(x, y) for x, y in zip(one.logits, other.logits, strict=True))
            # the next generate finds the graph of a cache that is gone
            del one, other
            gc.collect()
        assert len(recordings(model)) == 1
    # recorded once; a branch is asked for at its begin and at its end
    names = [name.split(".")[-1] for name, _ in model.named_modules()]
    beside = ("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_ba", "k_proj", "v_proj", "up_proj")
    assert len(counted) == 2 * sum(names.count(name) for name in beside) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_models_replay_on_two_streams_at_once():
    """Matmuls of few rows and many columns sum in cuBLAS's workspace, which the graphs must not share."""
    config = families.make_config("qwen3_5")
    config.hidden_size, config.intermediate_size = 1024, 8192
    make = transformers.AutoModelForCausalLM.from_config
    models = [make(config).eval().to("cuda", torch.bfloat16) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in models]
    ids = [families.tokens(2, 12, seed=seed).cuda() for seed in range(2)]
    more = {"output_logits": True, "return_dict_in_generate": True}
    given = options(**more)
    del given["compile_config"]

    def generate(number, count):
        found = []
        with torch.cuda.stream(streams[number]):
            for _ in range(count):
                output = models[number].generate(ids[number], **given)
                found.append(torch.stack(output.logits))
                # the next generate finds the graph of a cache that is gone
                del output
                gc.collect()
        streams[number].synchronize()
        return found

    with gdn.patch_transformers(graphs=True):
        expected = [torch.stack(eager(*x, **more).logits) for x in zip(models, ids, strict=True)]
        torch.cuda.synchronize()
        for number in range(2):
            # in one thread, which has one cuBLAS handle
            generate(number, 4)
        one, other = (streams_of(*graphing._calls[model].memories.values()) for model in models)
        assert not one & other
        graphs = [len(recordings(model)) for model in models]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(generate, range(2), (20, 20)))
        for found, logits in zip(results, expected, strict=True):
            assert all(torch.equal(x, logits) for x in found)
        assert graphs == [1, 1] == [len(recordings(model)) for model in models]
        # what one model's graphs have must not go with the other's
        del graphing._calls[models[0]]
        gc.collect()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(64)]
        assert all(torch.equal(x, expected[1]) for x in generate(1, 4)) and len(others) == 64
