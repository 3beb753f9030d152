"""Tool calls without an id: they get one, are judged like any other, and run or are refused."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import langchain.agents.middleware as langchain_middleware
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolCall, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import add_messages
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.messages import ABANDONED, FINALIZED
from langchain_quota.quotas import Quota
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.conftest import Form, Order, in_order, orders
from tests.agent.rules import CONFIG, Scene, tool_limiter
from tests.examples import examples
from tests.signals import Signals, needs_inline

limiters = pytest.mark.parametrize(
    "kind", ["drop-in of a tool", "drop-in", "quota", pytest.param("inline", marks=needs_inline)]
)


def call(tool: str, call_id: str | None = None) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


def limiter(kind: str, signals: Signals, **limits: Any) -> AgentMiddleware[Any, Any, Any]:
    """A middleware that limits the calls of `search`."""
    telemetry = signals.telemetry
    match kind:
        case "drop-in of a tool":
            return ToolCallLimitMiddleware(tool_name="search", telemetry=telemetry, **limits)
        case "drop-in":
            return ToolCallLimitMiddleware(telemetry=telemetry, **limits)
        case "quota":
            return QuotaMiddleware([ToolCallLimit("search", **limits)], telemetry=telemetry)
        case _:
            return InlineQuotaMiddleware([ToolCallLimit("search", **limits)], telemetry=telemetry)


def check(scene: Scene) -> None:
    """Assert the rules, and that each call has an id of its own."""
    scene.check()
    histories: list[Sequence[Any]] = [each.messages for each in scene.model.calls]
    for messages in [*histories, scene.state()["messages"]]:
        for message in messages:
            if isinstance(message, AIMessage):
                ids = [each["id"] for each in message.tool_calls]
                assert all(ids), message
                assert len(set(ids)) == len(ids), message


@limiters
async def test_a_hundred_calls(kind: str, signals: Signals) -> None:
    """Of a hundred calls as many run as the limit admits, in each run; the others are refused."""
    hundred = [call("search"), call("search", "")] * 50
    scene = Scene(
        signals,
        [hundred, "done", hundred, "done"],
        [limiter(kind, signals, run_limit=2, thread_limit=3)],
    )

    await scene.turn()
    assert scene.ran == ["search"] * 2
    assert scene.answers().count(("search", "error")) == 98
    check(scene)

    await scene.turn()
    assert scene.ran == ["search"] * 3
    check(scene)


@limiters
async def test_a_thread_limit_of_0(kind: str, signals: Signals) -> None:
    """A forbidden tool does not run, however it is called."""
    scene = Scene(
        signals,
        [[call("search"), call("search", "")] * 50, "done"],
        [limiter(kind, signals, thread_limit=0)],
    )

    await scene.turn()

    assert scene.ran == []
    assert scene.answers() == [("search", "error")] * 100
    check(scene)


@limiters
async def test_the_end_of_a_run(kind: str, signals: Signals) -> None:
    """`end` answers them all, with those of tools that have no limit, and the thread goes on."""
    scene = Scene(
        signals,
        [[call("search"), call("search", ""), call("calc")], "done"],
        [limiter(kind, signals, run_limit=1, exit_behavior="end")],
    )

    result = await scene.turn()
    assert scene.ran == []
    assert len(scene.answers()) == 3
    assert "limit reached" in result["messages"][-1].text
    check(scene)

    await scene.turn()
    check(scene)


@limiters
async def test_an_error(kind: str, signals: Signals) -> None:
    """`error` raises; if its batch stays in the history, the next turn answers it, uncharged."""
    scene = Scene(
        signals,
        [[call("search"), call("search", ""), call("calc")], "done"],
        [limiter(kind, signals, run_limit=1, exit_behavior="error")],
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.ran == []
    check(scene)


async def test_an_error_with_other_calls_pending(signals: Signals) -> None:
    """`on_pending="raise"` raises where the pending calls have no id."""
    scene = Scene(
        signals,
        [[call("search"), call("calc")], "done"],
        [tool_limiter(signals, "search", run_limit=0, exit_behavior="end", on_pending="raise")],
    )

    with pytest.raises(NotImplementedError, match="calc"):
        await scene.turn()
    await scene.turn()

    assert scene.ran == []
    check(scene)


@pytest.mark.parametrize("kind", ["quota", pytest.param("inline", marks=needs_inline)])
async def test_finalize(kind: str, signals: Signals) -> None:
    """What the last model call of a budget asks for does not run, and is answered."""
    middleware = {"quota": QuotaMiddleware, "inline": InlineQuotaMiddleware}[kind]
    last = ModelCallLimit(run_limit=1, exit_behavior="finalize")
    scene = Scene(
        signals,
        [[call("search"), call("calc", "")], "done"],
        [middleware([last], telemetry=signals.telemetry)],
    )

    await scene.turn()
    assert scene.ran == []
    texts = [each.text for each in scene.state()["messages"] if isinstance(each, ToolMessage)]
    assert texts == [FINALIZED] * 2
    check(scene)

    await scene.turn()
    check(scene)


@orders(2)
async def test_two_limiters(order: Order, signals: Signals) -> None:
    """The limiter that judges second judges the same calls: each is answered and charged once."""
    scene = Scene(
        signals,
        [[call("search"), call("calc", ""), call("search", "")], "done"],
        in_order(
            order, tool_limiter(signals, "search", run_limit=1), tool_limiter(signals, run_limit=2)
        ),
    )

    with captured_decisions() as decisions:
        await scene.turn()

    check(scene)
    judged = {each.call.id for each in decisions if each.call.kind == "tool"}
    (asking,) = [each for each in scene.state()["messages"] if getattr(each, "tool_calls", None)]
    assert judged == {each["id"] for each in asking.tool_calls}


@limiters
async def test_a_mix(kind: str, signals: Signals) -> None:
    """Calls with an id keep it, those without get one, and the first ones run."""
    batch = [call("search", "a"), call("search"), call("search", ""), call("search", "b")]
    scene = Scene(signals, [batch, "done"], [limiter(kind, signals, run_limit=3)])

    with captured_decisions() as decisions:
        await scene.turn()

    outcomes = [(each.call.id, str(each.outcome)) for each in decisions if each.call.kind == "tool"]
    assert [outcome for _, outcome in outcomes] == ["allowed"] * 3 + ["blocked"]
    assert (outcomes[0][0], outcomes[3][0]) == ("a", "b")
    check(scene)


async def test_an_empty_id_that_is_answered(signals: Signals) -> None:
    """Beside a structured answer with an empty id LangChain runs no other call with one."""
    script = [[ToolCall(name="Weather", args={"degrees": 20}, id=""), call("search", "")]]
    scene = Scene(
        signals, script, [tool_limiter(signals, run_limit=1)], response_format=ToolStrategy(Weather)
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.ran == []
    assert scene.answers() == [("Weather", "success")]
    assert scene.metric("tool:*", "allowed") == 0


class Weather(BaseModel):
    """The weather."""

    degrees: int


@orders(2)
async def test_review(order: Order, signals: Signals) -> None:
    """Approved calls are judged, before or after the review."""
    scene = Scene(
        signals,
        [[call("search"), call("search", ""), call("search")], "done"],
        in_order(
            order, tool_limiter(signals, run_limit=1), HumanInTheLoopMiddleware({"search": True})
        ),
    )

    await scene.turn()
    await scene.resume({"decisions": [{"type": "approve"}] * 3})

    assert scene.ran == ["search"]
    check(scene)


async def test_a_review_behind_the_limiter(signals: Signals) -> None:
    """A reviewer who is asked after the limiter can reject and edit what had no id."""
    edited = {"type": "edit", "edited_action": {"name": "calc", "args": {}}}
    scene = Scene(
        signals,
        [[call("search"), call("search", "")], "done"],
        [HumanInTheLoopMiddleware({"search": True}), tool_limiter(signals, run_limit=2)],
    )

    await scene.turn()
    await scene.resume({"decisions": [{"type": "reject"}, edited]})

    assert scene.ran == ["calc"]
    assert sorted(scene.answers()) == [("calc", "success"), ("search", "error")]
    scene.check_requests()


@limiters
async def test_what_an_earlier_run_left(kind: str, signals: Signals) -> None:
    """A thread that LangChain left with calls without an id is one that a provider accepts."""
    saver = InMemorySaver()
    before = Scene(signals, [[call("search"), call("calc")]], [], checkpointer=saver)
    with pytest.raises((TypeError, ValueError), match=r"unexpected type|tool_call_id"):
        await before.turn()
    scene = Scene(signals, ["done"], [limiter(kind, signals, run_limit=2)], checkpointer=saver)

    await scene.turn()

    assert [each.type for each in scene.model.calls[0].messages] == [
        "human",
        "ai",
        "tool",
        "tool",
        "human",
    ]
    texts = [each.text for each in scene.state()["messages"] if isinstance(each, ToolMessage)]
    assert texts == [ABANDONED] * 2
    check(scene)


async def test_no_limit_for_them(signals: Signals) -> None:
    """Calls that no limit of a drop-in matches are left to LangChain, which fails; uncharged."""
    scene = Scene(signals, [[call("calc")], "done"], [tool_limiter(signals, "search", run_limit=1)])

    with pytest.raises((TypeError, ValueError), match=r"unexpected type|tool_call_id"):
        await scene.turn()

    assert scene.state().get("thread_tool_call_count", {}) == {}


async def test_no_limit_for_some(signals: Signals) -> None:
    """Beside a call that is limited, one that no limit matches gets an id, runs and is answered."""
    scene = Scene(
        signals,
        [[call("calc"), call("search")], "done"],
        [tool_limiter(signals, "search", run_limit=0)],
    )

    await scene.turn()

    assert scene.ran == ["calc"]
    check(scene)


async def test_a_store(signals: Signals) -> None:
    """A shared quota counts each of them, over threads and runs."""
    store = MemoryStore()
    limit = ToolCallLimit("search", quotas=[Quota(3)])
    scene = Scene(
        signals,
        [[call("search")] * 2, "done", [call("search", "")] * 2, "done"],
        [QuotaMiddleware([limit], store=store, telemetry=signals.telemetry)],
    )

    await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"] * 3
    assert [each.used for each in store.usages()] == [3]
    check(scene)


@limiters
async def test_what_a_client_is_streamed(kind: str, signals: Signals) -> None:
    """The message that gets the ids is not streamed to a client a second time."""
    scene = Scene(
        signals,
        [AIMessage("I search.", tool_calls=[call("search")], id="asking"), "done"],
        [limiter(kind, signals, run_limit=1)],
    )
    new_turn = {"messages": [("user", "hi")]}

    stream = scene.agent.astream(new_turn, CONFIG, stream_mode="messages")
    parts = [each async for each in stream]

    streamed = [part.text for part, _ in parts if part.id == "asking"]
    assert "".join(streamed) == "I search."
    check(scene)


class Witness(AgentMiddleware[Any, Any, Any]):
    """Sees what the model node gets, around the limiter."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        response = handler(request)
        self.answers.append(response.result)
        return response

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        response = await handler(request)
        self.answers.append(response.result)
        return response


