"""Test that the kernels of a first prompt and of its first step are compiled together, without a GPU."""

import copy
import threading
import types

import pytest
import torch

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

import test_transformers as families  # noqa: E402
from conftest import INTERPRETED  # noqa: E402
from kit.compiling import TARGETS, recording  # noqa: E402
from test_transformers_graphs import Recorder, options  # noqa: E402

import gdn  # noqa: E402
from gdn.backends.triton import launch  # noqa: E402
from gdn.backends.triton.launch import Launch, launches, precompile  # noqa: E402
from gdn.integrations import transformers_compile as compiling  # noqa: E402
from gdn.integrations import transformers_graphs as graphing  # noqa: E402
from gdn.ops import fastpath  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")


@pytest.fixture
def compiled(monkeypatch):
    """Return lists of what was compiled at once, and of what was left to the background."""
    steps, ahead = [], []
    monkeypatch.setattr(compiling, "DEVICES", ("cpu",))
    monkeypatch.setattr(launches, "compile_now", lambda device, some: steps.append(some))
    monkeypatch.setattr(precompile, "compile_ahead", lambda *given: ahead.append(given))
    return steps, ahead


def model_of(forward):
    model = torch.nn.Module()
    model.forward = forward
    return model


def test_a_prompt_and_a_step_are_compiled_at_once_before_the_first_prompt(monkeypatch, compiled):
    """Each kernel once; the run that records has a cache of its own."""
    Recorder(monkeypatch)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    model, ids = copy.deepcopy(families.make_model("qwen3_5")).bfloat16(), families.tokens(2, 12)
    steps, _ = compiled
    with gdn.patch_transformers(graphs=True), recording(TARGETS["cuda:90"].machine) as run:
        for number in range(2):
            model.generate(ids, **options(max_new_tokens=2, min_new_tokens=2))
            assert len(steps) == 1
            # launches of the recording run are not among those of `generate`
            assert [len(run) > 0, graphing._calls[model].is_new] == [True, False], number
    (some,) = steps
    keys = [one.binary_key(tensors) for one, tensors in some]
    assert len(set(keys)) == len(keys) > 0
    names = {one.kernel.__name__ for one, _ in some}
    assert {"_conv_kernel", "_update_kernel", "decode_kernel"} < names and len(names) > 4
    assert names == {one.kernel.__name__ for one, _ in run}
    # no memory is kept
    given = [x for _, tensors in some for x in tensors if isinstance(x, torch.Tensor)]
    assert all(x.device.type == "meta" for x in given)


def test_a_run_that_fails_leaves_the_prompt_as_it_is(monkeypatch, compiled, failures):
    Recorder(monkeypatch)
    model, ids = copy.deepcopy(families.make_model("qwen3_5")), families.tokens(2, 12)
    expected = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    monkeypatch.setattr(compiling, "step_inputs", lambda inputs: {"input_ids": None})
    # it is logged: a fault of gdn would switch the run off unseen
    with gdn.patch_transformers(graphs=True), failures.expects("the recorded run of a model failed"):
        assert torch.equal(model.generate(ids, **options(max_new_tokens=3, min_new_tokens=3)), expected)
    # on a CPU nothing needs a compiler
    assert compiled == ([], [])


def test_the_recording_run_leaves_the_model_and_random_numbers_as_they_are(compiled):
    """A model that counts its calls and draws numbers counts and draws those of `generate` alone."""
    seen = []

    def run(**inputs):
        model.count += 1
        model.last = seen.append(torch.rand(1))
        if len(seen) == 3:
            raise KeyboardInterrupt

    model = model_of(run)
    model.count = 0
    own, given = dict(vars(model)), {"input_ids": torch.zeros(1, 9), "cache": None}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    compiling.compile_together(model, given, "cache")
    with pytest.raises(KeyboardInterrupt):
        compiling.compile_together(model, given, "cache")
    assert len(seen) == 3 and vars(model) == own
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_of_the_recording_run_are_not_repeated(compiled):
    """A recorded launch cannot be repeated: later calls would be checked each time."""
    kinds = {"none": (None, None), "a launch": (print, None), "the rule": (None, "triton")}

    def store(**inputs):
        for name, (run, backward) in kinds.items():
            fastpath.store(name, types.SimpleNamespace(launch=run, backward=backward))
        assert "none" in fastpath._calls

    before = dict(fastpath._calls)
    try:
        compiling.compile_together(model_of(store), {"input_ids": torch.zeros(1, 9), "cache": None}, "cache")
        assert fastpath._calls.keys() - before.keys() == {"a launch", "the rule"}
    finally:
        for name in kinds:
            fastpath._calls.pop(name, None)


def test_what_other_sizes_need_is_compiled_ahead_after_the_recording_run(compiled):
    _, ahead = compiled
    given = torch.device("cuda"), "a kind", list

    def plan(**inputs):
        launch.compile_ahead(*given)
        assert not ahead

    compiling.compile_together(model_of(plan), {"input_ids": torch.zeros(1, 9), "cache": None}, "cache")
    # of the prompt and of the step
    assert ahead == [given, given]


def test_long_prompts_and_other_devices_are_not_run_once_more(monkeypatch, compiled):
    runs = []

    def run(tokens):
        given = {"input_ids": torch.zeros(1, tokens), "cache": None}
        compiling.compile_together(model_of(lambda **inputs: runs.append(inputs)), given, "cache")
        return len(runs)

    assert run(compiling.MOST_TOKENS + 1) == 0 and run(compiling.MOST_TOKENS) == 2
    monkeypatch.setattr(compiling, "DEVICES", ("cuda",))
    assert run(9) == 2


def test_a_recording_is_of_its_own_thread(monkeypatch):
    """Launches of another thread run meanwhile."""
    ran, one = [], Launch(None, 1, (), {}, 1)
    monkeypatch.setattr(Launch, "_launch_first", lambda self, tensors: ran.append(threading.get_ident()))
    with launch.record_launches([]) as noted:
        other = threading.Thread(target=lambda: [one(), ran.append(launch.is_recording())])
        other.start()
        other.join()
        assert ran == [other.ident, False] and noted == [] and launch.is_recording()
        one()
        with launch.record_launches([]) as inner:
            one()
        one()
        assert len(ran) == 2 and len(noted) == 2 and len(inner) == 1
    assert not launch.is_recording()


def test_what_other_sizes_need_is_left_to_the_background_after_a_recording(monkeypatch):
    device = torch.device("cuda")
    needed = compiling.Needed(launches.stand_in)
    with launch.record_launches(needed):
        launch.compile_ahead(device, "a kind", list)
    assert needed.ahead == [(device, "a kind", list)]
    assert (device, "a kind") not in precompile._compiled_kinds
    with launch.record_launches([]):
        launch.compile_ahead(device, "a kind", list)
