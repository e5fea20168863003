"""Check that examples/serve.py generates the text that Transformers generates one prompt at a time."""

import copy
import importlib.util
import re
import sys

import pytest
import torch

pytest.importorskip("transformers")
import serve
from serving import engine as engines
from serving import model as models
from serving import pool as pools
from serving.pool import BLOCK
from serving.request import Limits, Request
from serving.sampling import Drafter, Sampling, sample
from serving.text import ByteTokenizer, TextStream

NEW = 10
_models = {}


def build(kind, device="cpu", dtype=torch.float32):
    """Return a random model: Qwen3.5 whose weights have a spread, or Qwen3-Next with experts."""
    if isinstance(kind, float):
        return remember(models.build_random_model(device, dtype, kind))
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return remember(Qwen3NextForCausalLM(config).to(device, dtype).eval())


def remember(model):
    """Give a model decays of a few percent per token, so that a wrong state changes its text."""
    draw = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.copy_(torch.empty(p.shape).uniform_(-4, -1, generator=draw))
    return model


@pytest.fixture(params=[0.02, 0.2, "next"], ids=["repeats itself", "does not", "Qwen3-Next"])
def model(request):
    """Return a model that falls into loops, which drafts foresee, one that does not, or one with experts."""
    if request.param not in _models:
        _models[request.param] = build(request.param)
    return _models[request.param]


def prompts(count, shared=BLOCK + 7):
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


def make_engine(model, **limits):
    """Return an engine on a copy: an engine joins the projections of its model."""
    return engines.Engine(copy.deepcopy(model), Limits(**{"max_len": 160, **limits}))


def run(model, given, requests=None, **limits):
    streamed = {}

    def on_tokens(request, tokens):
        streamed.setdefault(id(request), []).extend(tokens)

    engine = make_engine(model, **limits)
    if requests is None:
        requests = [Request(prompt, NEW) for prompt in given]
    for request in requests:
        request.on_tokens = on_tokens
        engine.add(request)
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
    assert [streamed[id(r)] for r in requests] == [r.tokens for r in requests]
    check_all_is_free(engine.pool)
    return engine, requests, steps


def check_all_is_free(pool):
    """Check that every slot and page is free or belongs to a snapshot."""
    kept = pool.snapshots.values()
    assert sorted(pool.free_slots + [s.slot for s in kept]) == list(range(pool.num_slots))
    pages = {page for s in kept for page in s.pages}
    assert sorted(pool.free_pages + list(pages)) == list(range(pool.num_pages))
    assert sum(pool.num_users) == sum(len(s.pages) for s in kept)


@pytest.mark.parametrize("drafts", [0, 2])
def test_words_are_those_of_transformers(model, drafts):
    """Seven requests on three rows keep prefixes, reuse slots, and accept some drafts."""
    given = prompts(7)
    engine, requests, _ = run(model, given, rows=3, slots=5, drafts=drafts)
    for request in requests:
        assert request.tokens == generate_text(model, request.prompt)
    assert engine.pool.hits >= 4 and max(r.reused for r in requests) == BLOCK
    assert {r.finish for r in requests} == {"length"} and "0 running" in str(engine.pool)


def test_histories_give_the_same_words():
    """States are read only, and folded in the step whose token finds no place; slots are used again."""
    model, given = build(0.045), prompts(3)
    engine, requests, _ = run(model, given, rows=2, slots=3, history=6)
    assert [r.tokens for r in requests] == [r.tokens for r in run(model, given, rows=2, slots=3)[1]]
    cursor = engine.pool.histories.cursor
    assert bool((cursor[..., 1] > 0).any()) and bool((cursor[..., 0] > 0).any()), "rings turned at a fold"
    with pytest.raises(ValueError, match="history: expected 0 with 2 drafts, got 6"):
        make_engine(model, history=6, drafts=2)


def test_drafts_save_steps():
    model, given = build(0.02), prompts(4)
    _, plain, steps = run(model, given, rows=4, slots=8, drafts=0)
    _, drafted, fewer = run(model, given, rows=4, slots=8, drafts=3)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.num_accepted for r in drafted) > 0 and fewer < steps


