"""Estimates of tokens, and the bound of what a call can use."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    AnyMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_quota.estimates import (
    DEFAULT_MAX_TOKENS,
    MOST_PER_MEDIUM,
    estimated_usage,
    usage_bound,
)
from langchain_quota.model_runs import ModelRunCollector
from langchain_quota.model_usage import ModelUsage
from langchain_quota.testing import ScriptedChatModel


def estimated(text: Any) -> int:
    return estimated_usage(ModelUsage(), [], [AIMessage(text)]).output_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The quick brown fox jumps over the lazy dog. ", 15),
        ("1234567890", 4),
        ("敏捷的棕色狐狸跳过了懒狗", 12),
        ("😀" * 9, 12),
        ("", 0),
        ("\ud800", 1),
    ],
    ids=["English", "digits", "Chinese", "emoji", "nothing", "broken"],
)
def test_texts_are_estimated(text: str, tokens: int) -> None:
    """Three bytes of text are a token."""
    assert estimated(text) == tokens


def test_all_that_is_sent_is_estimated() -> None:
    """The prompt has its messages, calls, results, images and tools; the answer its calls."""
    call = {"name": "search", "args": {"query": "weather"}, "id": "1"}
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    prompt = [HumanMessage("Hello!")]

    def given(*more: AnyMessage, tools: object = None) -> int:
        return estimated_usage(ModelUsage(), [*prompt, *more], [], tools=tools).input_tokens

    plain = given()
    assert given(AIMessage("", tool_calls=[call])) > plain + 10
    assert given(ToolMessage("sunny", tool_call_id="1")) > plain
    assert given(HumanMessage([image])) == plain + 1_000
    assert given(tools=[{"name": "search", "description": "Search."}]) > plain + 10
    usage = estimated_usage(
        ModelUsage(request_model="m"), prompt, [AIMessage("", tool_calls=[call])]
    )
    assert usage.output_tokens > 10
    assert usage.estimated
    assert usage.request_model == "m"
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_all_that_has_arrived_is_estimated() -> None:
    """Texts, thoughts and arguments of calls count, once; a report of a part is taken."""

    def arrived(*chunks: AIMessageChunk) -> ModelUsage:
        collector, run_id = ModelRunCollector(), uuid4()
        collector.on_chat_model_start(None, [[]], run_id=run_id)
        for chunk in chunks:
            collector.on_llm_new_token("", run_id=run_id, chunk=ChatGenerationChunk(message=chunk))
        return collector.runs()[0].usage

    said = "The quick brown fox. "
    call = tool_call_chunk(name=None, args=said, index=1)
    delta = {"type": "input_json_delta", "partial_json": said, "index": 1}
    blocks: list[Any] = [{"type": "text", "text": said}, {"type": "thinking", "thinking": said}]
    plain = arrived(AIMessageChunk(content=said * 3)).output_tokens
    parts = [AIMessageChunk(content=[each]) for each in blocks]
    called = AIMessageChunk(content=[delta], tool_call_chunks=[call])
    assert arrived(*parts, called).output_tokens == plain
    used: Any = {"input_tokens": 50, "output_tokens": 1, "total_tokens": 51}
    more: Any = {"input_tokens": 0, "output_tokens": 9, "total_tokens": 9}
    reported = arrived(
        AIMessageChunk(content="a", usage_metadata=used, response_metadata={"model_name": "m"}),
        AIMessageChunk(content="b", usage_metadata=more, response_metadata={"model_name": "m"}),
    )
    assert (reported.input_tokens, reported.output_tokens) == (50, 10)
    assert (reported.response_model, reported.estimated) == ("m", True)


# The bound before a call.


class Capped(ScriptedChatModel):
    """A model with a limit of its answers."""

    max_tokens: int | None = None
    model_kwargs: Mapping[str, Any] = {}
    extra_body: Mapping[str, Any] | None = None
    service_tier: str | None = None
    provider: str = "mine"

    def _get_ls_params(self, stop: list[str] | None = None, **settings: Any) -> LangSmithParams:
        return LangSmithParams(ls_provider=self.provider, ls_model_name="small")


@tool
def search(query: str) -> str:
    """Search the web for a query, and give the first result."""
    return "found"


def request(
    *messages: AnyMessage,
    model: Capped | None = None,
    settings: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
    system: str = "",
    response_format: Any = None,
) -> ModelRequest[Any]:
    return ModelRequest(
        model=model or Capped(script=[]),
        messages=[*messages],
        model_settings=dict(settings or {}),
        tools=[*tools],
        system_message=SystemMessage(system) if system else None,
        response_format=response_format,
    )


def answer(total: int, *, provider: str = "") -> AIMessage:
    usage: Any = {"input_tokens": total - 1, "output_tokens": 1, "total_tokens": total}
    metadata = {"model_provider": provider} if provider else {}
    return AIMessage("Hi.", usage_metadata=usage, response_metadata=metadata)


def test_without_a_report_all_bytes_are_counted() -> None:
    """The first call's input is at most the bytes of all that is sent."""
    bare = usage_bound(request(HumanMessage("é" * 1_000))).input_tokens
    assert 2_000 <= bare < 2_050
    assert (
        usage_bound(request(HumanMessage("é" * 1_000), system="x" * 500)).input_tokens >= bare + 500
    )
    assert (
        usage_bound(request(HumanMessage("é" * 1_000), tools=[search])).input_tokens >= bare + 1_050
    )


