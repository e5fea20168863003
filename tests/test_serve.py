"""Check that examples/serve.py generates the text that Transformers generates one prompt at a time."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
FILE = Path(__file__).parent.parent / "examples" / "serve.py"
spec = importlib.util.spec_from_file_location("serve", FILE)
serve = importlib.util.module_from_spec(spec)
sys.modules["serve"] = serve
spec.loader.exec_module(serve)

NEW = 10
_models = {}


@pytest.fixture(params=[0.02, 0.2], ids=["repeats itself", "does not"])
def model(request):
    """Return a model that falls into loops, which drafts foresee, or one that does not."""
    if request.param not in _models:
        _models[request.param] = serve.build("cpu", torch.float32, request.param)
    return _models[request.param]


def prompts(count, shared=serve.BLOCK + 7):
    """Return prompts of different lengths with equal first tokens, each prompt twice."""
    draw = torch.Generator().manual_seed(3)
    start = torch.randint(1, 255, (shared,), generator=draw).tolist()
    ends = [torch.randint(1, 255, (1 + 5 * n % 17,), generator=draw).tolist() for n in range(count)]
    return [start + end + end for end in ends]


def generate_text(model, prompt):
    """Return the text that Transformers' own functions generate."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def run(model, given, **options):
    streamed = {}
    engine = serve.Engine(
        model, max_len=160, on_text=lambda r, tokens: streamed.setdefault(id(r), []).extend(tokens), **options
    )
    requests = [engine.add(prompt, NEW) for prompt in given]
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
    assert [streamed[id(r)] for r in requests] == [r.tokens for r in requests]
    return engine, requests, steps


@pytest.mark.parametrize("drafts", [0, 2])
def test_words_are_those_of_transformers(model, drafts):
    """Seven requests on three rows keep prefixes, reuse slots, and accept some drafts."""
    given = prompts(7)
    engine, requests, _ = run(model, given, rows=3, slots=5, drafts=drafts)
    for request in requests:
        assert request.tokens == generate_text(model, request.prompt)
    assert engine.pool.hits >= 4 and max(r.reused for r in requests) == serve.BLOCK
    # at the end every slot is free or holds a prefix
    assert len(engine.pool.free) + len(engine.pool.prefixes) == 5
    assert "0 running" in str(engine.pool)


def test_drafts_save_steps():
    model = serve.build("cpu", torch.float32, 0.02)
    given = prompts(4)
    _, plain, steps = run(model, given, rows=4, slots=8, drafts=0)
    _, drafted, fewer = run(model, given, rows=4, slots=8, drafts=3)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.accepted for r in drafted) > 0 and fewer < steps


def test_a_full_pool_evicts_unused_prefixes(model):
    """With as many slots as rows a prefix is evicted, but not while another request starts from it."""
    given = [prompt for n in range(3) for prompt in prompts(2, shared=serve.BLOCK + n)] * 2
    _, requests, _ = run(model, given, rows=3, slots=3, drafts=1)
    for request in requests[:4]:
        assert request.tokens == generate_text(model, request.prompt)
    pool = serve.Pool(model, 2, 1, 32)
    pool.free, pool.prefixes[(1,)], pool.prefixes[(2,)] = [], 0, 1
    assert pool.take({0}) == 1 and pool.take({0}) is None and pool.take(set()) == 0


def test_the_same_prompt_again_and_again(model):
    """For a prompt of whole blocks the last token is computed again, and its prefix is kept once."""
    given = [prompts(1, shared=200)[0][: 2 * serve.BLOCK]] * 4
    engine, requests, _ = run(model, given, rows=2, slots=8, drafts=1)
    assert all(r.tokens == generate_text(model, given[0]) for r in requests)
    assert len(engine.pool.prefixes) == 1 and len(engine.pool.free) == 7


def test_what_does_not_fit_is_refused(model):
    engine = serve.Engine(model, max_len=40)
    for prompt in ([], [1] * 30):
        with pytest.raises(ValueError, match="prompt: expected 1 to max_len"):
            engine.add(prompt, 20)


def command(monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", ["serve.py", "--device", "cpu", *options])
    serve.main()
    return capsys.readouterr().out.splitlines()


def test_the_command_runs(monkeypatch, capsys):
    shown = command(monkeypatch, capsys, "--requests", "3", "--new", "5", "--rows", "2")
    assert re.match(r"warmup: \d+ calls, 0 compiled", shown[0])
    assert "0 running" in shown[-5] and sum(" done " in line for line in shown) == 3
    assert shown[-1].startswith("15 tokens in")


def test_piped_text_comes_step_by_step(monkeypatch, capsys):
    """A pipe gets one line a step, and the lines of one request make up its text."""
    shown = command(monkeypatch, capsys, "--requests", "2", "--new", "6", "--rows", "2", "--spread", "0.02")
    steps = int(re.search(r"in (\d+) steps", shown[-1])[1])
    streamed = [line.split(" MB ", 1)[1] for line in shown[1 : 1 + steps]]
    for number in (0, 1):
        found = [re.search(rf" {number}: (\S+)", line) for line in streamed]
        text = "".join(match[1] for match in found if match)
        assert len(text) == 6 and shown[-3 + number].endswith(text)


def test_the_commands_own_drafts_hold_now_and_then(monkeypatch, capsys):
    shown = command(monkeypatch, capsys, "--requests", "4")
    accepted, drafted = map(int, re.search(r"(\d+) of (\d+) drafts accepted", shown[-1]).groups())
    assert 0 < accepted < drafted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_meet_what_the_warmup_compiled(monkeypatch, dtype):
    """Requests launch only what the warmup compiled; launches are recorded on an imagined H200, not run."""
    from kit import compiling

    from gdn.ops import fastpath

    monkeypatch.setenv("GDN_BACKEND", "triton")
    model = serve.build("cpu", dtype, 0.02)
    engine = serve.Engine(model, max_len=160, rows=3, slots=5, drafts=2)
    warmed = set(compiling.jobs(engine.warmup, "cuda:90"))

    def serves():
        for prompt in prompts(7):
            engine.add(prompt, NEW)
        while not engine.is_idle:
            engine.step()

    met = set(compiling.jobs(serves, "cuda:90"))
    fastpath._calls.clear()
    assert met <= warmed, sorted(job.name for job in met - warmed)
    kernels = {job.kernel.__name__ for job in met}
    assert {"snapshot_kernel", "scatter_kernel", "decode_kernel"} <= kernels and engine.pool.hits > 0


@pytest.mark.gpu
def test_graphs_give_the_same_words():
    """On a GPU a step is one graph, and in fp32 its text is that of the CPU."""
    given = prompts(5)
    cpu = run(serve.build("cpu", torch.float32, 0.2), given, rows=2, slots=4, drafts=2)[1]
    engine, requests, _ = run(serve.build("cuda", torch.float32, 0.2), given, rows=2, slots=4, drafts=2)
    assert engine.graph is not None and [r.tokens for r in requests] == [r.tokens for r in cpu]
