"""QuotaMiddleware in the situations that agents get into: reviews, stops, repairs, odd batches."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    hook_config,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import RemoveMessage, ToolCall, ToolMessage
from langchain_core.tools import StructuredTool
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import interrupt
from pydantic import BaseModel

from langchain_quota import (
    ModelCallLimit,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import CONFIG, Middleware, Scene, cancel_at, check_history, recording
from tests.signals import Signals

LIMITS: tuple[Limit, ...] = (
    ModelCallLimit(thread_limit=9),
    ToolCallLimit("search", run_limit=2),
    ToolCallLimit(run_limit=4),
)

TURN = [["search"] * 3, ["calc"], "done"]
"""A turn that asks for one search more than the limits above admit."""

LIMITED = {"search": 2, "calc": 1}
"""What runs of it."""

"""Retries that do not wait."""

VALID = ("Weather", {"degrees": 20})
INVALID = ("Weather", {"degrees": "warm"})


class Weather(BaseModel):
    """The weather."""

    degrees: int


def quota(signals: Signals, *limits: Limit) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits or LIMITS, telemetry=signals.telemetry)


def structured(signals: Signals, script: Any, *limits: Limit) -> Scene:
    return Scene(signals, script, [quota(signals, *limits)], response_format=ToolStrategy(Weather))


def reviewed(signals: Signals, *limits: Limit) -> Scene:
    """The quota first, so that it judges what the reviewer left of two searches."""
    review = HumanInTheLoopMiddleware[Any, Any]({"search": True})
    middleware: list[Middleware] = [quota(signals, *limits), review]
    return Scene(signals, [["search", "search"], "done", ["search"], "done"], middleware)


def decisions(*kinds: str) -> dict[str, Any]:
    forms: dict[str, dict[str, Any]] = {
        "approve": {"type": "approve"},
        "reject": {"type": "reject"},
        "respond": {"type": "respond", "message": "the reviewer's answer"},
        "edit": {"type": "edit", "edited_action": {"name": "calc", "args": {}}},
    }
    return {"decisions": [forms[kind] for kind in kinds]}


def call(tool: str, call_id: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


def failing(times: int) -> Callable[[], None]:
    """Raises at the first calls."""
    failures = [ConnectionError("not now") for _ in range(times)]

    def fail() -> None:
        if failures:
            raise failures.pop()

    return fail


async def test_structured_output(signals: Signals) -> None:
    """A structured answer with no tool call left is delivered, uncharged and answered once."""
    scene = structured(signals, [[VALID]], ToolCallLimit(run_limit=0, exit_behavior="error"))

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.answers() == [("Weather", "success")]
    scene.check()


async def test_structured_output_retried(signals: Signals) -> None:
    """A structured answer that is retried is not charged, and its error is its only answer."""
    scene = structured(
        signals,
        [[INVALID], ["search"], [INVALID], [VALID]],
        ModelCallLimit(thread_limit=9),
        ToolCallLimit("Weather", run_limit=0),
        ToolCallLimit(run_limit=1),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.ran == ["search"]
    scene.check()


@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_refused_beside_structured_output(exit_behavior: Any, signals: Signals) -> None:
    """Beside a delivered structured answer a refusal only refuses; what is admitted runs."""
    scene = structured(
        signals,
        [["search", VALID, "search", "calc"]],
        ToolCallLimit("search", run_limit=1, exit_behavior=exit_behavior),
        ToolCallLimit(run_limit=4),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert result["messages"][-1].type == "tool"
    assert Counter(scene.ran) == {"search": 1, "calc": 1}
    scene.check()


async def test_review_approved(signals: Signals) -> None:
    """Approved calls are judged: one within the limit is charged, one over it does not run."""
    scene = reviewed(signals, ToolCallLimit("search", run_limit=1), LIMITS[2])

    await scene.turn()
    await scene.resume(decisions("approve", "approve"))

    assert scene.ran == ["search"]
    scene.check()


@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_review_without_running(kind: str, signals: Signals) -> None:
    """A rejected or answered call is not charged, leaves its room, and is not answered again."""
    scene = reviewed(
        signals, ToolCallLimit("search", run_limit=1, exit_behavior="error"), LIMITS[2]
    )

    await scene.turn()
    await scene.resume(decisions(kind, "approve"))

    assert scene.ran == ["search"]
    scene.check()


async def test_review_edited(signals: Signals) -> None:
    """Edited calls are judged as what they became: refused by its limit, not by their own."""
    scene = reviewed(
        signals, ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=1)
    )

    await scene.turn()
    await scene.resume(decisions("edit", "edit"))

    assert scene.ran == ["calc"]
    scene.check()


async def test_an_approval_abandoned(signals: Signals) -> None:
    """Calls that a new turn leaves in review were never charged, and are answered."""
    scene = Scene(
        signals,
        [["search", "calc"], "done"],
        [quota(signals), HumanInTheLoopMiddleware({"search": True})],
    )

    await scene.turn()
    await scene.turn("never mind")

    assert scene.ran == []
    assert [status for _, status in scene.answers()] == ["error", "error"]
    scene.check()


async def test_interrupt_in_a_tool(signals: Signals) -> None:
    """A tool that interrupts is charged once, and the run's budget goes on over the resumes."""
    ran: list[str] = []
    scene = Scene(
        signals,
        lambda messages: ["ask"],
        [quota(signals, LIMITS[0], ToolCallLimit("ask", run_limit=2, exit_behavior="end"))],
        tools=[recording("ask", ran, lambda: interrupt("what?"))],
        ran=ran,
    )

    for turn in (1, 2):
        result = await scene.turn()
        while "__interrupt__" in result:
            result = await scene.resume("that")
        assert ran == ["ask"] * 2 * turn
        scene.check()


