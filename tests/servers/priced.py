"""A server that reports usage as the APIs of OpenAI and Anthropic do, and fails when it should.

It speaks OpenAI's Chat Completions and Responses and Anthropic's Messages, streamed or not, and
answers in texts, or, not streamed, with a call of a tool. What it reports is the test's, word for
word.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, Literal

Body = Mapping[str, Any]
AZURE = "/openai/deployments/"
"""How paths on Azure begin, which has Chat Completions by deployment."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer.

    Attributes:
        usage: What it reports; `None` for nothing.
        model: The model that it says has answered.
        service_tier: The tier that OpenAI says has served it; empty for none.
        text: What it says, in words that are streamed one by one.
        call: The name and the arguments of the tool that it calls instead; `None` for none.
        status: Its HTTP status.
        stops_after: How many events it streams before it waits for the test's end; `None` for all.
            Where nothing is streamed it waits at once.
        then: What it does there instead: close the connection, or stream an error.
    """

    usage: Body | None = None
    model: str = "gpt-4o-2024-08-06"
    service_tier: str = ""
    text: str = "Good day to you."
    call: tuple[str, Body] | None = None
    status: int = 200
    stops_after: int | None = None
    then: Literal["wait", "close", "fail"] = "wait"

    @property
    def words(self) -> list[str]:
        return [f"{word} " for word in self.text.split()]


@dataclass
class PricedProvider:
    """What a server has been asked, and what it answers.

    Attributes:
        url: Its address.
        requests: The requests, in order.
    """

    url: str
    requests: list[Body] = field(default_factory=list)
    _answers: list[Answer] = field(default_factory=list)
    _over: Event = field(default_factory=Event)

    def play(self, *answers: Answer) -> None:
        """Begin anew, with a script."""
        self.let_go()
        self.requests, self._answers, self._over = [], [*answers], Event()

    def let_go(self) -> None:
        """End all answers that wait."""
        self._over.set()

    def next(self, body: Body) -> tuple[Answer, Event]:
        self.requests.append(body)
        return self._answers.pop(0), self._over


@contextmanager
def running_priced_provider() -> Iterator[PricedProvider]:
    """A server on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer, over = provider.next(body)
            status, kind, parts = _answered(self.path, answer, body)
            waits = answer.stops_after is not None and answer.then == "wait"
            if parts:
                self._head(status, kind)
            for part in parts:
                self._say(part)
            if waits:
                over.wait(60)

        def _head(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def _say(self, text: str) -> None:
            # Who asks may have gone.
            try:
                self.wfile.write(text.encode())
                self.wfile.flush()
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider = PricedProvider(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield provider
        finally:
            provider.let_go()
            server.shutdown()
            thread.join()


def _answered(path: str, answer: Answer, body: Body) -> tuple[int, str, Sequence[str]]:
    """The status, the content type and the parts of an answer, as far as they are sent."""
    api = "/v1/chat/completions" if path.startswith(AZURE) else path
    whole, events = _APIS[api]
    if answer.status != 200:
        error = {"type": "api_error", "message": "not now"}
        return answer.status, "application/json", [json.dumps({"type": "error", "error": error})]
    if body.get("stream"):
        assert answer.call is None, "calls of tools are not streamed here"
        parts = [*events(answer, body)][: answer.stops_after]
        return 200, "text/event-stream", parts + [_event(_FAILED[api])] * (answer.then == "fail")
    parts = [json.dumps(whole(answer))]
    return 200, "application/json", parts[: answer.stops_after]


def _event(data: Body | str) -> str:
    if isinstance(data, str):
        return f"data: {data}\n\n"
    named = f"event: {data['type']}\n" if "type" in data else ""
    return f"{named}data: {json.dumps(data)}\n\n"


# OpenAI's Chat Completions.


def _chat(answer: Answer) -> Body:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.call:
        name, arguments = answer.call
        function = {"name": name, "arguments": json.dumps(arguments)}
        message["content"] = None
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    reason = "tool_calls" if answer.call else "stop"
    return {
        **_chat_head(answer, "chat.completion"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        **({"usage": answer.usage} if answer.usage else {}),
    }


def _chat_head(answer: Answer, kind: str) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": answer.model}
    return head | ({"service_tier": answer.service_tier} if answer.service_tier else {})


def _chat_events(answer: Answer, body: Body) -> Iterator[str]:
    """Words, the end, and only for who asks for it the usage, without a choice."""
    head = _chat_head(answer, "chat.completion.chunk")
    wanted = (body.get("stream_options") or {}).get("include_usage")
    none_yet = {"usage": None} if wanted else {}
    for word in answer.words:
        choice: Body = {"index": 0, "delta": {"role": "assistant", "content": word}}
        yield _event({**head, "choices": [{**choice, "finish_reason": None}], **none_yet})
    ended = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield _event({**head, "choices": [ended], **none_yet})
    if wanted and answer.usage:
        yield _event({**head, "choices": [], "usage": answer.usage})
    yield _event("[DONE]")


# OpenAI's Responses.


def _response(answer: Answer) -> dict[str, Any]:
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    item: dict[str, Any] = {**said, "content": [part]}
    if answer.call:
        name, arguments = answer.call
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed"}
        item |= {"name": name, "arguments": json.dumps(arguments)}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": answer.model,
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": answer.usage,
        "service_tier": answer.service_tier or "default",
    }


def _response_events(answer: Answer, body: Body) -> Iterator[str]:
    whole = _response(answer)
    (item,) = whole["output"]
    (part,) = item["content"]
    place = {"output_index": 0, "item_id": item["id"], "content_index": 0}
    begun: Body = {"output": [], "status": "in_progress", "usage": None, "service_tier": "auto"}
    events: list[tuple[str, Body]] = [
        ("created", {"response": {**whole, **begun}}),
        ("output_item.added", {"output_index": 0, "item": {**item, "content": []}}),
        ("content_part.added", {**place, "part": {**part, "text": ""}}),
        *(("output_text.delta", {**place, "delta": each, "logprobs": []}) for each in answer.words),
        ("output_text.done", {**place, "text": part["text"], "logprobs": []}),
        ("content_part.done", {**place, "part": part}),
        ("output_item.done", {"output_index": 0, "item": item}),
        ("completed", {"response": whole}),
    ]
    for number, (kind, data) in enumerate(events):
        yield _event({"type": f"response.{kind}", "sequence_number": number, **data})


# Anthropic's Messages.


def _message(answer: Answer) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": answer.text}
    if answer.call:
        name, arguments = answer.call
        block = {"type": "tool_use", "id": "call_1", "name": name, "input": arguments}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [block],
        "stop_reason": "tool_use" if answer.call else "end_turn",
        "stop_sequence": None,
        "usage": answer.usage,
    }


def _message_events(answer: Answer, body: Body) -> Iterator[str]:
    """The usage of the prompt first, and at the end all of it, but for how long it is cached."""
    usage = dict(answer.usage or {})
    begun = {**_message(answer), "content": [], "stop_reason": None}
    yield _event({"type": "message_start", "message": begun | {"usage": usage | _BEGUN}})
    block = {"type": "text", "text": ""}
    yield _event({"type": "content_block_start", "index": 0, "content_block": block})
    for word in answer.words:
        delta = {"type": "text_delta", "text": word}
        yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _event({"type": "content_block_stop", "index": 0})
    stopped = {"stop_reason": "end_turn", "stop_sequence": None}
    cumulative = {key: value for key, value in usage.items() if key in _CUMULATIVE}
    yield _event({"type": "message_delta", "delta": stopped, "usage": cumulative})
    yield _event({"type": "message_stop"})


_BEGUN = {"output_tokens": 1}
_CUMULATIVE: Sequence[str] = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
)

_ERROR = {"type": "overloaded_error", "message": "not now"}
_FAILED: Mapping[str, Body] = {
    "/v1/chat/completions": {"error": _ERROR},
    "/v1/responses": {"type": "error", "code": "server_error", "message": "not now", "param": None},
    "/v1/messages": {"type": "error", "error": _ERROR},
}
"""What goes wrong in the middle of a stream."""

_APIS: Mapping[str, Any] = {
    "/v1/chat/completions": (_chat, _chat_events),
    "/v1/responses": (_response, _response_events),
    "/v1/messages": (_message, _message_events),
}