@pytest.mark.parametrize("drafts", [0, 2])
def test_states_in_bfloat16_give_one_text_with_and_without_drafts(drafts):
    """A packet of drafts rounds the state after each token, as storing it does."""
    model, given = build(0.02), prompts(3)
    options = {"rows": 2, "slots": 4, "state_dtype": torch.bfloat16}
    engine, requests, _ = run(model, given, drafts=drafts, **options)
    assert engine.pool.states.dtype == torch.bfloat16
    assert [r.tokens for r in requests] == [r.tokens for r in run(model, given, drafts=3, **options)[1]]


def test_long_prompts_are_prefilled_in_pieces_beside_decoding(model):
    """A budget of 70 tokens splits prompts of 200; the first request decodes meanwhile."""
    given = [prompts(1)[0][:5], prompts(1, shared=190)[0], prompts(2, shared=200)[1]]
    engine = make_engine(model, rows=3, slots=12, max_len=256, budget=70, snapshot_every=1)
    requests = [engine.add(Request(prompt, NEW)) for prompt in given]
    lengths = []
    while not engine.is_idle:
        before = [r.seen for r in requests]
        engine.step()
        lengths.append(sum(r.seen - n for r, n in zip(requests, before, strict=True)))
        if not requests[1].is_prefilled and len(lengths) > 2:
            assert len(requests[0].tokens) == len(lengths)
    assert max(lengths) <= 70
    for request in requests:
        assert request.tokens == generate_text(model, request.prompt)
    # a snapshot after each block of both prompts, whose first blocks are one
    assert len(engine.pool.snapshots) >= 4
    check_all_is_free(engine.pool)


def test_a_prompt_starts_from_the_longest_of_several_snapshots(model):
    """One prompt leaves a snapshot after each block; others branch off behind any of them."""
    first = prompts(1, shared=3 * BLOCK + 9)[0]
    given = [first[: n * BLOCK + 5] + [7, 8, 9] for n in (1, 2, 3)]
    engine, requests, _ = run(
        model, [first, *given], rows=1, slots=8, max_len=256, snapshot_every=1, drafts=1
    )
    assert [r.reused for r in requests] == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]
    for request in requests:
        assert request.tokens == generate_text(model, request.prompt)


def test_a_full_pool_evicts_unused_prefixes(model):
    """With one slot more than rows, and few pages, snapshots are evicted, the oldest first."""
    given = [prompt for n in range(3) for prompt in prompts(2, shared=BLOCK + n)] * 2
    _, requests, _ = run(model, given, rows=3, slots=4, pages=7, drafts=1)
    for request in requests[:4]:
        assert request.tokens == generate_text(model, request.prompt)


def test_snapshots_are_evicted_in_the_order_of_their_use():
    config = build("next").config
    pool = pools.Pool(
        config, torch.device("cpu"), torch.float32, slots=3, pages=4, drafts=0, state_dtype=torch.float32
    )
    slot, pages, blocks = pool.allocate([b"a"], 1)
    kept = [pool.keep(name, pages) for name in (b"a", b"b", b"c")]
    assert blocks == 0 and None not in kept and list(pool.snapshots) == [b"b", b"c"]
    pool.release(slot, pages)
    assert pool.num_users[pages[0]] == 2
    slot, pages, blocks = pool.allocate([b"b"], 4)
    assert blocks == 1 and list(pool.snapshots) == [b"c", b"b"]
    assert pool.allocate([], 1) is None and not pool.snapshots
    pool.release(slot, pages)
    assert len(pool.free_slots) == 3 and len(pool.free_pages) == 4 and not any(pool.num_users)


def test_hashes_name_prefixes():
    """Blocks have one hash only if all tokens before them are the same."""
    first, second = pools.hash_blocks([1] * 130), pools.hash_blocks([2] * 64 + [1] * 64)
    assert len(first) == len(set(first)) == len(second) == 2 and not set(first) & set(second)
    assert pools.hash_blocks([1] * 64) == first[:1]


