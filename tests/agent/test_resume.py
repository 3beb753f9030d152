"""Runs that stop and go on: the budget goes on with them, and a new turn has a new one."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import middleware as langchain_middleware
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from langchain_quota import ToolCallLimitMiddleware
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import CONFIG, Scene, model_limiter, recording, tool_limiter
from tests.signals import Signals

APPROVE = {"decisions": [{"type": "approve"}]}


@orders(3)
async def test_human_approval(order: Order, signals: Signals) -> None:
    """Each call is approved by a person: the run's limits hold over all the resumes."""
    scene = Scene(
        signals,
        lambda messages: ["search"],
        in_order(
            order,
            tool_limiter(signals, run_limit=2, exit_behavior="end"),
            model_limiter(signals, run_limit=5),
            HumanInTheLoopMiddleware({"search": True}),
        ),
    )

    for turn in (1, 2):
        result = await scene.turn()
        while "__interrupt__" in result:
            result = await scene.resume(APPROVE)
        assert scene.ran == ["search"] * 2 * turn
        assert len(scene.model.calls) == 3 * turn
        scene.check()


async def test_model_limit_over_approvals(signals: Signals) -> None:
    """A run of approvals is one run to the model limiter too."""
    scene = Scene(
        signals,
        lambda messages: ["search"],
        [model_limiter(signals, run_limit=3), HumanInTheLoopMiddleware({"search": True})],
    )

    result = await scene.turn()
    while "__interrupt__" in result:
        result = await scene.resume(APPROVE)

    assert len(scene.model.calls) == 3
    scene.check()


async def test_interrupt_in_a_tool(signals: Signals) -> None:
    """A tool that interrupts is charged once, and the run's limit holds over the resumes."""
    ran: list[str] = []
    scene = Scene(
        signals,
        lambda messages: ["ask"],
        [
            tool_limiter(signals, run_limit=2, exit_behavior="end"),
            model_limiter(signals, run_limit=5),
        ],
        tools=[recording("ask", ran, lambda: interrupt("what?"))],
        ran=ran,
    )

    for turn in (1, 2):
        result = await scene.turn()
        while "__interrupt__" in result:
            result = await scene.resume("that")
        assert ran == ["ask"] * 2 * turn
        scene.check()


@pytest.mark.parametrize("where", ["interrupt_before", "interrupt_after"])
@pytest.mark.parametrize("node", ["tools", "model"])
async def test_breakpoints(where: str, node: str, signals: Signals) -> None:
    """A run that stops at breakpoints and goes on keeps its budget; the next has a new one."""
    stops: Any = {where: [node]}
    scene = Scene(
        signals,
        lambda messages: ["search"],
        [
            tool_limiter(signals, run_limit=2, exit_behavior="end"),
            model_limiter(signals, run_limit=5),
        ],
        **stops,
    )

    for turn in (1, 2):
        await scene.turn()
        while scene.agent.get_state(CONFIG).next:
            await scene.go_on()
        assert scene.ran == ["search"] * 2 * turn
        scene.check()


async def test_a_crashed_tool(signals: Signals) -> None:
    """A tool crashes and runs when the run goes on: it is charged once, in the same budget."""
    ran: list[str] = []
    scene = Scene(
        signals,
        [["flaky"], ["flaky"], ["flaky"], "done"],
        [tool_limiter(signals, run_limit=2), model_limiter(signals, run_limit=5)],
        tools=[recording("flaky", ran, _failing_once())],
        ran=ran,
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.go_on()

    assert ran == ["flaky"] * 2
    scene.check()


async def test_a_crashed_model(signals: Signals) -> None:
    """A model call raises and is made again when the run goes on: it is charged once."""
    scene = Scene(
        signals,
        [["search"], ConnectionError("model"), ["search"], "done"],
        [model_limiter(signals, run_limit=3), tool_limiter(signals, run_limit=2)],
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.go_on()

    assert len(scene.model.calls) == 4
    scene.check(models=3, models_in_run=3)


async def test_a_crashed_model_and_a_new_turn(signals: Signals) -> None:
    """A model call raises and the user asks anew: the call that failed is charged nowhere."""
    scene = Scene(
        signals, [ConnectionError("model"), "done"], [model_limiter(signals, run_limit=3)]
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()

    scene.check(models=1, models_in_run=1)


@orders(2)
async def test_a_new_turn_has_a_new_budget(order: Order, signals: Signals) -> None:
    """Run counts begin anew with each turn; thread counts go on until they are used up."""
    scene = Scene(
        signals,
        lambda messages: ["search"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=6, run_limit=2),
            model_limiter(signals, thread_limit=9, run_limit=4),
        ),
    )

    for ran, models in ((2, 4), (4, 8), (5, 9), (5, 9)):
        await scene.turn()
        assert (len(scene.ran), len(scene.model.calls)) == (ran, models)
        scene.check()


async def test_a_thread_begun_under_langchains_limiters(signals: Signals) -> None:
    """A thread begun under LangChain's limiters goes on under ours with its thread counts."""
    saver = InMemorySaver()
    script: Callable[[Any], Any] = lambda messages: ["search"]  # noqa: E731 - shared by two
    before = Scene(
        signals,
        script,
        [
            langchain_middleware.ToolCallLimitMiddleware(thread_limit=9, run_limit=2),
            langchain_middleware.ModelCallLimitMiddleware(thread_limit=9, run_limit=3),
        ],
        checkpointer=saver,
    )
    await before.turn()
    assert before.ran == ["search"] * 2

    scene = Scene(
        signals,
        script,
        [
            tool_limiter(signals, thread_limit=3, run_limit=2),
            model_limiter(signals, thread_limit=5, run_limit=3),
        ],
        checkpointer=saver,
    )
    for _ in range(2):
        await scene.turn()
        scene.check(before={"__all__": 2, "model": 3})

    assert scene.ran == ["search"]
    assert len(scene.model.calls) == 2


class Dutiful(ToolCallLimitMiddleware[Any, Any]):
    """Begins runs in its own way, and calls `super()`."""

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return super().before_agent(state, runtime)

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return await super().abefore_agent(state, runtime)


async def test_a_subclass_begins_runs(signals: Signals) -> None:
    """A subclass with its own before_agent, which calls super(), gets a new budget each turn."""
    limiter = Dutiful(run_limit=1, telemetry=signals.telemetry)
    scene = Scene(signals, [["search", "search"], "done"] * 2, [limiter])

    for turn in (1, 2):
        await scene.turn()
        assert scene.ran == ["search"] * turn
        scene.check()


def _failing_once() -> Callable[[], None]:
    failures = [ConnectionError("once")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    return fail
