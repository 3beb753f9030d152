"""Jumps that skip our after_model, and model calls that yield something unusual."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelRequest,
    ModelResponse,
    SummarizationMiddleware,
    hook_config,
)
from langchain_core.messages import AIMessage, RemoveMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Send

from langchain_quota import InlineQuotaMiddleware, ModelCallLimit, QuotaMiddleware
from langchain_quota.testing import ScriptedChatModel
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import CONFIG, Scene, check_history, model_limiter, recording, tool_limiter
from tests.signals import Signals, needs_inline

Handler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]


class JumpAfterModel(AgentMiddleware[Any, Any, Any]):
    """Jumps after each of the first `times` model calls, and says so."""

    def __init__(self, target: str, times: int) -> None:
        super().__init__()
        self.target = target
        self.left = times

    @hook_config(can_jump_to=["model", "end"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if not self.left:
            return None
        self.left -= 1
        return {"jump_to": self.target}


class JumpBeforeModel(AgentMiddleware[Any, Any, Any]):
    """Jumps before the model call of this number, counted from 1."""

    def __init__(self, target: str, at: int) -> None:
        super().__init__()
        self.target = target
        self.left = at

    @hook_config(can_jump_to=["model", "end"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.left -= 1
        return {"jump_to": self.target} if self.left == 0 else None


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


class Mute(AgentMiddleware[Any, Any, Any]):
    """Drops what the model says at the call of this number, counted from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def _heard(self, response: ModelResponse[Any]) -> ModelResponse[Any]:
        self.left -= 1
        return ModelResponse(result=[]) if self.left == 0 else response

    def wrap_model_call(self, request: ModelRequest[Any], handler: Handler) -> ModelResponse[Any]:
        return self._heard(handler(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: AsyncHandler
    ) -> ModelResponse[Any]:
        return self._heard(await handler(request))


class ForgetHistory(AgentMiddleware[Any, Any, Any]):
    """Keeps only the newest message when a run begins."""

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        newest = state["messages"][-1]
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), newest]}


@orders(2)
async def test_our_own_end(order: Order, signals: Signals) -> None:
    """Our own `end` skips the model limiter's after_model: every model call is still counted."""
    scene = Scene(
        signals,
        lambda messages: ["search"],
        in_order(
            order,
            model_limiter(signals, thread_limit=3),
            tool_limiter(signals, run_limit=0, exit_behavior="end"),
        ),
    )

    for turn in range(1, 6):
        await scene.turn()
        assert len(scene.model.calls) == min(turn, 3)
        scene.check()


@orders(2)
async def test_another_jump_back_to_the_model(order: Order, signals: Signals) -> None:
    """Another middleware jumps from after_model to the model: each call is counted once."""
    scene = Scene(
        signals,
        lambda messages: "again",
        in_order(order, model_limiter(signals, run_limit=3), JumpAfterModel("model", 99)),
    )

    for turn in (1, 2):
        await scene.turn()
        assert len(scene.model.calls) == 3 * turn
        scene.check()


@orders(2)
async def test_another_jump_to_the_end(order: Order, signals: Signals) -> None:
    """Another middleware jumps from after_model to the end: each call is counted once."""
    scene = Scene(
        signals,
        lambda messages: "bye",
        in_order(order, model_limiter(signals, thread_limit=3), JumpAfterModel("end", 2)),
    )

    for turn in range(1, 6):
        await scene.turn()
        assert len(scene.model.calls) == min(turn, 3)
        scene.check()


@orders(3)
async def test_a_jump_between_two_limiters(order: Order, signals: Signals) -> None:
    """Jumps beside a model and a tool limiter: model calls count once, tools when they run."""
    scene = Scene(
        signals,
        ["one", "two", ["search", "search"], ["search"], "done"],
        in_order(
            order,
            model_limiter(signals, run_limit=9),
            tool_limiter(signals, run_limit=2),
            JumpAfterModel("model", 2),
        ),
    )

    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert len(scene.model.calls) == 5
    scene.check()


@orders(2)
async def test_another_end_before_the_model(order: Order, signals: Signals) -> None:
    """Another middleware ends the run in before_model: the call that was not made is free."""
    scene = Scene(
        signals,
        [["calc"], "done"],
        in_order(order, model_limiter(signals, run_limit=3), JumpBeforeModel("end", 2)),
    )

    await scene.turn()
    assert len(scene.model.calls) == 1
    scene.check()


async def test_another_jump_back_before_the_model(signals: Signals) -> None:
    """Another middleware jumps in before_model to the model: each call is charged once."""
    # Ours first only: LangGraph cannot jump from the first before_model to itself.
    scene = Scene(
        signals,
        [["calc"], "done"],
        [model_limiter(signals, run_limit=2), JumpBeforeModel("model", 1)],
    )

    await scene.turn()

    assert len(scene.model.calls) == 2
    scene.check()


@orders(2)
async def test_another_jump_over_the_tools(order: Order, signals: Signals) -> None:
    """Another middleware ends the run over open calls: the next turn answers them, none ran."""
    scene = Scene(
        signals,
        [["search"], "done"],
        in_order(order, tool_limiter(signals, thread_limit=2), JumpAfterModel("end", 1)),
    )

    await scene.turn()
    await scene.turn()

    assert scene.ran == []
    assert scene.answers() == [("search", "error")]
    # Judged before the jump it stays charged: nothing tells the jump from a crashed tool.
    charged = 1 if order == (1, 0) else 0
    assert scene.state().get("thread_tool_call_count", {}).get("__all__", 0) == charged
    check_history(scene.state()["messages"])
    scene.check_requests()