@needs_inline
async def test_what_is_around_the_inline_limiter(signals: Signals) -> None:
    """A middleware around it sees each message once, with the ids."""
    witness = Witness()
    scene = Scene(
        signals,
        [[call("search"), call("search", "")], "done"],
        [witness, limiter("inline", signals, run_limit=1)],
    )

    await scene.turn()

    asked, refused = witness.answers[0]
    first, second = (each["id"] for each in asked.tool_calls)
    assert first
    assert refused.tool_call_id == second
    check(scene)


def judged(limiter: Any, messages: list[Any], **state: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """What a hook writes, and the history with it."""
    update = limiter.after_model({"messages": messages, **state}, None)
    return update, list(add_messages(messages, update.get("messages", [])))


@pytest.mark.parametrize("message_id", ["m", None])
@pytest.mark.parametrize("kind", ["drop-in of a tool", "drop-in", "quota"])
@pytest.mark.parametrize("form", ["sync", "async"])
async def test_a_hook_called_directly(
    form: Form, kind: str, message_id: str | None, signals: Signals
) -> None:
    """The update replaces the message in its place, and has the answers behind it."""
    hook: Any = limiter(kind, signals, run_limit=1)
    batch = [call("search"), call("search", ""), call("search", "a")]
    asked = AIMessage("I search.", tool_calls=batch, id=message_id)
    state: Any = {"messages": [HumanMessage("hi"), asked]}

    update = (
        hook.after_model(state, None) if form == "sync" else await hook.aafter_model(state, None)
    )

    assert [each.type for each in update["messages"]] == ["ai", "tool", "tool"]
    assert asked.tool_calls == batch
    merged: Any = add_messages(state["messages"], update["messages"])
    assert [each.type for each in merged] == ["human", "ai", "tool", "tool"]
    first, second, third = (each["id"] for each in merged[1].tool_calls)
    assert third == "a"
    assert [each.tool_call_id for each in merged[2:]] == [second, "a"]
    assert first
    assert update["langchain_quota"]["run_tools"] in ({"__all__": 1}, {"search": 1})


def test_a_hook_that_runs_again(signals: Signals) -> None:
    """The same state gets the same ids, so that what runs again is known again."""
    drop_in = tool_limiter(signals, run_limit=1)
    messages = [HumanMessage("hi"), AIMessage("", tool_calls=[call("search")] * 3, id="m")]

    first, history = judged(drop_in, messages)
    second, again = judged(drop_in, messages)

    assert [each.tool_calls for each in first["messages"][:1]] == [
        each.tool_calls for each in second["messages"][:1]
    ]
    after, _ = judged(drop_in, history, langchain_quota=first["langchain_quota"])
    assert after["langchain_quota"]["run_tools"] == {"__all__": 1}
    assert [each.type for each in again] == ["human", "ai", "tool", "tool"]


def test_a_drop_in_with_nothing_to_judge(signals: Signals) -> None:
    """Where none of the calls matches the limit, the hook returns nothing."""
    drop_in = tool_limiter(signals, "search", run_limit=1)
    asked = AIMessage("", tool_calls=[call("calc"), call("calc", "")], id="m")
    state: Any = {"messages": [asked]}
    runtime: Any = None
    assert drop_in.after_model(state, runtime) is None


@pytest.mark.parametrize("tool_name", [None, "search"])
@pytest.mark.parametrize("count", [1, 3])
def test_counts_are_those_of_langchain(tool_name: str | None, count: int, signals: Signals) -> None:
    """Within the limit the counts are those that LangChain's limiter gives such calls."""
    state: Any = {"messages": [AIMessage("", tool_calls=[call("search")] * count, id="m")]}
    runtime: Any = None
    theirs = langchain_middleware.ToolCallLimitMiddleware[Any, Any](
        tool_name=tool_name, run_limit=3
    ).after_model(state, runtime)
    ours = tool_limiter(signals, tool_name, run_limit=3).after_model(state, runtime)

    assert theirs is not None
    assert ours is not None
    assert {key: ours[key] for key in theirs} == theirs


async def test_langchain_lets_none_past_its_limit() -> None:
    """LangChain's own limiter fails where it would have to answer such a call; none runs."""
    ran: list[str] = []

    def search() -> str:
        """Search."""
        ran.append("search")
        return "found"

    limit = langchain_middleware.ToolCallLimitMiddleware[Any, Any](run_limit=2)
    asked = AIMessage("", tool_calls=[call("search")] * 100)
    agent = create_agent(ScriptedChatModel(script=[asked]), [search], middleware=[limit])
    question: Any = {"messages": [("user", "hi")]}
    with pytest.raises(ValueError, match=r"unexpected type|tool_call_id"):
        await agent.ainvoke(question)
    assert ran == []


messages_of_calls = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["search", "calc"]), st.sampled_from([None, "", "own"])),
        min_size=1,
        max_size=6,
    ),
    max_size=3,
)


@examples(20)
@given(batches=messages_of_calls, limits=st.tuples(st.integers(0, 4), st.integers(0, 6)))
def test_any_batches(batches: list[list[tuple[str, str | None]]], limits: tuple[int, int]) -> None:
    """Whichever ids are missing: what runs is what the limits admit, counted and answered once."""
    registry, provider = CollectorRegistry(), TracerProvider()
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    signals = Signals(telemetry, registry, provider, InMemorySpanExporter())
    script = [
        [call(tool, no_id and f"{at}-{index}") for index, (tool, no_id) in enumerate(batch)]
        for at, batch in enumerate(batches)
    ]
    scene = Scene(
        signals,
        [*script, "done"],
        [
            ToolCallLimitMiddleware(tool_name="search", run_limit=limits[0], telemetry=telemetry),
            ToolCallLimitMiddleware(run_limit=limits[1], telemetry=telemetry),
        ],
        form="sync",
    )

    asyncio.run(_checked_turn(scene))


async def _checked_turn(scene: Scene) -> None:
    await scene.turn()
    check(scene)