def test_the_same_prompt_again_and_again(model):
    """For a prompt of whole blocks the last block is computed again, and its prefix is kept once."""
    given = [prompts(1, shared=200)[0][: 2 * BLOCK]] * 4
    engine, requests, _ = run(model, given, rows=2, slots=8, drafts=1)
    assert all(r.tokens == generate_text(model, given[0]) for r in requests)
    assert len(engine.pool.snapshots) == 1 and len(engine.pool.free_slots) == 7


@pytest.mark.parametrize("kind, dims", [(0.2, 3), ("next", 2)], ids=["Qwen3.5", "Qwen3-Next"])
def test_positions_have_dimensions_that_every_transformers_takes(kind, dims):
    """Qwen3.5 rotates by [3, B, T]: Transformers 5.17 takes nothing else, later versions [B, T] as well."""
    engine, seen = make_engine(build(kind), rows=1, slots=2), set()
    engine.model.body.rotary_emb.register_forward_pre_hook(lambda module, given: seen.add(given[1].dim()))
    engine.add(Request([1, 2, 3], 2))
    while not engine.is_idle:
        engine.step()
    assert seen == {dims}


def test_what_does_not_fit_is_refused():
    engine = make_engine(build("next"), max_len=40, pages=1, rows=2)
    for prompt in ([], [1] * 30):
        with pytest.raises(ValueError, match="prompt: expected 1 to 40 tokens"):
            engine.add(Request(prompt, 20))
    with pytest.raises(ValueError, match="prompt: expected at most 1 pages, got 2"):
        make_engine(build("next"), pages=1).add(Request([1] * 60, 20))
    with pytest.raises(ValueError, match="budget: expected at least"):
        make_engine(build("next"), budget=64)
    with pytest.raises(ValueError, match="model: expected one of qwen3_next"):
        other = build("next")
        other.config.model_type = "olmo_hybrid"
        engines.Engine(other, Limits())


def test_stop_tokens_and_cancelled_requests_end_early(model):
    prompt = prompts(1)[0]
    expected = generate_text(model, prompt)
    stop = expected[3]
    requests = [Request(prompt, NEW, stop_ids=frozenset([stop])), Request(prompt, NEW), Request(prompt, NEW)]
    requests[1].is_cancelled = requests[2].is_cancelled = True
    _, (stopped, *cancelled), _ = run(model, None, requests, rows=2, slots=4, drafts=2)
    assert stopped.tokens == expected[: expected.index(stop) + 1] and stopped.finish == "stop"
    assert all(r.finish == "cancelled" and not r.tokens for r in cancelled)
    engine = make_engine(model)
    running = [engine.add(Request(prompt, NEW)) for _ in range(2)]
    engine.step()
    running[0].is_cancelled = True
    engine.step()
    assert running[0].finish == "cancelled" and len(engine.running) == 1
    engine.fail()
    assert running[1].finish == "error" and engine.is_idle and not engine.pool.snapshots
    check_all_is_free(engine.pool)


def test_an_answer_depends_on_its_seed_alone():
    """Temperature and top-p draw the same text alone, beside others, and with drafts."""
    model, given = build(0.2), prompts(3)

    def answers(**limits):
        requests = [Request(p, NEW, Sampling(0.8, 0.9, seed)) for seed, p in enumerate([*given, given[0]])]
        return [r.tokens for r in run(model, None, requests, slots=8, **limits)[1]]

    alone = answers(rows=1)
    assert alone == answers(rows=4) == answers(rows=2, drafts=2)
    assert alone[0] != alone[3] and alone[0] != generate_text(model, given[0])


