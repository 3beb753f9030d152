"""A server that checks what the APIs of OpenAI and Anthropic check, and answers by a script.

It speaks OpenAI's Chat Completions and Responses and Anthropic's Messages, streamed or not.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Thread
from typing import Any

Body = Mapping[str, Any]
Turn = str | Sequence[str]
"""One answer: a text, or the names of the tools that it calls at once."""
Calls = Sequence[tuple[str, str]]
"""Calls by the name of the tool, and their ids."""


class Provider:
    """What a server has been asked, and what it answers.

    Attributes:
        url: Its address.
        requests: The requests that it has accepted, in order.
        refused: Why it has refused others.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[Body] = []
        self.refused: list[str] = []
        self._turns: list[Turn] = []
        self._ids = count(1)

    def play(self, script: Sequence[Turn]) -> None:
        """Begin anew, with a script."""
        self.requests, self.refused, self._turns = [], [], list(script)

    def answer(self, path: str, body: Body) -> tuple[int, str, bytes]:
        """The status, the content type and the body of an answer."""
        faults, completed, events = _APIS[path]
        found = list(faults(body))
        if found:
            self.refused += found
            error = {"type": "invalid_request_error", "message": found[0]}
            return 400, "application/json", json.dumps({"type": "error", "error": error}).encode()
        self.requests.append(body)
        turn = self._turns.pop(0)
        calls = (
            [] if isinstance(turn, str) else [(name, f"call_{next(self._ids)}") for name in turn]
        )
        # LangChain takes some of these ids for those of its own messages.
        answer = completed(turn if isinstance(turn, str) else "", calls, f"id_{next(self._ids)}")
        if body.get("stream"):
            return 200, "text/event-stream", "".join(map(_event, events(answer))).encode()
        return 200, "application/json", json.dumps(answer).encode()