@pytest.mark.parametrize("node", ["tools", "model"])
async def test_interrupt_before(node: str, signals: Signals) -> None:
    """A run that stops before a node and goes on keeps its budget; the next has a new one."""
    scene = Scene(signals, [*TURN, *TURN], [quota(signals)], interrupt_before=[node])

    for turn in (1, 2):
        await scene.turn()
        while scene.agent.get_state(CONFIG).next:
            await scene.go_on()
        assert Counter(scene.ran) == {tool: turn * times for tool, times in LIMITED.items()}
        scene.check()


async def test_a_crashed_tool(signals: Signals) -> None:
    """A tool that crashes and runs when the run goes on is charged once, in the same budget."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["search"], ["search"], ["search"], "done"],
        [quota(signals)],
        tools=[recording("search", ran, failing(1))],
        ran=ran,
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.go_on()

    assert ran == ["search"] * 2
    scene.check()


async def test_a_new_turn(signals: Signals) -> None:
    """Run counts begin anew with each turn; thread counts go on until they are used up."""
    scene = Scene(signals, [*TURN] * 3, [quota(signals)])

    for turn in (1, 2, 3):
        await scene.turn()
        assert Counter(scene.ran) == {tool: turn * times for tool, times in LIMITED.items()}
        scene.check()
    await scene.turn()

    assert len(scene.model.calls) == 9
    scene.check()


async def test_an_error_repaired(signals: Signals) -> None:
    """`error` leaves its batch open and uncharged; the next turn answers it and has a budget."""
    scene = Scene(
        signals,
        [["search", "calc", "search"], ["search", "calc"], "done"],
        [quota(signals, ToolCallLimit("search", thread_limit=1, exit_behavior="error"), LIMITS[2])],
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    scene.check(answered=False)
    await scene.turn()

    assert Counter(scene.ran) == {"search": 1, "calc": 1}
    scene.check()


async def test_cancelled_in_a_tool(signals: Signals) -> None:
    """A run cancelled in a tool: its call stays charged, and the next turn answers it."""
    started = asyncio.Event()

    async def search() -> None:
        started.set()
        await asyncio.Event().wait()

    tool = StructuredTool.from_function(coroutine=search, description="search")
    scene = Scene(signals, [["search"], "done"], [quota(signals)], tools=[tool])

    await cancel_at(started, scene.turn())
    await scene.turn()

    assert scene.answers() == [("search", "error")]
    assert scene.state()["thread_tool_call_count"] == {"search": 1, "__all__": 1}
    assert scene.state()["langchain_quota"]["run_tools"] == {}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_invalid_arguments(signals: Signals) -> None:
    """Arguments that the tool rejects are charged, and answered once."""
    ran: list[str] = []

    def square(number: int) -> int:
        ran.append("square")
        return number * number

    scene = Scene(
        signals,
        [[("square", {"number": "x"})], [("square", {"number": 2})], ["square"], "done"],
        [quota(signals, ToolCallLimit("square", run_limit=2))],
        tools=[StructuredTool.from_function(square, description="square")],
        ran=ran,
    )

    await scene.turn()

    assert ran == ["square"]
    assert [status for _, status in scene.answers()] == ["error", "success", "error"]
    assert scene.state()["thread_tool_call_count"] == {"square": 2}
    check_history(scene.state()["messages"])


class JumpAfterModel(AgentMiddleware[Any, Any, Any]):
    """Jumps after the first model call."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.targets = [target]

    @hook_config(can_jump_to=["model", "end"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return {"jump_to": self.targets.pop()} if self.targets else None


@orders(2)
async def test_a_jump_to_the_model(order: Order, signals: Signals) -> None:
    """Another middleware jumps from after_model to the model: each model call counts once."""
    middleware: list[Middleware] = in_order(order, quota(signals), JumpAfterModel("model"))
    scene = Scene(signals, ["again", *TURN], middleware)

    await scene.turn()

    assert (len(scene.model.calls), Counter(scene.ran)) == (4, LIMITED)
    scene.check()


@pytest.mark.parametrize(("quota_first", "charged"), [(True, 0), (False, 1)])
async def test_a_jump_to_the_end(*, quota_first: bool, charged: int, signals: Signals) -> None:
    """Calls that a jump to the end left open are answered; charged if judged before the jump."""
    own, jump = quota(signals), JumpAfterModel("end")
    middleware: list[Middleware] = [own, jump] if quota_first else [jump, own]
    scene = Scene(signals, [["search"], "done"], middleware)

    await scene.turn()
    await scene.turn()

    assert scene.ran == []
    assert scene.answers() == [("search", "error")]
    assert scene.state().get("thread_tool_call_count", {}).get("search", 0) == charged
    assert scene.state()["thread_model_call_count"] == 2
    check_history(scene.state()["messages"])


async def test_messages_removed(signals: Signals) -> None:
    """Messages removed between turns take nothing off the thread's counts."""
    limits = (ModelCallLimit(thread_limit=4), ToolCallLimit("search", thread_limit=2))
    scene = Scene(signals, [["search"] * 2, "done"] * 2, [quota(signals, *limits)])

    await scene.turn()
    removed = {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES)]}
    scene.agent.update_state(CONFIG, removed, as_node="__start__")
    await scene.turn()

    assert scene.ran == ["search"] * 2
    scene.check()