def test_samples_have_the_distribution():
    """Many draws follow the softmax at a temperature, cut at top-p; temperature 0 is greedy."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(4000, 1, 1)
    for top_p, kept in ((1.0, 4), (0.85, 2), (0.0, 1)):
        samplings = [Sampling(0.7, top_p, seed) for seed in range(4000)]
        counts = sample(logits, samplings, [0] * 4000).flatten().bincount(minlength=4) / 4000
        probs = (logits[0, 0] / 0.7).softmax(-1)
        probs[kept:] = 0
        torch.testing.assert_close(counts, probs / probs.sum(), atol=0.03, rtol=0)
    mixed = sample(logits[:2, :, :].expand(2, 3, 4), [Sampling(0.0), Sampling(1.0, 0.0)], [0, 5])
    assert mixed.tolist() == [[0, 0, 0]] * 2


def test_drafts_follow_the_last_occurrence():
    drafter = Drafter([1, 2, 3, 9, 1, 2, 3, 4, 5, 1, 2, 3])
    assert drafter.packet(3) == [3, 4, 5, 1] and drafter.packet(0) == [3]
    drafter.extend([4])
    assert drafter.packet(4) == [4, 5, 1, 2, 3]
    assert Drafter([7]).packet(2) == [7, 0, 0]


def test_text_grows_by_whole_characters_up_to_a_stop_string():
    class Utf8(ByteTokenizer):
        def decode(self, tokens, **options):
            return bytes(tokens).decode(errors="replace")

    def parts(text, stop=()):
        stream, data = TextStream(Utf8(), list(stop)), text.encode()
        return [stream.add([b], is_last=n == len(data) - 1) for n, b in enumerate(data)], stream

    assert parts("aé€b")[0] == ["a", "", "é", "", "", "€", "b"]
    shown, stream = parts("one END two", ["END", "x"])
    assert "".join(shown) == "one " and stream.is_stopped
    shown, stream = parts("one EN", ["END!"])
    assert shown == ["", "", "", "o", "n", "e EN"] and not stream.is_stopped


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


def save_checkpoint(folder):
    """Save a model and a tokenizer of bytes, which has a chat template and an end token."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(BPE({letter: n for n, letter in enumerate([*alphabet[:-1], "<end>"])}, []))
    words.pre_tokenizer, words.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)
    model = build(0.2)
    model.generation_config.eos_token_id = [255, 254]
    model.save_pretrained(folder)
    return model, tokenizer


def test_a_checkpoint_answers(monkeypatch, capsys, tmp_path):
    model, tokenizer = save_checkpoint(tmp_path)
    shown = command(monkeypatch, capsys, "--model", str(tmp_path), "--prompt", "Why?", "--new", str(NEW))
    ids = tokenizer.encode("user: Why?\nassistant: ")
    args = type("Args", (), {"model": str(tmp_path), "device": "cpu"})
    expected = tokenizer.decode(generate_text(model, ids))
    assert shown[-2].endswith(expected.replace("\n", " "))
    assert serve.load(args)[2] == {254, 255}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype, drafts", [(torch.float32, 2), (torch.bfloat16, 2), (torch.bfloat16, 0)])
def test_requests_meet_what_the_warmup_compiled(monkeypatch, dtype, drafts):
    """Requests launch only what the warmup compiled; launches are recorded on an imagined H200, not run."""
    from kit import compiling

    from gdn.ops import fastpath

    monkeypatch.setenv("GDN_BACKEND", "triton")
    engine = make_engine(build(0.02, dtype=dtype), rows=3, slots=5, drafts=drafts, state_dtype=dtype)
    warmed = set(compiling.jobs(engine.warmup, "cuda:90"))

    def serves():
        for prompt in prompts(7):
            engine.add(Request(prompt, NEW))
        while not engine.is_idle:
            engine.step()

    met = set(compiling.jobs(serves, "cuda:90"))
    fastpath._calls.clear()
    assert met <= warmed, sorted(job.name for job in met - warmed)
    kernels = {job.kernel.__name__ for job in met}
    assert {"scatter_kernel", "decode_kernel"} <= kernels and engine.pool.hits > 0


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2])
def test_graphs_give_the_same_words(drafts):
    """On a GPU a decode is one graph of its bucket, and in fp32 its text is that of the CPU."""
    given = prompts(5)
    limits = {"rows": 3, "slots": 6, "drafts": drafts}
    cpu = run(build(0.2), given, **limits)[1]
    engine, requests, _ = run(build(0.2, "cuda"), given, **limits)
    assert len(engine.graphs) > 1 and [r.tokens for r in requests] == [r.tokens for r in cpu]
