"""Provide an OpenAI-style HTTP endpoint: /v1/completions, /v1/chat/completions and /v1/models.

The engine runs in a thread of its own; handlers run in the event loop and get tokens by a queue. A client
that drops its connection cancels its request, whose slot is free one step later.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.engine import Engine
from serving.request import Request
from serving.sampling import Sampling
from serving.text import TextStream, encode_chat

MAX_BYTES = 4 << 20  # of a request's body
logger = logging.getLogger("serving")


@dataclass(frozen=True)
class Options:
    """Hold the checked fields of a request's body."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: list[str]
    is_stream: bool
    with_usage: bool
    is_chat: bool


class Server:
    """Serve one engine: `app` is the ASGI application, `close` ends the thread of the engine."""

    def __init__(
        self, engine: Engine, tokenizer: Any, name: str, *,
        stop_ids: frozenset[int] = frozenset(), max_waiting: int = 256,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.stop_ids, self.max_waiting = stop_ids, max_waiting
        self._numbers = itertools.count()
        self._has_work, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: show_error})

    def close(self) -> None:
        self._is_closed = True
        self._has_work.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            if self.engine.is_idle:
                self._has_work.wait(timeout=1)
                self._has_work.clear()
                continue
            try:
                self.engine.step()
            except Exception:
                # out of memory, say: these requests end with an error, later ones are served
                logger.exception("a step of the engine failed")
                self.engine.fail()
        self.engine.fail()

    # handlers

    async def models(self, http: HttpRequest) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "gdn"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, is_chat=False)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, is_chat=True)

    async def _answer(self, http: HttpRequest, is_chat: bool) -> Response:
        options = self._parse(await read_json(http), is_chat)
        if len(self.engine.waiting) >= self.max_waiting:
            raise HTTPException(503, "too many requests are waiting")
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[list[int], str | None]]()

        def on_tokens(request: Request, tokens: list[int]) -> None:
            # in the thread of the engine; the loop is closed when the server ends before its requests
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, (tokens, request.finish))

        request = Request(
            options.prompt, options.max_tokens, options.sampling, self.stop_ids, on_tokens=on_tokens
        )
        try:
            self.engine.add(request)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        self._has_work.set()
        texts = self._texts(request, arrived, options)
        head = {"id": f"gdn-{next(self._numbers)}", "created": int(time.time()), "model": self.name}
        if options.is_stream:
            return StreamingResponse(self._events(request, texts, options, head), media_type=EVENTS)
        pieces, watch = [], asyncio.ensure_future(wait_for_disconnect(http, request))
        try:
            pieces = [text async for text in texts]
        finally:
            watch.cancel()
            request.is_cancelled = True
        if request.finish in ("error", "cancelled"):
            raise HTTPException(500, "the engine failed")
        body = head | choice(options, "".join(pieces), request.finish, is_delta=False)
        return JSONResponse(body | {"usage": usage(request)})

    async def _texts(
        self, request: Request, arrived: asyncio.Queue[tuple[list[int], str | None]], options: Options
    ) -> AsyncIterator[str]:
        """Yield the text of an answer as it grows, until the engine or a stop string ends it."""
        stream = TextStream(self.tokenizer, options.stop)
        finish = None
        while finish is None and not stream.is_stopped:
            tokens, finish = await arrived.get()
            if text := stream.add(tokens, is_last=finish is not None):
                yield text
        if finish is None:
            request.finish, request.is_cancelled = "stop", True

    async def _events(
        self, request: Request, texts: AsyncIterator[str], options: Options, head: dict[str, Any]
    ) -> AsyncIterator[str]:
        """Yield server-sent events; a client that drops the connection closes this generator."""
        try:
            async for text in texts:
                yield event(head | choice(options, text, None, is_delta=True))
            if request.finish in ("error", "cancelled"):
                yield event({"error": {"message": "the engine failed", "type": "server_error"}})
                return
            yield event(head | choice(options, "", request.finish, is_delta=True))
            if options.with_usage:
                kind = choice(options, "", None, is_delta=True) | {"choices": []}
                yield event(head | kind | {"usage": usage(request)})
            yield "data: [DONE]\n\n"
        finally:
            request.is_cancelled = True

    # the body of a request

    def _parse(self, body: Any, is_chat: bool) -> Options:
        """Return the options of a body; raise a 4xx that names the field."""
        if not isinstance(body, dict):
            raise HTTPException(400, "body: expected a JSON object")
        if body.get("model", self.name) != self.name:
            raise HTTPException(404, f"model: expected {self.name}, got {body['model']!r}")
        if body.get("n", 1) != 1 or body.get("logprobs"):
            raise HTTPException(400, "n, logprobs: expected 1 and none")
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and s for s in stop):
            raise HTTPException(400, "stop: expected a text or up to 4 texts")
        prompt = self._messages(body) if is_chat else self._prompt(body)
        most = self.engine.limits.max_len
        limit = number(
            {"max_tokens": body.get("max_completion_tokens", body.get("max_tokens"))}, "max_tokens",
            max(1, most - len(prompt) - self.engine.limits.drafts) if is_chat else 16, 1, most,
        )  # fmt: skip
        stream_options = body.get("stream_options") or {}
        if not isinstance(stream_options, dict):
            raise HTTPException(400, "stream_options: expected an object")
        sampling = Sampling(
            number(body, "temperature", 1.0, 0, 2), number(body, "top_p", 1.0, 0, 1),
            int(number(body, "seed", time.time_ns() % 2**31, -(2**63), 2**63)),
        )  # fmt: skip
        is_stream, with_usage = bool(body.get("stream")), bool(stream_options.get("include_usage"))
        return Options(prompt, int(limit), sampling, stop, is_stream, with_usage, is_chat)

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            try:
                return list(self.tokenizer.encode(prompt))
            except UnicodeEncodeError:
                raise HTTPException(400, "prompt: expected text, got half of a surrogate pair") from None
        size = self.engine.model.config.vocab_size
        if not isinstance(prompt, list) or not all(type(x) is int and 0 <= x < size for x in prompt):
            raise HTTPException(400, "prompt: expected one text or one list of token numbers")
        return prompt

    def _messages(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        is_text = isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
        if not messages or not is_text:
            raise HTTPException(400, "messages: expected a list of objects with the texts role and content")
        try:
            return encode_chat(self.tokenizer, messages)
        except Exception as error:
            # the templates of checkpoints raise what they like for roles that they do not know
            raise HTTPException(400, f"messages: {error}") from None


EVENTS = "text/event-stream"


async def read_json(http: HttpRequest) -> Any:
    """Return the body; 413 if it is too long, 400 if it is no JSON."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"body: expected at most {MAX_BYTES} bytes")
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise HTTPException(400, "body: expected JSON") from None


async def wait_for_disconnect(http: HttpRequest, request: Request) -> None:
    """Cancel the request when its client, which gets no stream, drops the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    request.is_cancelled = True


def number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise HTTPException(400, f"{name}: expected a number from {low} to {high}, got {value!r}")
    return value


def choice(options: Options, text: str, finish: str | None, *, is_delta: bool) -> dict[str, Any]:
    """Return the fields of an answer, or of an event of a stream, that depend on the kind of request."""
    kind = "chat.completion" if options.is_chat else "text_completion"
    entry: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if options.is_chat:
        entry["delta" if is_delta else "message"] = {"role": "assistant", "content": text}
    else:
        entry["text"] = text
    return {"object": kind + ".chunk" * (is_delta and options.is_chat), "choices": [entry]}


def usage(request: Request) -> dict[str, Any]:
    prompt, new = len(request.prompt), len(request.tokens)
    cached = {"cached_tokens": request.reused}
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": cached,
    }  # fmt: skip


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def show_error(http: HttpRequest, error: Exception) -> Response:
    """Return an error in OpenAI's form."""
    status = getattr(error, "status_code", 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = {"message": getattr(error, "detail", str(error)), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": message}, status_code=status)
