"""Test which matmuls of a recorded decode step are branches of its graph, with a stand-in for streams."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import test_transformers as families  # noqa: E402

import gdn  # noqa: E402
from gdn.integrations import transformers_branches as branches  # noqa: E402
from gdn.integrations import transformers_step as stepping  # noqa: E402


class Stream:
    """Stand for a CUDA stream: write to a log who waits for whom, and which functions run on it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.log.append(f"to {self.name}")

    def __exit__(self, *error):
        self.log.append("back")


@pytest.fixture
def log(monkeypatch):
    """Capture, as far as `in_parallel` can tell; return what the streams do."""
    log = []
    streams = {name: Stream(name, log) for name in ("main", 0, 1, 2)}
    monkeypatch.setattr(branches, "branch_stream", lambda stream, number: streams[number])
    monkeypatch.setattr(branches, "is_captured", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["main"])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return log


def in_branches(first, *others):
    """Return what streams do for a group: each branch begins behind main, which waits for all of them."""
    begun = [[f"{n} waits for main", f"to {n}", name, "back"] for n, name in enumerate(others)]
    return [*sum(begun, []), first, *(f"main waits for {n}" for n in range(len(others)))]


PROJECTIONS = {
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba"],
}


def decode_a_token(model, ids):
    """Return the logits of one token after a prompt, with the step's linear layers in branches."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :6], **{families.CACHE: cache})
    with branches.with_branches(model):
        return model(ids[:, 6:7], **{families.CACHE: cache}).logits


@pytest.mark.parametrize("family", PROJECTIONS)
def test_projections_of_one_tensor_are_branches_of_a_captured_step(monkeypatch, log, family):
    model, ids = families.make_model(family), families.tokens(2, 20)
    names = {module: name.split(".")[-1] for name, module in model.named_modules()}
    linear, forward = stepping._linear, nn.Linear.forward
    monkeypatch.setattr(stepping, "_linear", lambda part, x: log.append(names[part]) or linear(part, x))
    monkeypatch.setattr(nn.Linear, "forward", lambda part, x: log.append(names[part]) or forward(part, x))
    with gdn.patch_transformers(), torch.no_grad():
        monkeypatch.setattr(branches, "is_captured", lambda device: False)
        plain = decode_a_token(model, ids)
        assert not any("waits" in line for line in log)
        monkeypatch.setattr(branches, "is_captured", lambda device: True)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(ids[:, :6], **{families.CACHE: cache})
        log.clear()
        with branches.with_branches(model):
            logits = model(ids[:, 6:7], **{families.CACHE: cache}).logits
    assert torch.equal(plain, logits)
    text = " ".join(map(str, log))
    groups = (PROJECTIONS[family], ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"])
    for first, *others in groups:
        count = sum(name == first for name in names.values())
        assert count > 0
        assert text.count(" ".join(in_branches(first, *others))) == count == log.count(first), first
        assert all(log.count(name) == count for name in others)
    assert not any("forward" in vars(module) for module in model.modules())


class Pair(nn.Module):
    """Hold a group; its forward may apply the second layer to another tensor."""

    def __init__(self, width=4):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 3), nn.Linear(width, 3)

    def forward(self, x, y):
        return self.gate_proj(x), self.up_proj(y)


def test_a_group_is_one_of_a_tensor(log):
    """Return the layer's own result for another tensor, in another thread, and in a second call."""
    pair, x, y = Pair(), torch.randn(2, 4), torch.randn(2, 4)
    expected = [pair.gate_proj(x), pair.up_proj(x), pair.up_proj(y)]
    with branches.with_branches(pair), ThreadPoolExecutor(1) as pool:
        assert all(map(torch.equal, pair(x, y), (expected[0], expected[2])))
        pair.gate_proj(x)
        log.clear()
        there = pool.submit(pair, y, y).result()
        assert torch.equal(there[1], expected[2]) and not log
        assert torch.equal(pair.up_proj(x), expected[1])
        assert torch.equal(pair.up_proj(x), expected[1])
        # the results of a group are not kept
        assert all(group.x is None and not group.results for group in groups_of(pair))


def test_a_tensor_that_was_written_in_place_is_another(log):
    pair, x = Pair(), torch.randn(2, 4)
    with torch.no_grad(), branches.with_branches(pair):
        pair.gate_proj(x)
        x.add_(1)
        y = pair.up_proj(x)
        with torch.inference_mode():
            pair(x.clone(), x.clone())
    assert torch.equal(y, pair.up_proj(x))


def groups_of(pair):
    return [part.forward.func.__self__ for part in (pair.gate_proj, pair.up_proj)]


CHANGES = {
    "hook": lambda pair: pair.up_proj.register_forward_hook(lambda *given: None),
    "forward": lambda pair: setattr(pair.up_proj, "forward", pair.gate_proj.forward),
    "class": lambda pair: setattr(pair, "up_proj", type("Adapter", (nn.Linear,), {})(4, 3)),
    "missing": lambda pair: delattr(pair, "up_proj"),
    "the same": lambda pair: setattr(pair, "up_proj", pair.gate_proj),
    "other width": lambda pair: setattr(pair, "up_proj", nn.Linear(5, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_others_have_changed_stay_as_they_are(log, change):
    pair = Pair()
    CHANGES[change](pair)
    own = pair.gate_proj.__dict__.get("forward")
    with branches.with_branches(pair):
        assert pair.gate_proj.__dict__.get("forward") is own
        pair.gate_proj(torch.randn(2, 4))
    assert not log


def test_forwards_come_back_after_an_error():
    pair = Pair()
    with pytest.raises(ZeroDivisionError), branches.with_branches(pair):
        assert "forward" in vars(pair.gate_proj)
        raise ZeroDivisionError
    assert not any("forward" in vars(part) for part in pair.modules())


def test_nothing_is_captured_on_a_cpu():
    assert not branches.is_captured(torch.device("cpu"))
