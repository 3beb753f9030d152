"""A server that checks and answers as the APIs of OpenAI, Anthropic and Gemini do, by a script."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from string import Template
from threading import Event
from typing import Any, Literal

import yaml

from tests.web import Request, serving

Body = Mapping[str, Any]
Call = tuple[str, Body]
AZURE = "/openai/deployments/"
"""How paths on Azure begin, which has Chat Completions by deployment."""
_FORMATS: Mapping[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "assets" / "provider.yaml").read_text()
)
_CUMULATIVE = {
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    *("output_tokens", "output_tokens_details"),
}
"""What Anthropic tells at the end of a stream, too."""
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
        api = _FORMATS[path]
        if found := [*_FAULTS[path](body)]:
            self.refused += found
            error = {"type": "invalid_request_error", "message": found[0]}
            return 400, [json.dumps({"type": "error", "error": error})], bool
        self.requests.append(body)
        answer = self._answers.pop(0)
        if answer.status != 200:
            return answer.status, [json.dumps(_FORMATS["/v1/messages"]["fails"])], bool
        told = _Told(api, answer)
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            parts = [*map(_event, told.events(with_usage=with_usage))][: answer.stops_after]
            parts += [_event(api["fails"])] * (answer.then == "fail")
        else:
            parts = [json.dumps(told.at_once())][: answer.stops_after]
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


class _Told:
    """An answer in the format of an API."""

    def __init__(self, api: Body, answer: Answer) -> None:
        self._api, self._words = api, [f"{word} " for word in answer.text.split()]
        usage = answer.usage or {}
        cumulative = {key: value for key, value in usage.items() if key in _CUMULATIVE}
        self._values: dict[str, Any] = {
            "number": next(_ids),
            "text": answer.text or None,
            "model": answer.model,
            "stop": api["stops"][bool(answer.calls)],
            "tier": answer.service_tier,
            "served": answer.service_tier or "default",
            "usage": answer.usage,
            "some_usage": answer.usage or {"input_tokens": 1, "output_tokens": 1},
            "usage_at_start": {**usage, "output_tokens": 1},
            "usage_at_end": {"output_tokens": 1, **cumulative},
        }
        parts: list[tuple[str, Body]] = [("text", {"text": answer.text})] if answer.text else []
        for number, (name, args) in enumerate(answer.calls):
            called = {"name": name, "args": args, "arguments": json.dumps(args), "call": number}
            parts.append(("call", called))
        self._parts: list[tuple[str, dict[str, Any]]] = []
        for index, (kind, own) in enumerate(parts):
            values = {**self._values, **own, "index": index, "part": next(_ids)}
            self._parts.append((kind, {**values, "item": _filled(api[kind], values)}))
        for of, kinds in (("parts", ("text", "call")), ("calls", ("call",))):
            self._values[of] = [own["item"] for kind, own in self._parts if kind in kinds]

    def at_once(self) -> Body:
        """All of it."""
        return dict(_filled(self._api["at_once"], self._values))

    def events(self, *, with_usage: bool) -> Iterator[Body | str]:
        """The events of a stream."""
        templates = [(each, self._values) for each in self._api["start"]]
        for kind, values in self._parts:
            for each in self._api[f"of_{kind}"]:
                words = self._words if "$word" in str(each) else [""]
                templates += [(each, {**values, "word": word}) for word in words]
        values = {**self._values, "asked_usage": self._values["usage"]}
        for each in self._api["end"]:
            if "$asked_usage" not in str(each) or (with_usage and values["usage"]):
                templates.append((each, values))
        for number, (each, values) in enumerate(templates):
            yield _filled(each, {**values, "count": number})


def _filled(template: Any, values: Body) -> Any:
    """A template with values in place of their names."""
    if isinstance(template, Mapping):
        return {
            key: _filled(each, values)
            for key, each in template.items()
            if not str(each).endswith("_if_any") or values[_named(each)]
        }
    if isinstance(template, list):
        return [_filled(each, values) for each in template]
    if isinstance(template, str) and template.startswith("$"):
        return values[_named(template)]
    return Template(template).substitute(values) if isinstance(template, str) else template


def _named(template: str) -> str:
    return template.removeprefix("$").removesuffix("_if_any")


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


_FAULTS: Mapping[str, Callable[[Body], Iterator[str]]] = {
    "/v1/models/gemini:generateContent": _gemini_faults,
    "/v1/chat/completions": _chat_faults,
    "/v1/responses": _responses_faults,
    "/v1/messages": _messages_faults,
}
