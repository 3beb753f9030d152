"""Jumps that skip our after_model, and model calls that yield something unusual."""

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import (
    AgentMiddleware,
    ModelRequest,
    ModelResponse,
)
from langchain_core.messages import AIMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from tests.scene import CONFIG, Order, Scene, in_order, model_limiter, orders, tool_limiter
from tests.signals import Signals

Handler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]


class Cache(AgentMiddleware[Any, Any, Any]):
    """Answers model calls itself, without the model, as long as it has answers."""

    def __init__(self, *answers: AIMessage) -> None:
        super().__init__()
        self.answers = list(answers)
        self.hits = 0

    def _answer(self) -> ModelResponse[Any] | None:
        if not self.answers:
            return None
        self.hits += 1
        return ModelResponse(result=[self.answers.pop(0)])

    def wrap_model_call(self, request: ModelRequest[Any], handler: Handler) -> ModelResponse[Any]:
        return self._answer() or handler(request)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: AsyncHandler
    ) -> ModelResponse[Any]:
        return self._answer() or await handler(request)


class ForgetHistory(AgentMiddleware[Any, Any, Any]):
    """Keeps only the newest message when a run begins."""

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        newest = state["messages"][-1]
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), newest]}


@orders(2)
async def test_a_cached_answer_is_charged(order: Order, signals: Signals) -> None:
    """A call answered by another middleware's cache is charged."""
    cache = Cache(AIMessage("cached"))
    scene = Scene(
        signals,
        lambda messages: "fresh",
        in_order(order, model_limiter(signals, thread_limit=2), cache),
    )

    for turn in (1, 2, 3):
        await scene.play()
        in_run = 1 if turn < 3 else 0
        scene.check(models=len(scene.model.calls) + cache.hits, models_in_run=in_run)

    assert (cache.hits, len(scene.model.calls)) == (1, 1)


async def test_messages_removed_between_turns(signals: Signals) -> None:
    """An application removes all messages between turns: the thread's counts go on."""
    scene = Scene(
        signals,
        lambda messages: "done" if len(messages) > 1 else ["search", "search"],
        [model_limiter(signals, thread_limit=5), tool_limiter(signals, thread_limit=3)],
    )

    for _ in range(3):
        await scene.play()
        scene.check()
        scene.agent.update_state(
            CONFIG, {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES)]}, as_node="model"
        )

    assert scene.ran == ["search"] * 3
    assert len(scene.model.calls) == 5


@orders(2)
async def test_messages_removed_when_a_run_begins(order: Order, signals: Signals) -> None:
    """A middleware trims the history at the beginning of each run: the counts go on."""
    scene = Scene(
        signals,
        [["search", "search"], "done", ["search", "search"], "done"],
        in_order(order, tool_limiter(signals, thread_limit=3), ForgetHistory()),
    )

    for _ in range(2):
        await scene.play()
        scene.check()

    assert scene.ran == ["search"] * 3