def steering(goto: Any) -> BaseTool:
    """A tool that says itself where the graph goes on."""

    def steer(tool_call_id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Steer."""
        answer = ToolMessage("steered", tool_call_id=tool_call_id, name="steer")
        return Command(update={"messages": [answer]}, goto=goto)

    return StructuredTool.from_function(steer)


@pytest.mark.parametrize("call_id", ["of-its-own", "call_1"], ids=["another id", "a judged id"])
async def test_a_tool_that_starts_tool_calls(call_id: str, signals: Signals) -> None:
    """What a tool sends to the tools passes all limits, uncounted: the documents say so."""
    ran: list[str] = []
    sent = [ToolCall(name="search", args={}, id=call_id, type="tool_call")]
    scene = Scene(
        signals,
        [["steer"], "done", "done"],
        [tool_limiter(signals, "search", thread_limit=0), tool_limiter(signals, run_limit=1)],
        tools=[steering([Send("tools", sent)] * 3), recording("search", ran)],
        ran=ran,
    )

    await scene.turn()

    assert ran == ["search"] * 3
    assert scene.state()["thread_tool_call_count"] == {"__all__": 1}
    assert scene.metric("tool:*", "allowed") == 1


def limiter_of_models(kind: str, signals: Signals) -> AgentMiddleware[Any, Any, Any]:
    if kind == "drop-in":
        return model_limiter(signals, run_limit=1)
    middleware = QuotaMiddleware if kind == "quota" else InlineQuotaMiddleware
    return middleware([ModelCallLimit(run_limit=1)], telemetry=signals.telemetry)


@pytest.mark.parametrize(
    ("kind", "made", "counted"),
    [("drop-in", 2, 2), ("quota", 2, 1), pytest.param("inline", 1, 1, marks=needs_inline)],
)
async def test_a_tool_that_goes_to_the_model(
    kind: str, made: int, counted: int, signals: Signals
) -> None:
    """A model call that a tool goes to is judged by InlineQuotaMiddleware only."""
    scene = Scene(
        signals,
        [["steer"], "done", "done"],
        [limiter_of_models(kind, signals)],
        tools=[steering("model")],
    )

    await scene.turn()

    assert len(scene.model.calls) == made
    assert scene.state()["thread_model_call_count"] == counted


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
        await scene.turn()
        in_run = 1 if turn < 3 else 0
        scene.check(models=len(scene.model.calls) + cache.hits, models_in_run=in_run)

    assert (cache.hits, len(scene.model.calls)) == (1, 1)


@orders(3)
async def test_a_cached_answer_that_ends_the_run(order: Order, signals: Signals) -> None:
    """A cached call of a forbidden tool ends the run: charged, but for the one order to avoid."""
    call = {"name": "search", "args": {}, "id": "cached-call"}
    cache = Cache(AIMessage("", tool_calls=[call]))
    scene = Scene(
        signals,
        lambda messages: "fresh",
        in_order(
            order,
            model_limiter(signals, thread_limit=9),
            tool_limiter(signals, run_limit=0, exit_behavior="end"),
            cache,
        ),
    )

    await scene.turn()

    assert cache.hits == 1
    # A cache in front answers without the limiter; the end of the run then skips its after_model.
    counted = 0 if order == (2, 0, 1) else 1
    scene.check(models=counted, models_in_run=counted)


@orders(3)
async def test_a_model_node_without_an_ai_message(order: Order, signals: Signals) -> None:
    """A model node that yields nothing: its call counts, earlier tool calls do not again."""
    scene = Scene(
        signals,
        [["search"], "dropped", ["search"], "done"],
        in_order(
            order, model_limiter(signals, run_limit=9), tool_limiter(signals, run_limit=2), Mute(2)
        ),
    )

    await scene.turn()

    assert scene.ran == ["search"] * 2
    assert len(scene.model.calls) == 4
    scene.check()


@orders(2)
async def test_the_first_model_node_without_an_ai_message(order: Order, signals: Signals) -> None:
    """A history without any AIMessage: nothing of ours breaks, and the model call counts."""
    scene = Scene(
        signals, ["dropped"], in_order(order, model_limiter(signals, run_limit=9), Mute(1))
    )

    await scene.turn()

    scene.check()


async def test_messages_removed_between_turns(signals: Signals) -> None:
    """An application removes all messages between turns: the thread's counts go on."""
    scene = Scene(
        signals,
        lambda messages: "done" if len(messages) > 1 else ["search", "search"],
        [model_limiter(signals, thread_limit=5), tool_limiter(signals, thread_limit=3)],
    )

    for _ in range(3):
        await scene.turn()
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
        await scene.turn()
        scene.check()

    assert scene.ran == ["search"] * 3


@orders(3)
async def test_messages_summarized(order: Order, signals: Signals) -> None:
    """Summarization replaces old messages: counts go on, and its own calls are not counted."""
    scene = Scene(
        signals,
        [["search"], "done"] * 3,
        in_order(
            order,
            model_limiter(signals, thread_limit=9),
            tool_limiter(signals, thread_limit=2),
            SummarizationMiddleware(
                ScriptedChatModel(script=lambda messages: "a summary"),
                trigger=("messages", 4),
                keep=("messages", 2),
            ),
        ),
    )

    for _ in range(3):
        await scene.turn()
        scene.check()

    assert scene.ran == ["search"] * 2
    assert "a summary" in str(scene.model.calls[-1].messages)