def test_the_newest_report_counts() -> None:
    """Answers without a report, by people or other programs, are newer bytes."""
    bound = usage_bound(request(answer(100), answer(200), AIMessage("x" * 70))).input_tokens
    assert 270 <= bound < 300


@pytest.mark.parametrize(
    ("reported_by", "asked", "least"),
    [
        ("mine", "mine", 2_000),
        ("", "mine", 2_000),
        ("openai", "azure", 2_000),
        ("other", "mine", 9_000),
    ],
)
def test_a_report_of_another_provider_does_not_count(
    reported_by: str, asked: str, least: int
) -> None:
    """Another provider's tokens are not this one's: the bytes are counted again."""
    messages: list[AnyMessage] = [HumanMessage("z" * 9_000), answer(2_000, provider=reported_by)]
    bound = usage_bound(request(*messages, model=Capped(script=[], provider=asked)))
    assert least <= bound.input_tokens < least + 100


@pytest.mark.parametrize(
    "reported",
    [
        {"input_tokens": 150, "output_tokens": 50, "total_tokens": 200},
        {"input_tokens": -20_000, "output_tokens": 1, "total_tokens": -20_000},
        {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},
        {"input_tokens": "many", "output_tokens": 1, "total_tokens": "many"},
    ],
    ids=["too few", "negative", "nothing", "text"],
)
def test_a_report_that_cannot_be_of_this_history_does_not_count(reported: Any) -> None:
    """A sub-agent's answer, or a client's history, may have any report: bytes are counted then."""
    old = AIMessage("Found.", name="researcher")
    old.usage_metadata = reported
    bound = usage_bound(request(HumanMessage("z" * 9_000), old, HumanMessage("Go on.")))
    assert 9_000 <= bound.input_tokens < 9_100


def test_a_report_has_a_token_for_each_message() -> None:
    """Many short messages are more tokens than a report of one call says."""
    short: list[AnyMessage] = [HumanMessage("a") for _ in range(50)]
    assert usage_bound(request(*short, answer(20))).input_tokens > 50 * 2
    assert usage_bound(request(*short, answer(60))).input_tokens < 60 + 20


def test_media_have_a_bound_of_their_own() -> None:
    """Neither an address nor a small file says how many tokens an image is."""
    linked = {"type": "image_url", "image_url": {"url": "https://example.org/" + "a" * 500}}
    inline = {"type": "image", "base64": "A" * 200, "mime_type": "image/png"}
    large = {"type": "file", "base64": "A" * 90_000, "mime_type": "application/pdf"}
    for block, most in ((linked, MOST_PER_MEDIUM), (inline, MOST_PER_MEDIUM), (large, 90_000)):
        bound = usage_bound(request(HumanMessage([block]))).input_tokens
        assert most <= bound < most + 100


class Weather(BaseModel):
    """The weather of a city, as a long description says it."""

    city: str
    degrees: int


@pytest.mark.parametrize("strategy", [AutoStrategy, ProviderStrategy, ToolStrategy])
def test_a_schema_is_sent_too(strategy: Any) -> None:
    """The schema of a structured response is part of what is sent."""
    bare = usage_bound(request(HumanMessage("Hi!"))).input_tokens
    bound = usage_bound(request(HumanMessage("Hi!"), response_format=strategy(Weather)))
    assert bound.input_tokens > bare + 100


@pytest.mark.parametrize(
    ("settings", "own", "profile", "most"),
    [
        ({"max_tokens": 7}, 50, {"max_output_tokens": 900}, 7),
        ({"max_completion_tokens": 8}, None, {}, 8),
        ({"max_tokens": 7, "n": 3}, None, {}, 21),
        ({}, 50, {"max_output_tokens": 900}, 50),
        ({}, None, {"max_output_tokens": 900}, 900),
        ({}, None, {}, DEFAULT_MAX_TOKENS),
        ({}, None, None, DEFAULT_MAX_TOKENS),
        ({"max_tokens": -5}, 50, {}, 50),
        ({"max_tokens": 7, "extra_body": {"max_tokens": 80}}, 50, {}, 80),
        ({"extra_body": {"max_tokens": 80}}, None, {}, 80),
    ],
)
def test_the_answer_is_bounded(settings: Any, own: Any, profile: Any, most: int) -> None:
    """The limit of an answer is the request's, the model's, or that of its profile."""
    model = Capped(script=[], max_tokens=own, profile=profile)
    bound = usage_bound(request(HumanMessage("Hi!"), model=model, settings=settings))
    assert bound.output_tokens == most
    assert bound.total_tokens == bound.input_tokens + most
    assert bound.estimated


def test_what_a_model_sends_beside_its_fields_counts() -> None:
    """Some models keep settings of theirs in `model_kwargs` or `extra_body`."""
    model = Capped(script=[], model_kwargs={"speed": "fast", "n": 2}, extra_body={"max_tokens": 9})
    bound = usage_bound(request(HumanMessage("Hi!"), model=model))
    assert (bound.speed, bound.output_tokens) == ("fast", 18)
    slow = usage_bound(request(HumanMessage("Hi!"), model=model, settings={"speed": "standard"}))
    assert slow.speed == "standard"
