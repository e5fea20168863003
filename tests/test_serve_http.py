"""Load the HTTP endpoint of examples/serve.py on the loopback address, and hold it to OpenAI's form."""

import asyncio
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import uvicorn

from serving import model as models
from serving.engine import Engine
from serving.request import Limits, Request
from serving.server import MAX_BYTES, Server
from serving.text import ByteTokenizer

WAIT = 30  # seconds; only a test that fails waits so long


class Endpoint:
    """Run a server on a free port of the loopback address, in a thread with its own event loop."""

    def __init__(self):
        torch.manual_seed(0)
        limits = Limits(rows=16, slots=32, max_len=256, budget=160)
        self.engine = Engine(models.build_random_model("cpu", torch.float32, 0.2), limits)
        self.server = Server(self.engine, ByteTokenizer(), "tiny")
        config = uvicorn.Config(self.server.app, host="127.0.0.1", port=0, log_level="warning", ws="none")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.uvicorn.serve()), daemon=True)
        self.thread.start()
        self.wait_for(lambda: self.uvicorn.started)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]

    def close(self):
        self.uvicorn.should_exit = True
        self.thread.join(WAIT)
        self.server.close()

    def wait_for(self, condition):
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def send(self, path, body=None):
        """Return an open connection and its response; a body is JSON or bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data)
        return connection, connection.getresponse()

    def ask(self, path, body=None):
        """Return the status and the JSON of an answer."""
        connection, response = self.send(path, body)
        with connection:
            return response.status, json.loads(response.read())

    def events(self, path, body):
        """Return the events of a stream."""
        connection, response = self.send(path, {**body, "stream": True})
        with connection:
            assert response.getheader("content-type").startswith("text/event-stream")
            lines = [line for line in response.read().decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


# http.client's connections close themselves, but are no context managers
http.client.HTTPConnection.__enter__ = lambda self: self
http.client.HTTPConnection.__exit__ = lambda self, *error: self.close()


@pytest.fixture(scope="module")
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def greedy(text, count=6, **more):
    return {"model": "tiny", "prompt": text, "max_tokens": count, "temperature": 0, **more}


def test_64_clients_get_their_own_answers(endpoint):
    """All clients come at once to 16 rows; half of them stream; every answer is that of the prompt alone."""
    prompts = [f"client {n % 16} asks: " + "why? " * (n % 5) for n in range(64)]
    ready = threading.Barrier(64)

    def client(number):
        body = greedy(prompts[number], 5)
        ready.wait(WAIT)
        if number % 2:
            events = endpoint.events("/v1/completions", body)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            return "".join(e["choices"][0]["text"] for e in events)
        status, answer = endpoint.ask("/v1/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 5
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(client, range(64)))
    for prompt in prompts[:4]:
        alone = endpoint.ask("/v1/completions", greedy(prompt, 5))[1]["choices"][0]["text"]
        same = [a for p, a in zip(prompts, answers, strict=True) if p == prompt]
        assert same and set(same) == {alone}
    assert all(len(answer) == 5 for answer in answers)
    assert_is_empty(endpoint)


def assert_is_empty(endpoint):
    endpoint.wait_for(lambda: endpoint.engine.is_idle)
    pool = endpoint.engine.pool
    assert len(pool.free_slots) + len(pool.snapshots) == pool.num_slots


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_dropped_client_frees_its_slot(endpoint, is_stream):
    running = endpoint.engine.running
    body = greedy("a long answer", 200, stream=is_stream)
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=WAIT)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if is_stream:
        assert connection.getresponse().read(10).startswith(b"data: ")
    endpoint.wait_for(lambda: running)
    (request,) = running
    connection.sock.close()
    connection.close()
    endpoint.wait_for(lambda: not running)
    assert request.finish == "cancelled" and len(request.tokens) < 200
    assert_is_empty(endpoint)


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        ("/v1/completions", b"{", 400, "expected JSON"),
        ("/v1/completions", b"[" * 100_000, 400, "expected JSON"),
        ("/v1/completions", b" " * (MAX_BYTES + 1), 413, "expected at most"),
        ("/v1/completions", [1], 400, "expected a JSON object"),
        ("/v1/completions", {}, 400, "prompt:"),
        ("/v1/completions", greedy(""), 400, "prompt:"),
        ("/v1/completions", greedy("x" * 300), 400, "prompt:"),
        ("/v1/completions", greedy([1, 2, 256]), 400, "prompt:"),
        ("/v1/completions", greedy([True]), 400, "prompt:"),
        ("/v1/completions", greedy(["a", "b"]), 400, "prompt:"),
        ("/v1/completions", greedy("\ud800"), 400, "surrogate"),
        ("/v1/completions", greedy("a", 0), 400, "max_tokens:"),
        ("/v1/completions", greedy("a", "6"), 400, "max_tokens:"),
        ("/v1/completions", {**greedy("a"), "temperature": -1}, 400, "temperature:"),
        ("/v1/completions", {**greedy("a"), "temperature": float("nan")}, 400, "temperature:"),
        ("/v1/completions", greedy("a", top_p=2), 400, "top_p:"),
        ("/v1/completions", greedy("a", seed="x"), 400, "seed:"),
        ("/v1/completions", greedy("a", n=2), 400, "n,"),
        ("/v1/completions", greedy("a", stop=[""]), 400, "stop:"),
        ("/v1/completions", greedy("a", stream_options=3), 400, "stream_options:"),
        ("/v1/completions", {**greedy("a"), "model": "other"}, 404, "model:"),
        ("/v1/completions", None, 405, "Not Allowed"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages:"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages:"),
        ("/v1/nothing", None, 404, "Not Found"),
    ],
)
def test_a_malformed_request_is_a_4xx(endpoint, path, body, status, message):
    got, answer = endpoint.ask(path, body)
    assert got == status and message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error" and endpoint.engine.is_idle


def test_the_answers_have_openais_form(endpoint):
    _, listed = endpoint.ask("/v1/models")
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    chat = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 6, "temperature": 0}
    status, whole = endpoint.ask("/v1/chat/completions", chat)
    message = whole["choices"][0]["message"]
    assert status == 200 and whole["object"] == "chat.completion" and message["role"] == "assistant"
    prompt = "user: Why?\nassistant: "
    _, same = endpoint.ask("/v1/completions", greedy(prompt))
    assert same["object"] == "text_completion" and same["choices"][0]["text"] == message["content"]
    assert (
        whole["usage"]["prompt_tokens"] == len(prompt) and whole["usage"]["total_tokens"] == len(prompt) + 6
    )
    events = endpoint.events("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})
    text = "".join(e["choices"][0]["delta"]["content"] for e in events[:-1])
    assert text == message["content"] and events[-1]["choices"] == [] and len({e["id"] for e in events}) == 1
    assert events[-1]["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    numbers = endpoint.ask("/v1/completions", greedy(list(prompt.encode())))[1]
    assert numbers["choices"] == same["choices"]


def test_a_stop_string_ends_an_answer(endpoint):
    text = endpoint.ask("/v1/completions", greedy("tell me", 20))[1]["choices"][0]["text"]
    stop = text[10:13]
    expected = text[: text.index(stop)]
    for body in (greedy("tell me", 20, stop=stop), greedy("tell me", 20, stop=["zzzz", stop])):
        choice = endpoint.ask("/v1/completions", body)[1]["choices"][0]
        assert choice["text"] == expected and choice["finish_reason"] == "stop"
        events = endpoint.events("/v1/completions", body)
        assert "".join(e["choices"][0]["text"] for e in events) == expected
    assert_is_empty(endpoint)


def test_seeds_repeat_an_answer(endpoint):
    def text(seed):
        body = {**greedy("sample", 12), "temperature": 1.0, "top_p": 0.95, "seed": seed}
        return endpoint.ask("/v1/completions", body)[1]["choices"][0]["text"]

    assert text(1) == text(1) != text(2)


def test_a_failed_step_is_a_500_and_the_next_request_is_served(endpoint, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(endpoint.engine, "_prefill", fail)
        status, answer = endpoint.ask("/v1/completions", greedy("a"))
        assert status == 500 and answer["error"]["type"] == "server_error"
        connection, response = endpoint.send("/v1/completions", greedy("a", stream=True))
        with connection:
            assert b"the engine failed" in response.read()
    assert endpoint.ask("/v1/completions", greedy("a"))[0] == 200
    assert_is_empty(endpoint)


def test_a_full_queue_is_a_503(endpoint, monkeypatch):
    monkeypatch.setattr(endpoint.server, "max_waiting", 0)
    assert endpoint.ask("/v1/completions", greedy("a"))[0] == 503


def test_closing_the_server_ends_its_requests():
    engine = Engine(models.build_random_model("cpu", torch.float32, 0.2), Limits(rows=1, slots=2))
    request = engine.add(Request([1, 2, 3], 400))
    server = Server(engine, ByteTokenizer(), "tiny")
    server.close()
    assert request.finish == "error" and engine.is_idle and not server._thread.is_alive()
