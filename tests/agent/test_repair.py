"""Tool calls left without an answer: the next turn gives them one, in their place."""

import asyncio
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, human_in_the_loop
from langchain_core.messages import RemoveMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from langchain_quota import QuotaMiddleware, ToolCallLimit, ToolCallLimitExceededError
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import (
    CONFIG,
    Scene,
    cancel_at,
    check_history,
    model_limiter,
    recording,
    tool_limiter,
)
from tests.signals import Signals

NEW_TURN = {"messages": [("user", "next")]}


def kinds(scene: Scene) -> list[str]:
    return [message.type for message in scene.state()["messages"]]


def crash() -> None:
    raise ConnectionError("tool")


async def test_error(signals: Signals) -> None:
    """`error` leaves its batch open; the next turn answers it behind its message, uncharged."""
    scene = Scene(
        signals,
        [["search", "search", "calc"], "done"],
        [tool_limiter(signals, "search", run_limit=1, exit_behavior="error")],
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    assert kinds(scene) == ["human", "ai"]
    scene.check(answered=False)

    await scene.turn()
    assert kinds(scene) == ["human", "ai", "tool", "tool", "tool", "human", "ai"]
    assert scene.answers() == [("search", "error"), ("search", "error"), ("calc", "error")]
    assert scene.ran == []
    scene.check()


async def test_a_resume_raises_again(signals: Signals) -> None:
    """A run that `error` stopped raises again when it is resumed, and charges nothing."""
    scene = Scene(
        signals,
        [["search"], ["search", "search"], "done"],
        [
            tool_limiter(signals, thread_limit=2, exit_behavior="error"),
            model_limiter(signals, run_limit=9),
        ],
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    for _ in range(2):
        with pytest.raises(ToolCallLimitExceededError) as raised:
            await scene.go_on()
        assert (raised.value.thread_count, raised.value.run_count) == (3, 3)
        scene.check(answered=False)

    await scene.turn()
    assert scene.ran == ["search"]
    scene.check()


@orders(3)
async def test_error_in_a_stack(order: Order, signals: Signals) -> None:
    """What other limiters charged before `error` raised is refunded in the next turn."""
    scene = Scene(
        signals,
        [["calc"], ["search", "search", "calc"], ["search", "calc"], "done"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=9),
            tool_limiter(signals, "search", run_limit=1, exit_behavior="error"),
            tool_limiter(signals, "calc", thread_limit=9, run_limit=5),
        ),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.ran.count("calc") == 2
    assert scene.ran.count("search") == 1
    assert scene.metric("tool:search", "allowed") == 1
    # The last of the list judges first: 3 calls by all tools, 1 by calc.
    judged_before_error = order[order.index(1) + 1 :]
    assert scene.metric("tool:*", "refunded") == (3 if 0 in judged_before_error else 0)
    assert scene.metric("tool:calc", "refunded") == (1 if 2 in judged_before_error else 0)
    scene.check()


@orders(2)
async def test_error_behind_a_refusal(order: Order, signals: Signals) -> None:
    """`error` beside `continue` that answered a part: only what is open is answered later."""
    scene = Scene(
        signals,
        [["calc", "calc", "search"], "done"],
        in_order(
            order,
            tool_limiter(signals, "calc", run_limit=1),
            tool_limiter(signals, "search", run_limit=0, exit_behavior="error"),
        ),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert kinds(scene) == ["human", "ai", "tool", "tool", "tool", "human", "ai"]
    assert scene.ran == []
    scene.check()


@orders(2)
async def test_error_of_two(order: Order, signals: Signals) -> None:
    """Two limiters with `error` on one batch: nothing is charged, and nothing taken back twice."""
    scene = Scene(
        signals,
        [["calc"], ["search", "calc"], ["calc"], "done"],
        in_order(
            order,
            tool_limiter(signals, run_limit=2, thread_limit=2, exit_behavior="error"),
            tool_limiter(signals, "search", run_limit=0, exit_behavior="error"),
        ),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.ran == ["calc", "calc"]
    scene.check()


@orders(2)
async def test_error_turn_after_turn(order: Order, signals: Signals) -> None:
    """Every turn ends in `error`: each is repaired by the next, and no charges pile up."""
    scene = Scene(
        signals,
        lambda messages: ["search"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=9),
            tool_limiter(signals, "search", run_limit=0, exit_behavior="error"),
        ),
    )

    for _ in range(4):
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
        scene.check_requests()

    # What the last turn charged before it raised is taken back by the next turn.
    left = 1 if order[-1] == 0 else 0
    assert scene.state().get("thread_tool_call_count", {}).get("__all__", 0) == left
    assert scene.metric("tool:*", "allowed") - scene.metric("tool:*", "refunded") == left
    assert scene.ran == []


@orders(3)
async def test_error_raised_behind_a_resume(order: Order, signals: Signals) -> None:
    """`error` in a stack raises at each resume: charges of the batch do not pile up."""
    scene = Scene(
        signals,
        [["search", "calc"], "done"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=9),
            tool_limiter(signals, "search", run_limit=0, exit_behavior="error"),
            model_limiter(signals, thread_limit=9),
        ),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    for _ in range(2):
        with pytest.raises(ToolCallLimitExceededError):
            await scene.go_on()
    await scene.turn()

    scene.check()


class Briefing(AgentMiddleware[Any, Any, Any]):
    """Adds a message when a run begins."""

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {"messages": [("user", "today is Monday")]}


@pytest.mark.parametrize("place", range(4))
async def test_error_in_a_stack_with_a_message_between(place: int, signals: Signals) -> None:
    """A middleware that adds a message when a run begins does not hinder the refund."""
    limiters: list[Any] = [
        tool_limiter(signals, "calc", run_limit=9),
        tool_limiter(signals, "search", run_limit=0, exit_behavior="error"),
        tool_limiter(signals, thread_limit=9),
    ]
    scene = Scene(signals, [["search"], "done"], [*limiters[:place], Briefing(), *limiters[place:]])

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.metric("tool:*", "refunded") == 1
    scene.check()


async def test_a_crash_and_then_a_lower_limit(signals: Signals) -> None:
    """A call that crashed stays charged where the limit that admitted it was lowered since."""
    ran: list[str] = []
    saver = InMemorySaver()
    before, after = (
        Scene(
            signals,
            script,
            [tool_limiter(signals, thread_limit=limit, exit_behavior="error")],
            tools=[recording("flaky", ran, crash)],
            checkpointer=saver,
        )
        for limit, script in ((5, [["flaky"]]), (0, ["done"]))
    )

    with pytest.raises(ConnectionError):
        await before.turn()
    await after.turn()

    assert after.state()["thread_tool_call_count"] == {"__all__": 1}


@pytest.mark.parametrize("place", [0, 1])
async def test_a_crash_and_then_one_more_limiter(place: int, signals: Signals) -> None:
    """A call that crashed stays charged where the agent has been given one more limiter since."""
    ran: list[str] = []
    saver = InMemorySaver()
    new = tool_limiter(signals, run_limit=9, limit_name="new")
    before, after = (
        Scene(
            signals,
            [turn],
            [*added[place:], tool_limiter(signals, thread_limit=5), *added[:place]],
            tools=[recording("flaky", ran, crash)],
            checkpointer=saver,
        )
        for turn, added in ((["flaky"], []), ("done", [new]))
    )

    with pytest.raises(ConnectionError):
        await before.turn()
    await after.turn()

    assert after.state()["thread_tool_call_count"] == {"__all__": 1}
    assert after.metric("tool:*", "refunded") == 0


@pytest.mark.skipif(
    not hasattr(human_in_the_loop, "_EDITED_TOOL_CALLS_KEY"),
    reason="before 1.4, LangChain forgets what a call was before a reviewer's edit",
)
async def test_a_crash_of_an_edited_call(signals: Signals) -> None:
    """Review first: a call edited into a tool that crashed had started, and stays charged."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["search"], "done"],
        [
            HumanInTheLoopMiddleware({"search": True}),
            tool_limiter(signals, "search", thread_limit=5),
            tool_limiter(signals, "flaky", run_limit=5),
        ],
        tools=["search", recording("flaky", ran, crash)],
    )
    edit = {"type": "edit", "edited_action": {"name": "flaky", "args": {}}}

    await scene.turn()
    with pytest.raises(ConnectionError):
        await scene.resume({"decisions": [edit]})
    await scene.turn()

    assert scene.state()["thread_tool_call_count"]["search"] == 1
    check_history(scene.state()["messages"])


async def test_a_crash_in_a_stack(signals: Signals) -> None:
    """A tool that crashed beside a refused call had started: it stays charged in the stack."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["flaky", "calc", "search"], "done"],
        [
            tool_limiter(signals, "calc", run_limit=0),
            tool_limiter(signals, thread_limit=9),
            tool_limiter(signals, "search", thread_limit=9, exit_behavior="error"),
        ],
        tools=[recording("flaky", ran, crash), "calc", "search"],
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()

    counts = scene.state()["thread_tool_call_count"]
    assert (counts["__all__"], counts["search"], counts["calc"]) == (2, 1, 0)
    check_history(scene.state()["messages"])


async def test_an_approval_abandoned_between_two_limiters(signals: Signals) -> None:
    """Review between: what the limiter behind it charged is refunded, the first never saw it."""
    scene = Scene(
        signals,
        [["search", "search"], "done"],
        [
            tool_limiter(signals, run_limit=2),
            HumanInTheLoopMiddleware({"search": True}),
            tool_limiter(signals, "search", thread_limit=2),
        ],
    )

    await scene.turn()
    await scene.turn("never mind")

    assert scene.metric("tool:search", "refunded") == 2
    scene.check()


async def test_an_approval_abandoned(signals: Signals) -> None:
    """Limiter first: a call abandoned in review was never charged, and is answered."""
    scene = Scene(
        signals,
        [["search", "calc"], "done"],
        [tool_limiter(signals, run_limit=2), HumanInTheLoopMiddleware({"search": True})],
    )

    await scene.turn()
    await scene.turn("never mind")

    assert kinds(scene) == ["human", "ai", "tool", "tool", "human", "ai"]
    assert scene.ran == []
    scene.check()


async def test_an_approval_abandoned_with_the_review_first(signals: Signals) -> None:
    """Review first: nothing tells an abandoned review from a crashed tool: it stays charged."""
    scene = Scene(
        signals,
        [["search", "calc"], "done"],
        [HumanInTheLoopMiddleware({"search": True}), tool_limiter(signals, run_limit=2)],
    )

    await scene.turn()
    await scene.turn("never mind")

    assert scene.ran == []
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    assert scene.state()["langchain_quota"]["run_tools"] == {}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_an_interrupt_of_a_tool_abandoned(signals: Signals) -> None:
    """A tool that asked the user had started: its call is answered and stays charged."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["ask"], "done"],
        [tool_limiter(signals, thread_limit=2)],
        tools=[recording("ask", ran, lambda: interrupt("what?"))],
        ran=ran,
    )

    await scene.turn()
    await scene.turn("never mind")

    assert kinds(scene) == ["human", "ai", "tool", "human", "ai"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    assert scene.metric("tool:*", "refunded") == 0
    check_history(scene.state()["messages"])
    scene.check_requests()


@orders(2)
async def test_an_interrupt_beside_a_cap(order: Order, signals: Signals) -> None:
    """It stays charged beside a quota that only caps calls at once: the cap let it start, too."""
    ran: list[str] = []
    cap = ToolCallLimit("ask", at_once=1)
    scene = Scene(
        signals,
        [["ask"], "done"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=2),
            QuotaMiddleware([cap], telemetry=signals.telemetry),
        ),
        tools=[recording("ask", ran, lambda: interrupt("what?"))],
        ran=ran,
    )

    await scene.turn()
    await scene.turn("never mind")

    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    assert scene.metric("tool:*", "refunded") == 0


async def test_a_crash_in_a_tool(signals: Signals) -> None:
    """A tool that crashed had started: its call is answered and stays charged."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["flaky"], "done"],
        [tool_limiter(signals, thread_limit=2)],
        tools=[recording("flaky", ran, crash)],
        ran=ran,
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()

    assert scene.answers() == [("flaky", "error")]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    assert scene.state()["langchain_quota"]["run_tools"] == {}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_a_crash_beside_a_tool_that_ran(signals: Signals) -> None:
    """One of two parallel tools crashed: both calls have one answer each and stay charged."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["flaky", "search"], "done"],
        [tool_limiter(signals, thread_limit=2)],
        tools=[recording("flaky", ran, crash), "search"],
        ran=ran,
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()

    assert len(scene.answers()) == 2
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_a_cancellation(signals: Signals) -> None:
    """A run cancelled while its tool runs: the call is answered next turn and stays charged."""
    started = asyncio.Event()
    scene = Scene(
        signals,
        [["slow"], "done"],
        [tool_limiter(signals, thread_limit=2)],
        tools=[_endless(started)],
    )

    await cancel_at(started, scene.turn())
    await scene.turn()

    assert kinds(scene) == ["human", "ai", "tool", "human", "ai"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_several_open_batches(signals: Signals) -> None:
    """Open calls of several turns before ours was installed: each is answered in its place."""
    scene = Scene(signals, ["done"], [tool_limiter(signals, thread_limit=2)])
    call = {"args": {}, "type": "tool_call"}
    scene.agent.update_state(
        CONFIG,
        {
            "messages": [
                {"role": "user", "content": "one"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {**call, "name": "search", "id": "a"},
                        {**call, "name": "calc", "id": "b"},
                    ],
                },
                ToolMessage("found", tool_call_id="b", name="calc"),
                {"role": "user", "content": "two"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{**call, "name": "search", "id": "a"}],
                },
            ]
        },
        as_node="model",
    )

    await scene.turn()

    assert kinds(scene) == ["human", "ai", "tool", "tool", "human", "ai", "tool", "human", "ai"]
    scene.check()


@orders(2)
async def test_nothing_is_touched_when_nothing_dangles(order: Order, signals: Signals) -> None:
    """A turn after complete ones streams no messages from before_agent."""
    scene = Scene(
        signals,
        [["search", "search"], "done", ["search"], "done"],
        in_order(
            order, tool_limiter(signals, "search", run_limit=1), model_limiter(signals, run_limit=9)
        ),
    )

    for _ in range(2):
        updates = await scene.updates(NEW_TURN)
        begun = [
            update for each in updates for node, update in each.items() if "before_agent" in node
        ]
        assert len(begun) == 2
        assert not any("messages" in (update or {}) for update in begun)


@orders(2)
async def test_a_repair_is_streamed_once(order: Order, signals: Signals) -> None:
    """Several limiters repair the history once."""
    scene = Scene(
        signals,
        [["search"], "done"],
        in_order(
            order,
            tool_limiter(signals, "search", run_limit=0, exit_behavior="error"),
            model_limiter(signals, run_limit=9),
        ),
    )
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()

    updates = await scene.updates(NEW_TURN)

    repairs = [
        update["messages"]
        for each in updates
        for node, update in each.items()
        if "before_agent" in node and "messages" in (update or {})
    ]
    assert len(repairs) == 1
    assert isinstance(repairs[0][0], RemoveMessage)
    check_history(scene.state()["messages"])


async def test_a_repair_keeps_messages_and_their_ids(signals: Signals) -> None:
    """A repair keeps every message of the history, its order and its id."""
    scene = Scene(
        signals,
        ["hello", ["search"], "done"],
        [tool_limiter(signals, run_limit=0, exit_behavior="error")],
    )
    await scene.turn()
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    before = [message.id for message in scene.state()["messages"]]

    await scene.turn()

    after = [message.id for message in scene.state()["messages"]]
    assert after[: len(before)] == before
    assert kinds(scene)[len(before) :] == ["tool", "human", "ai"]


def _endless(started: asyncio.Event) -> BaseTool:
    async def slow() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    return StructuredTool.from_function(coroutine=slow, name="slow", description="slow")
