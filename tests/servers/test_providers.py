"""What agents under limits send is what OpenAI's and Anthropic's APIs accept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from tests.servers.providers import Provider, Turn, running_provider
from tests.signals import Signals, needs_inline

openai = pytest.importorskip("langchain_openai")
anthropic = pytest.importorskip("langchain_anthropic")

Make = Callable[..., BaseChatModel]
KEY = SecretStr("none")


@pytest.fixture(scope="module")
def server() -> Iterator[Provider]:
    with running_provider() as provider:
        yield provider


def chat(url: str, **options: Any) -> Any:
    return openai.ChatOpenAI(
        model="gpt-4o", base_url=f"{url}/v1", api_key=KEY, max_retries=0, **options
    )


def responses(url: str, **options: Any) -> Any:
    return chat(url, use_responses_api=True, **options)


def messages(url: str, **options: Any) -> Any:
    return anthropic.ChatAnthropic(
        model="claude-of-the-tests",
        max_tokens=100,
        base_url=url,
        api_key=KEY,
        max_retries=0,
        **options,
    )


apis = pytest.mark.parametrize("api", [chat, responses, messages])


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def calc(term: str = "") -> list[dict[str, Any]]:
    """Calculate."""
    return [{"type": "text", "text": "42"}]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Two turns of an agent on one thread.

    Attributes:
        limits: Its limits.
        script: What the model answers to all requests.
        streamed: Whether its answers are streamed.
        options: Options of the middleware.
    """

    limits: Sequence[Limit]
    script: Sequence[Turn]
    streamed: bool
    options: dict[str, Any] = field(default_factory=dict)


BOTH = {"tell_model": True, "hide_exhausted": True}
BATCH = ["search", "search", "calc"]
SITUATIONS = {
    "continue": Situation(
        limits=[ToolCallLimit("search", run_limit=1)],
        script=[BATCH, ["search"], "done", BATCH, "done"],
        streamed=True,
        options={"tell_model": True},
    ),
    "continue, hidden": Situation(
        limits=[ToolCallLimit(run_limit=3), ModelCallLimit(run_limit=9, near=0.1)],
        script=[BATCH, ["search"], "done", ["calc"], "done"],
        streamed=False,
        options=BOTH,
    ),
    "end": Situation(
        limits=[ToolCallLimit("search", run_limit=1, exit_behavior="end")],
        script=[["search", "calc"], ["search", "calc"], ["calc"], "done"],
        streamed=False,
        options=BOTH,
    ),
    "end, model": Situation(
        limits=[ModelCallLimit(run_limit=2)],
        script=[BATCH, ["calc"], ["search"], "done"],
        streamed=True,
        options={"tell_model": True},
    ),
    "error": Situation(
        limits=[ToolCallLimit("search", run_limit=2, exit_behavior="error")],
        script=[BATCH, BATCH, ["calc"], "done"],
        streamed=True,
        options=BOTH,
    ),
    "finalize": Situation(
        limits=[ModelCallLimit(run_limit=2, exit_behavior="finalize")],
        script=[BATCH, ["search", "calc"], BATCH, "done"],
        streamed=False,
    ),
    "give_up_after": Situation(
        limits=[ToolCallLimit("search", run_limit=1, give_up_after=2)],
        script=[["search"], ["search"], ["search", "calc"], ["calc"], "done"],
        streamed=True,
        options={"tell_model": True},
    ),
}


@pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
@pytest.mark.parametrize("situation", SITUATIONS)
@apis
async def test_every_request_is_accepted(
    api: Make, situation: str, kind: Any, server: Provider, signals: Signals
) -> None:
    """Whatever ends a run, and whatever the model is told, the provider refuses no request."""
    given = SITUATIONS[situation]
    server.play(given.script)
    agent: Any = create_agent(
        api(server.url, streaming=given.streamed),
        [search, calc],
        system_prompt="Be brief.",
        middleware=[kind(given.limits, telemetry=signals.telemetry, **given.options)],
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "thread-1"}}

    raised = 0
    for text in ("one", "two"):
        try:
            await agent.ainvoke({"messages": [("user", text)]}, config)
        except ToolCallLimitExceededError:
            raised += 1

    assert server.refused == []
    assert len(server.requests) == len(given.script)
    assert raised == (situation == "error")
    assert all(bool(each.get("stream")) is given.streamed for each in server.requests)


@apis
async def test_what_the_provider_can_cache(api: Make, server: Provider, signals: Signals) -> None:
    """With a note in each request it begins as the one before did, but for its newest message."""
    server.play([*[["search", "calc"]] * 4, "done"])
    limits = [ModelCallLimit(run_limit=9, near=0.1)]
    quota = QuotaMiddleware(limits, tell_model=True, telemetry=signals.telemetry)
    agent: Any = create_agent(api(server.url), [search, calc], middleware=[quota])

    await agent.ainvoke({"messages": [("user", "hi")]})

    sent = [each.get("messages") or each["input"] for each in server.requests]
    assert [str(each).count("Budget: ") for each in sent] == [1] * 5
    for earlier, later in pairwise(sent):
        assert later[: len(earlier) - 1] == earlier[:-1]
    assert len({str(each["tools"]) for each in server.requests}) == 1


def asked(*ids: str) -> list[BaseMessage]:
    calls: Any = [{"name": "search", "args": {}, "id": each, "type": "tool_call"} for each in ids]
    return [HumanMessage("hi"), AIMessage("", tool_calls=calls)]


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
        model = api(server.url).bind_tools([search])
        server.play(["done", "done"])
        assert model.invoke(VALID).text == "done"
        if api in by:
            with pytest.raises(Exception, match=why):
                model.invoke(sent)
            assert len(server.refused) >= 1
        else:
            assert model.invoke(sent).text == "done"


def test_anthropic_wants_tools_where_there_are_calls(server: Provider) -> None:
    """A history with calls is refused without tools, which therefore stay offered."""
    server.play(["done"])
    with pytest.raises(Exception, match="tools"):
        messages(server.url).invoke(VALID)
