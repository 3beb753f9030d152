"""LangChain's other middlewares, and retried nodes, beside the limiters: what is counted."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from langchain.agents.middleware import (
    ModelRetryMiddleware,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from tests.scene import Middleware, Order, Scene, in_order, model_limiter, recording, tool_limiter
from tests.signals import Signals

TURN = [["search"] * 3, ["calc"], "done"]
"""A turn that asks for more than the limits below admit."""

AT_ONCE: dict[str, Any] = {"initial_delay": 0, "jitter": False}
"""Retries that do not wait."""


def limiters(signals: Signals) -> list[Middleware]:
    """Limiters under which two turns like `TURN` run `LIMITED`."""
    return [
        model_limiter(signals, thread_limit=9, run_limit=4),
        tool_limiter(signals, "search", thread_limit=3, run_limit=2),
        tool_limiter(signals, thread_limit=4),
    ]


LIMITED = {"search": 3, "calc": 1}


def beside(signals: Signals, *others: Middleware, order: Order = (0, 1)) -> list[Middleware]:
    """The limiters and other middlewares, whichever come first: it matters only to node hooks."""
    return [each for part in in_order(order, limiters(signals), others) for each in part]


def failing(times: int = 1) -> Callable[[], None]:
    """Raises at the first calls."""
    calls = count(1)

    def fail() -> None:
        if next(calls) <= times:
            raise ConnectionError("not now")

    return fail


async def test_model_retry_that_raises(signals: Signals) -> None:
    """ModelRetryMiddleware that gives up by raising: the call is not counted."""
    failed = ConnectionError("not now")
    scene = Scene(
        signals,
        [["search"], failed, failed, "done"],
        beside(signals, ModelRetryMiddleware(max_retries=1, on_failure="error", **AT_ONCE)),
    )

    with pytest.raises(ConnectionError):
        await scene.play()
    scene.check(models=1, models_in_run=1)

    await scene.play()
    scene.check(models=2, models_in_run=1)


RETRY = RetryPolicy(initial_interval=0, jitter=False, max_attempts=2, retry_on=Exception)
"""Once more, at once, whatever was raised."""


class NodeScene(Scene):
    """A scene whose agent is a node, with a retry policy, of another graph."""

    def __init__(self, *args: Any, checkpointer: Any = None, **options: Any) -> None:
        super().__init__(*args, checkpointer=checkpointer, **options)
        self.saver = InMemorySaver()
        graph = StateGraph(MessagesState)
        graph.add_node("agent", self.agent, retry_policy=RETRY)
        graph.add_edge(START, "agent")
        self.agent = graph.compile(checkpointer=self.saver)

    def state(self) -> dict[str, Any]:
        """The state of the agent as the newest attempt left it."""
        newest = [namespace for namespace in self.saver.storage["thread-1"] if namespace][-1]
        config: Any = {"configurable": {"thread_id": "thread-1", "checkpoint_ns": newest}}
        saved = self.saver.get_tuple(config)
        assert saved is not None
        return dict(saved.checkpoint["channel_values"])


async def test_an_agent_with_its_own_memory_as_a_retried_node(signals: Signals) -> None:
    """The same with a memory of its own: attempts count apart, the next turn has the first's."""
    ran: list[str] = []
    scene = NodeScene(
        signals,
        [["search"], ["flaky"], ["search"], "done", ["search", "search"], "done"],
        [tool_limiter(signals, thread_limit=3)],
        tools=[recording("search", ran), recording("flaky", ran, failing())],
        ran=ran,
        checkpointer=True,
    )

    await scene.play()
    assert ran == ["search", "search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}

    await scene.play()
    # Of the first attempt there are a search and the failed call: one is left.
    assert ran == ["search"] * 3
    scene.check_requests()