@orders(2)
async def test_messages_summarized(order: Order, signals: Signals) -> None:
    """A summary in place of earlier turns takes nothing off the counts, and charges nothing."""
    summarizer = ScriptedChatModel(script=lambda _: "a summary")
    summarization = SummarizationMiddleware(
        summarizer, trigger=("messages", 4), keep=("messages", 1)
    )
    middleware: list[Middleware] = in_order(order, quota(signals), summarization)
    scene = Scene(signals, [*TURN, *TURN], middleware)

    for turn in (1, 2):
        await scene.turn()
        assert Counter(scene.ran) == {tool: turn * times for tool, times in LIMITED.items()}
        scene.check()

    assert summarizer.calls


def three_searches(messages: Sequence[Any]) -> Any:
    return "done" if isinstance(messages[-1], ToolMessage) else ["search"] * 3


@orders(2)
async def test_todo_list(order: Order, signals: Signals) -> None:
    """TodoListMiddleware: `write_todos` counts like any tool, but for limits that exclude it."""
    todos = [
        ("write_todos", {"todos": [{"content": each, "status": "pending"}]})
        for each in ("one", "two", "three")
    ]
    own = quota(
        signals,
        ToolCallLimit("write_todos", run_limit=2),
        ToolCallLimit(run_limit=1, exclude=("write_todos",)),
    )
    middleware: list[Middleware] = in_order(order, own, TodoListMiddleware())
    scene = Scene(signals, [*([each] for each in todos), ["calc", "calc"], "done"], middleware)

    result = await scene.turn()

    assert [each["content"] for each in result["todos"]] == ["two"]
    assert scene.ran == ["calc"]
    assert scene.state()["thread_tool_call_count"]["write_todos"] == 2
    check_history(result["messages"])


async def test_a_sub_agent(signals: Signals) -> None:
    """A sub-agent's own quota lasts one invocation: it warns, and writes no thread series."""
    ran: list[str] = []
    child: Any = create_agent(
        ScriptedChatModel(script=three_searches),
        tools=[recording("search", ran)],
        middleware=[quota(signals, ToolCallLimit("search", thread_limit=1, name="child"))],
    )
    asked = {"messages": [("user", "do it")]}

    def delegate() -> str:
        return str(child.invoke(asked)["messages"][-1].content)

    async def adelegate() -> str:
        return str((await child.ainvoke(asked))["messages"][-1].content)

    tool = StructuredTool.from_function(delegate, adelegate, name="delegate", description="ask")
    scene = Scene(
        signals,
        [["delegate"], ["delegate"], "done"],
        [quota(signals, ModelCallLimit(thread_limit=9), ToolCallLimit(thread_limit=9))],
        tools=[tool],
    )

    with pytest.warns(QuotaWarning, match="thread limit") as caught:
        await scene.turn()

    assert len(caught) == 1
    assert ran == ["search"] * 2
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    threads = {
        sample.labels["limit"]: sample.value
        for metric in signals.registry.collect()
        for sample in metric.samples
        if sample.name == "langchain_quota_thread_used"
    }
    assert threads == {"model": 3, "tool:*": 2}
