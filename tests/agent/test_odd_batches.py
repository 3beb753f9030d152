"""Batches of tool calls as models should not make them, and clients that hang up."""

import asyncio
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall
from langchain_core.tools import BaseTool, StructuredTool

from langchain_quota.testing import captured_decisions
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import Scene, cancel_at, check_history, model_limiter, tool_limiter
from tests.signals import Signals


def call(tool: str, call_id: str) -> ToolCall:
    return ToolCall(name=tool, args={}, id=call_id, type="tool_call")


@orders(2)
@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_duplicate_ids_of_which_one_is_refused(
    order: Order, exit_behavior: Any, signals: Signals
) -> None:
    """Two calls with one id, one over the limit: the id is refused, answered once, uncharged."""
    scene = Scene(
        signals,
        [[call("search", "same"), call("search", "same")], "done", ["search"], "done"],
        in_order(
            order,
            tool_limiter(signals, "search", run_limit=1, exit_behavior=exit_behavior),
            tool_limiter(signals, thread_limit=9),
        ),
    )

    await scene.turn()

    assert scene.ran == []
    assert scene.answers() == [("search", "error")]
    scene.check()


@orders(2)
async def test_duplicate_ids_over_two_tools(order: Order, signals: Signals) -> None:
    """Two tools called with one id, one of them forbidden: neither runs, one answer."""
    scene = Scene(
        signals,
        [[call("search", "same"), call("calc", "same"), call("calc", "other")], "done"],
        in_order(
            order,
            tool_limiter(signals, "search", run_limit=0),
            tool_limiter(signals, "calc", run_limit=9),
        ),
    )

    await scene.turn()

    assert scene.ran == ["calc"]
    scene.check()


async def test_duplicate_ids_that_run(signals: Signals) -> None:
    """Two calls with one id, both within the limit: charged as often as LangChain runs them."""
    scene = Scene(
        signals,
        [[call("search", "same"), call("search", "same")], "done"],
        [tool_limiter(signals, run_limit=2)],
    )

    await scene.turn()

    assert scene.state()["langchain_quota"]["run_tools"] == {"__all__": len(scene.ran)}
    assert scene.state()["thread_tool_call_count"] == {"__all__": len(scene.ran)}


async def test_an_id_used_again(signals: Signals) -> None:
    """A model that gives every call the same id, message after message: each is judged."""
    scene = Scene(
        signals,
        [[call("search", "same")], [call("search", "same")], [call("search", "same")], "done"],
        [tool_limiter(signals, run_limit=2)],
    )

    await scene.turn()

    assert scene.ran == ["search"] * 2
    scene.check()


async def test_invalid_tool_calls(signals: Signals) -> None:
    """A call that could not be parsed is not charged; the valid one beside it is."""
    broken = InvalidToolCall(
        name="search", args="{", id="broken", error="no JSON", type="invalid_tool_call"
    )
    scene = Scene(
        signals,
        [
            AIMessage("", tool_calls=[call("search", "a")], invalid_tool_calls=[broken]),
            "done",
            "done",
        ],
        [tool_limiter(signals, run_limit=1), model_limiter(signals, run_limit=9)],
    )

    await scene.turn()

    assert scene.ran == ["search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    assert scene.metric("tool:*", "allowed") == 1


async def test_only_invalid_tool_calls(signals: Signals) -> None:
    """A message with nothing but a broken call is not charged; the next turn is a valid one."""
    broken = InvalidToolCall(
        name="search", args="{", id="broken", error="no JSON", type="invalid_tool_call"
    )
    scene = Scene(
        signals,
        [AIMessage("", invalid_tool_calls=[broken]), "done"],
        [tool_limiter(signals, run_limit=0)],
    )

    await scene.turn()
    await scene.turn()

    assert scene.state().get("thread_tool_call_count", {}) == {}
    assert scene.metric("tool:*", "allowed") == 0


async def test_an_unknown_tool(signals: Signals) -> None:
    """A tool that the agent does not have: let through, charged, answered by LangChain once."""
    scene = Scene(signals, [["invented", "invented"], "done"], [tool_limiter(signals, run_limit=1)])

    await scene.turn()

    assert scene.answers() == [("invented", "error")] * 2
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_arguments_that_fail_validation(signals: Signals) -> None:
    """Arguments that the tool rejects: let through, charged, answered by LangChain once."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [[("square", {"number": "x"})], [("square", {"number": 2})], ["square"], "done"],
        [tool_limiter(signals, run_limit=2)],
        tools=[_square(ran)],
        ran=ran,
    )

    await scene.turn()

    assert ran == ["square"]
    assert scene.answers() == [("square", "error"), ("square", "success"), ("square", "error")]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    check_history(scene.state()["messages"])


class Gate(AgentMiddleware[Any, Any, Any]):
    """Waits, after the limiters, for a client that has hung up."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self.closed = True

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        self.reached.set()
        if self.closed:
            await asyncio.Event().wait()


async def test_cancelled_between_admission_and_tool(signals: Signals) -> None:
    """Cancelled after admission: nothing ran, the call stays charged, the next turn is whole."""
    gate = Gate()
    scene = Scene(
        signals, [["search"], ["search"], "done"], [gate, tool_limiter(signals, thread_limit=2)]
    )

    await cancel_at(gate.reached, scene.turn())
    gate.closed = False
    await scene.turn()

    assert scene.ran == ["search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    assert scene.state()["langchain_quota"]["run_tools"] == {"__all__": 1}
    check_history(scene.state()["messages"])
    scene.check_requests()


async def test_cancelled_and_resumed(signals: Signals) -> None:
    """Cancelled after admission and resumed: the call runs, charged once."""
    gate = Gate()
    scene = Scene(signals, [["search"], "done"], [gate, tool_limiter(signals, thread_limit=2)])

    await cancel_at(gate.reached, scene.turn())
    gate.closed = False
    await scene.go_on()

    assert scene.ran == ["search"]
    scene.check()


async def test_cancelled_before_admission(signals: Signals) -> None:
    """Cancelled before the limiter judged: nothing is charged, and the next turn is whole."""
    gate = Gate()
    scene = Scene(signals, [["search"], "done"], [tool_limiter(signals, thread_limit=2), gate])

    await cancel_at(gate.reached, scene.turn())
    gate.closed = False
    with captured_decisions() as decisions:
        await scene.turn()

    assert decisions == []
    assert scene.ran == []
    scene.check()


def _square(ran: list[str]) -> BaseTool:
    def square(number: int) -> int:
        ran.append("square")
        return number * number

    return StructuredTool.from_function(square, description="square")