@contextmanager
def running_provider() -> Iterator[Provider]:
    """A server on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, kind, content = provider.answer(self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider = Provider(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()


def _event(data: Body | str) -> str:
    if isinstance(data, str):
        return f"data: {data}\n\n"
    named = f"event: {data['type']}\n" if "type" in data else ""
    return f"{named}data: {json.dumps(data)}\n\n"


# What every API refuses.


def _tool_faults(body: Body, *, has_calls: bool) -> Iterator[str]:
    if body.get("tools") == []:
        yield "tools: [] is too short"
    if body.get("tool_choice") and not body.get("tools"):
        yield "tool_choice: only allowed when tools are given"
    if has_calls and not body.get("tools"):
        yield "tools: must be given where messages have calls of tools"


# OpenAI's Chat Completions.


def _chat_faults(body: Body) -> Iterator[str]:
    yield from _tool_faults(body, has_calls=False)
    unanswered: set[str] = set()
    for message in body["messages"]:
        role, content = message["role"], message.get("content")
        if role == "tool":
            if message["tool_call_id"] not in unanswered:
                yield "a tool message must follow a message with its tool call"
            unanswered.discard(message["tool_call_id"])
            if not isinstance(content, str) and any(part["type"] != "text" for part in content):
                yield "a tool message has texts only"
        elif unanswered:
            yield f"a message with tool calls must be followed by tool messages: {unanswered}"
        if content == [] or (content is None and not message.get("tool_calls")):
            yield f"the content of a message of the {role} is empty"
        if role == "assistant" and "tool_calls" in message:
            ids = [call["id"] for call in message["tool_calls"]]
            if not ids or len(set(ids)) < len(ids):
                yield f"tool calls are none, or repeat an id: {ids}"
            unanswered = set(ids)
    if unanswered:
        yield f"a message with tool calls must be followed by tool messages: {unanswered}"


def _chat(text: str, calls: Calls, own_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name, call_id in calls
        ]
    reason = "tool_calls" if calls else "stop"
    return {
        "id": own_id,
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-4o",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _chat_events(answer: Body) -> Iterator[Body | str]:
    (choice,) = answer["choices"]
    message = choice["message"]
    shared = {key: answer[key] for key in ("id", "created", "model")}
    deltas: list[Body] = [{"role": "assistant", "content": message["content"] or ""}]
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{**call, "index": index}]})
    for delta, reason in [*((delta, None) for delta in deltas), ({}, choice["finish_reason"])]:
        streamed = {"index": 0, "delta": delta, "finish_reason": reason}
        yield {**shared, "object": "chat.completion.chunk", "choices": [streamed]}
    yield "[DONE]"


# OpenAI's Responses.


def _responses_faults(body: Body) -> Iterator[str]:
    yield from _tool_faults(body, has_calls=False)
    unanswered: set[str] = set()
    for item in body["input"]:
        if item["type"] == "function_call":
            unanswered.add(item["call_id"])
        elif item["type"] == "function_call_output":
            if item["call_id"] not in unanswered:
                yield f"no tool call found for the output with call_id {item['call_id']}"
            unanswered.discard(item["call_id"])
        elif not item.get("content"):
            yield f"the content of {item} is empty"
    if unanswered:
        yield f"no tool output found for the calls {unanswered}"


def _response(text: str, calls: Calls, own_id: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"type": "message", "id": f"msg_{own_id}", "role": "assistant", "status": "completed"}
    output: list[dict[str, Any]] = [{**said, "content": [part]}] if text else []
    output += [
        {
            "type": "function_call",
            "id": f"fc_{call_id}",
            "call_id": call_id,
            "name": name,
            "arguments": "{}",
            "status": "completed",
        }
        for name, call_id in calls
    ]
    return {
        "id": own_id,
        "object": "response",
        "created_at": 1,
        "model": "gpt-4o",
        "status": "completed",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _response_events(answer: Body) -> Iterator[Body]:
    numbers = count()

    def event(kind: str, **data: Any) -> Body:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **data}

    yield event("created", response={**answer, "output": [], "status": "in_progress"})
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            yield event("output_item.added", output_index=index, item={**item, "content": []})
            (part,) = item["content"]
            part_place = {**place, "content_index": 0}
            yield event("content_part.added", **part_place, part={**part, "text": ""})
            yield event("output_text.delta", **part_place, delta=part["text"], logprobs=[])
            yield event("output_text.done", **part_place, text=part["text"], logprobs=[])
            yield event("content_part.done", **part_place, part=part)
        else:
            yield event("output_item.added", output_index=index, item={**item, "arguments": ""})
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            done = {"arguments": arguments, "name": item["name"]}
            yield event("function_call_arguments.done", **place, **done)
        yield event("output_item.done", output_index=index, item=item)
    yield event("completed", response=answer)


# Anthropic's Messages.


def _blocks(message: Body) -> list[Body]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _messages_faults(body: Body) -> Iterator[str]:
    blocks = [block for message in body["messages"] for block in _blocks(message)]
    uses = [block["id"] for block in blocks if block["type"] == "tool_use"]
    yield from _tool_faults(body, has_calls=bool(uses))
    if len(set(uses)) < len(uses):
        yield f"tool_use ids must be unique: {uses}"
    roles = [message["role"] for message in body["messages"]]
    if roles != [("user", "assistant")[at % 2] for at in range(len(roles))]:
        yield f"roles must take turns, the user first: {roles}"
    open_uses: list[str] = []
    for message in body["messages"]:
        own = _blocks(message)
        kinds = [block["type"] for block in own]
        results = [block["tool_use_id"] for block in own if block["type"] == "tool_result"]
        if "tool_result" in kinds[len(results) :]:
            yield f"tool_result blocks must come first: {kinds}"
        if sorted(results) != sorted(open_uses):
            yield f"tool_use ids {open_uses} must have one tool_result each, and have {results}"
        yield from _empty(own)
        open_uses = [block["id"] for block in own if block["type"] == "tool_use"]
    if open_uses:
        yield f"tool_use ids {open_uses} must have one tool_result each, and have none"


def _empty(blocks: Sequence[Body]) -> Iterator[str]:
    if not blocks:
        yield "messages must not be empty"
    for block in blocks:
        if block["type"] == "text" and not block["text"].strip():
            yield "text content blocks must not be empty"
        if block.get("is_error") and not block["content"]:
            yield "tool_result: content must not be empty if is_error is true"


def _message(text: str, calls: Calls, own_id: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    content += [
        {"type": "tool_use", "id": call_id, "name": name, "input": {}} for name, call_id in calls
    ]
    return {
        "id": own_id,
        "type": "message",
        "role": "assistant",
        "model": "claude-of-the-tests",
        "content": content,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def _message_events(answer: Body) -> Iterator[Body]:
    begun = {**answer, "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start, delta = block, {"type": "input_json_delta", "partial_json": "{}"}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stopped = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stopped, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}


_Api = tuple[
    Callable[[Body], Iterator[str]],
    Callable[[str, Calls, str], dict[str, Any]],
    Callable[[Body], Iterator[Any]],
]
_APIS: Mapping[str, _Api] = {
    "/v1/chat/completions": (_chat_faults, _chat, _chat_events),
    "/v1/responses": (_responses_faults, _response, _response_events),
    "/v1/messages": (_messages_faults, _message, _message_events),
}
