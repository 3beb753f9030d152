"""A server that checks and answers as the APIs of OpenAI, Anthropic and Gemini do, by a script."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Event
from typing import Any, Literal

from tests.web import Request, serving

Body = Mapping[str, Any]
Call = tuple[str, Body]
AZURE = "/openai/deployments/"
"""How paths on Azure begin, which has Chat Completions by deployment."""
_ids = count(1)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, whose words are streamed one by one; what is empty it does not report."""

    text: str = "Good day to you."
    calls: Sequence[Call] = ()
    usage: Body | None = None
    model: str = "gpt-4o-2024-08-06"
    service_tier: str = ""
    status: int = 200
    stops_after: int | None = None
    """How many events it streams before it waits; where nothing is streamed it waits at once."""
    then: Literal["wait", "close", "fail"] = "wait"


def calls(*names: str) -> Answer:
    """An answer that calls these tools at once, and says nothing."""
    return Answer(text="", calls=[(name, {}) for name in names])


class Provider:
    """What a server has been asked, and what it answers."""

    ahead = 0.0
    """By how many seconds its clock is ahead."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._over = Event()
        self.play()

    def play(self, *answers: Answer) -> None:
        """Begin anew, with a script."""
        self.let_go()
        self.requests: list[Body] = []
        self.refused: list[str] = []  # why
        self._answers, self._over = [*answers], Event()

    def let_go(self) -> None:
        """End all answers that wait."""
        self._over.set()

    def answer(self, path: str, body: Body) -> tuple[int, Sequence[str], Callable[[], object]]:
        """The status and the parts of an answer, as far as they are sent, and what comes then."""
        path = "/v1/chat/completions" if path.startswith(AZURE) else path
        faults, whole, events = _APIS[path]
        if found := [*faults(body)]:
            self.refused += found
            error = {"type": "invalid_request_error", "message": found[0]}
            return 400, [json.dumps({"type": "error", "error": error})], bool
        self.requests.append(body)
        answer = self._answers.pop(0)
        if answer.status != 200:
            return answer.status, [json.dumps({"type": "error", "error": _ERROR})], bool
        if body.get("stream"):
            parts = [*map(_event, events(answer, whole(answer), body))][: answer.stops_after]
            parts += [_event(_FAILED[path])] * (answer.then == "fail")
        else:
            parts = [json.dumps(whole(answer))][: answer.stops_after]
        over = self._over
        waits = answer.stops_after is not None and answer.then == "wait"
        return 200, parts, (lambda: over.wait(60)) if waits else bool


@contextmanager
def running_provider(kind: Callable[[str], Any] = Provider) -> Iterator[Any]:
    """A server on a free port of this machine."""

    def answer(request: Request) -> None:
        body = json.loads(request.body)
        status, parts, then = provider.answer(request.path, body)
        streamed = status == 200 and body.get("stream")
        if parts:
            media = "text/event-stream" if streamed else "application/json"
            date = request.date_time_string(time.time() + provider.ahead)
            more: dict[str, str] = getattr(provider, "headers", dict)()
            request.reply(status, {"Content-Type": media, "Date": date, **more})
        for part in parts:
            with suppress(ConnectionError):  # who asks may have gone
                request.wfile.write(part.encode())
        then()

    with serving(answer) as url:
        provider = kind(url)
        try:
            yield provider
        finally:
            provider.let_go()


def _event(data: Body | str) -> str:
    if isinstance(data, str):
        return f"data: {data}\n\n"
    named = f"event: {data['type']}\n" if "type" in data else ""
    return f"{named}data: {json.dumps(data)}\n\n"


def _words(text: str) -> list[str]:
    return [f"{word} " for word in text.split()]


def _tool_faults(body: Body, *, has_calls: bool = False) -> Iterator[str]:
    if body.get("tools") == []:
        yield "tools: [] is too short"
    if body.get("tool_choice") and not body.get("tools"):
        yield "tool_choice: only allowed when tools are given"
    if has_calls and not body.get("tools"):
        yield "tools: must be given where messages have calls of tools"


def _chat_faults(body: Body) -> Iterator[str]:
    yield from _tool_faults(body)
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


def _chat(answer: Answer) -> Body:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    calls = [{"name": name, "arguments": json.dumps(args)} for name, args in answer.calls]
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{next(_ids)}", "type": "function", "function": each} for each in calls
        ]
    reason = "tool_calls" if calls else "stop"
    return {
        # LangChain takes some ids for those of its own messages.
        "id": f"id_{next(_ids)}",
        "object": "chat.completion",
        "created": 1,
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        **({"service_tier": answer.service_tier} if answer.service_tier else {}),
        **({"usage": answer.usage} if answer.usage else {}),
    }


def _chat_events(answer: Answer, whole: Body, body: Body) -> Iterator[Body | str]:
    """Words, calls, the end, and only for who asks for it the usage, without a choice."""
    head = {**whole, "object": "chat.completion.chunk"}
    head.pop("usage", None)
    (choice,) = whole["choices"]
    wanted = (body.get("stream_options") or {}).get("include_usage")
    none_yet = {"usage": None} if wanted else {}
    deltas: list[Body] = [{"role": "assistant", "content": each} for each in _words(answer.text)]
    for index, call in enumerate(choice["message"].get("tool_calls", ())):
        deltas.append({"role": "assistant", "tool_calls": [{**call, "index": index}]})
    for delta, reason in [*((each, None) for each in deltas), ({}, choice["finish_reason"])]:
        streamed = {"index": 0, "delta": delta, "finish_reason": reason}
        yield {**head, "choices": [streamed], **none_yet}
    if wanted and answer.usage:
        yield {**head, "choices": [], "usage": answer.usage}
    yield "[DONE]"


def _responses_faults(body: Body) -> Iterator[str]:
    yield from _tool_faults(body)
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


def _response(answer: Answer) -> dict[str, Any]:
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [part]}
    output: list[dict[str, Any]] = [said] if answer.text else []
    output += [
        {"type": "function_call", "name": name, "arguments": json.dumps(args)}
        for name, args in answer.calls
    ]
    for item in output:
        number = next(_ids)
        item |= {"id": f"item_{number}", "status": "completed"}
        if item["type"] == "function_call":
            item["call_id"] = f"call_{number}"
    constant = {"object": "response", "created_at": 1, "status": "completed", "tools": []}
    return {
        **constant,
        "id": f"resp_{next(_ids)}",
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "usage": answer.usage,
        "service_tier": answer.service_tier or "default",
    }


def _response_events(answer: Answer, whole: Body, body: Body) -> Iterator[Body]:
    begun: Body = {"output": [], "status": "in_progress", "usage": None, "service_tier": "auto"}
    events: list[tuple[str, Body]] = [("created", {"response": {**whole, **begun}})]
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            at = {**place, "content_index": 0}
            words = [{**at, "delta": each, "logprobs": []} for each in _words(answer.text)]
            events += [
                ("output_item.added", {"output_index": index, "item": {**item, "content": []}}),
                ("content_part.added", {**at, "part": {**part, "text": ""}}),
                *(("output_text.delta", each) for each in words),
                ("output_text.done", {**at, "text": part["text"], "logprobs": []}),
                ("content_part.done", {**at, "part": part}),
            ]
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            events += [
                ("output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}),
                ("function_call_arguments.delta", {**place, "delta": item["arguments"]}),
                ("function_call_arguments.done", {**place, **given}),
            ]
        events.append(("output_item.done", {"output_index": index, "item": item}))
    events.append(("completed", {"response": whole}))
    for number, (kind, data) in enumerate(events):
        yield {"type": f"response.{kind}", "sequence_number": number, **data}


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
        if not own or any(each["type"] == "text" and not each["text"].strip() for each in own):
            yield "messages and text content blocks must not be empty"
        if any(each.get("is_error") and not each["content"] for each in own):
            yield "tool_result: content must not be empty if is_error is true"
        open_uses = [block["id"] for block in own if block["type"] == "tool_use"]
    if open_uses:
        yield f"tool_use ids {open_uses} must have one tool_result each, and have none"


def _message(answer: Answer) -> dict[str, Any]:
    content: list[Body] = [{"type": "text", "text": answer.text}] if answer.text else []
    content += [
        {"type": "tool_use", "id": f"call_{next(_ids)}", "name": name, "input": args}
        for name, args in answer.calls
    ]
    return {
        "id": f"msg_{next(_ids)}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": "tool_use" if answer.calls else "end_turn",
        "stop_sequence": None,
        "usage": answer.usage or {"input_tokens": 1, "output_tokens": 1},
    }


def _message_events(answer: Answer, whole: Body, body: Body) -> Iterator[Body]:
    """The usage of the prompt first, and at the end all of it, but for how long it is cached."""
    usage = dict(answer.usage or {})
    begun = {**whole, "content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        deltas: list[Body] = [{"type": "text_delta", "text": each} for each in _words(answer.text)]
        start = {**block, "text": ""}
        if block["type"] == "tool_use":
            start = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stopped = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    cumulative = {key: value for key, value in usage.items() if key in _CUMULATIVE}
    yield {"type": "message_delta", "delta": stopped, "usage": {"output_tokens": 1} | cumulative}
    yield {"type": "message_stop"}


_CUMULATIVE = {
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    *("output_tokens", "output_tokens_details"),
}
_ERROR = {"type": "overloaded_error", "message": "not now"}
_FAILED: Mapping[str, Body] = {
    "/v1/chat/completions": {"error": _ERROR},
    "/v1/responses": {"type": "error", "code": "server_error", "message": "not now", "param": None},
    "/v1/messages": {"type": "error", "error": _ERROR},
}
"""What goes wrong in the middle of a stream."""


def _gemini_faults(body: Body) -> Iterator[str]:
    yield from _tool_faults(body)
    asked: list[str] = []
    for content in body["contents"]:
        parts = content["parts"]
        if unknown := {*content} - {"role", "parts"} | {key for part in parts for key in part} - {
            *("text", "functionCall", "functionResponse", "thoughtSignature")
        }:
            yield f"unknown names: {unknown}"
        answers = [part["functionResponse"]["name"] for part in parts if "functionResponse" in part]
        if answers != asked:
            yield f"function responses {answers} must follow the function calls {asked}"
        if not parts or not all(part.get("text", "x") for part in parts):
            yield "contents and texts must not be empty"
        asked = [part["functionCall"]["name"] for part in parts if "functionCall" in part]


def _gemini(answer: Answer) -> Body:
    parts: list[Body] = [{"text": answer.text}] if answer.text else []
    parts += [{"functionCall": {"name": name, "args": args}} for name, args in answer.calls]
    return {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}


_APIS: Mapping[str, Any] = {
    "/v1/models/gemini:generateContent": (_gemini_faults, _gemini, None),
    "/v1/chat/completions": (_chat_faults, _chat, _chat_events),
    "/v1/responses": (_responses_faults, _response, _response_events),
    "/v1/messages": (_messages_faults, _message, _message_events),
}
