"""What agents under limits send is what the APIs of OpenAI, Anthropic and Gemini accept."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from langchain_quota import ModelCallLimit, ToolCallLimit, ToolCallLimitExceededError
from tests.clients import Make, apis, chat, gemini, messages, responses
from tests.provider import Answer, Provider, calls, running_provider
from tests.scene import Kind, Scene
from tests.telemetry import HAS_INLINE, Signals


@pytest.fixture(scope="module")
def server() -> Iterator[Provider]:
    with running_provider() as provider:
        yield provider


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def calc(term: str = "") -> list[dict[str, Any]]:
    """Calculate."""
    return [{"type": "text", "text": "42"}]


TELL, BOTH = {"tell_model": True}, {"tell_model": True, "hide_exhausted": True}
DONE, SEARCH, CALC = Answer(text="done"), calls("search"), calls("calc")
BATCH, PAIR = calls("search", "search", "calc"), calls("search", "calc")
ONCE: dict[str, Any] = {"tool_name": "search", "run_limit": 1}
MODEL = ModelCallLimit(run_limit=9, near=0.1)
SITUATIONS: dict[str, tuple[Any, list[Answer], bool, Any]] = {
    "continue": ([ToolCallLimit(**ONCE)], [BATCH, SEARCH, DONE, BATCH, DONE], True, TELL),
    "hidden": ([ToolCallLimit(run_limit=3), MODEL], [BATCH, SEARCH, DONE, CALC, DONE], False, BOTH),
    "end": ([ToolCallLimit(**ONCE, exit_behavior="end")], [PAIR, PAIR, CALC, DONE], False, BOTH),
    "end, model": ([ModelCallLimit(run_limit=2)], [BATCH, CALC, SEARCH, DONE], True, TELL),
    "error": (
        *([ToolCallLimit("search", run_limit=2, exit_behavior="error")],),
        *([BATCH, BATCH, CALC, DONE], True, BOTH),
    ),
    "finalize": (
        *([ModelCallLimit(run_limit=2, exit_behavior="finalize")],),
        *([BATCH, PAIR, BATCH, DONE], False, {}),
    ),
    "give_up_after": (
        *([ToolCallLimit(**ONCE, give_up_after=2)],),
        *([SEARCH, SEARCH, PAIR, CALC, DONE], True, TELL),
    ),
}
"""Two turns of an agent: its limits, what the model answers, whether in streams, and options."""
KINDS: list[Kind] = ["quota", "inline"] if HAS_INLINE else ["quota"]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("api", [chat, responses, messages, gemini])
async def test_every_request_is_accepted(
    api: Make, situation: str, server: Provider, signals: Signals
) -> None:
    """Whatever ends a run, and whatever the model is told, the provider refuses no request.

    Nor is it sent the data that says why a limit stopped a call.
    """
    limits, script, streamed, options = SITUATIONS[situation]
    # Where nothing raises, the inline one sends the same: tests/property/test_forms.py.
    for kind in KINDS if situation == "error" else KINDS[:1]:
        server.play(*script)
        model = api(server.url, streaming=streamed)
        given = {"tools": [search, calc], "system_prompt": "Be brief.", **options}
        scene = Scene(signals, model, limits, kind=kind, **given)

        raised = 0
        for text in ("one", "two"):
            try:
                await scene.play(text)
            except ToolCallLimitExceededError:
                raised += 1

        assert server.refused == []
        assert len(server.requests) == len(script)
        assert raised == (situation == "error")
        assert api is gemini or {bool(each.get("stream")) for each in server.requests} == {streamed}
        assert ("langchain_quota_stop" in str(scene.state()["messages"])) is not bool(raised)
        assert "langchain_quota" not in str(server.requests)


@apis
async def test_what_the_provider_can_cache(api: Make, server: Provider, signals: Signals) -> None:
    """With a note in each request it begins as the one before did, but for its newest message."""
    server.play(*[PAIR] * 4, DONE)
    limits = [ModelCallLimit(run_limit=9, near=0.1)]
    scene = Scene(signals, api(server.url), limits, tools=[search, calc], tell_model=True)

    await scene.play()

    sent = [each.get("messages") or each["input"] for each in server.requests]
    assert [str(each).count("Budget: ") for each in sent] == [1] * 5
    for earlier, later in pairwise(sent):
        assert later[: len(earlier) - 1] == earlier[:-1]
    assert len({str(each["tools"]) for each in server.requests}) == 1


def asked(*ids: str) -> list[BaseMessage]:
    called: Any = [{"name": "search", "args": {}, "id": each, "type": "tool_call"} for each in ids]
    return [HumanMessage("hi"), AIMessage("", tool_calls=called)]


def answered(*ids: str) -> list[BaseMessage]:
    return [ToolMessage("found", tool_call_id=each) for each in ids]


VALID = [SystemMessage("Be brief."), *asked("a", "b"), *answered("a", "b"), HumanMessage("and?")]
NOTE_BETWEEN = [*asked("a", "b"), *answered("a"), HumanMessage("Budget: 1."), *answered("b")]


@pytest.mark.parametrize(
    ("sent", "why", "by"),
    [
        ([HumanMessage("hi"), *answered("a")], "tool", (chat, responses, messages)),
        ([*asked("a"), *answered("a", "a")], "tool", (chat, responses, messages)),
        ([*asked("a", "b"), *answered("a")], "tool", (chat, responses, messages)),
        ([*asked("a"), HumanMessage("and?")], "tool", (chat, responses, messages)),
        (NOTE_BETWEEN, "tool", (chat, messages)),
        ([*VALID, AIMessage("so"), HumanMessage(" ")], "empty", (messages,)),
        ([AIMessage("Hello!"), HumanMessage("hi")], "turns", (messages,)),
    ],
)
def test_the_server_is_strict(sent: Any, why: str, by: Sequence[Make], server: Provider) -> None:
    """It refuses what the real APIs refuse, as the real packages send it, and nothing else."""
    for api in (chat, responses, messages):
        model: Any = api(server.url).bind_tools([search])
        server.play(DONE, DONE)
        assert model.invoke(VALID).text == "done"
        if api in by:
            with pytest.raises(Exception, match=why):
                model.invoke(sent)
            assert server.refused
        else:
            assert model.invoke(sent).text == "done"
    # Anthropic wants tools where there are calls, which therefore stay offered.
    with pytest.raises(Exception, match="tools"):
        messages(server.url).invoke(VALID)
