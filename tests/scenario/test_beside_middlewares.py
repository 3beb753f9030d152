"""Limits beside middlewares that jump, cache, trim, and ask a person to review calls."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelResponse,
    hook_config,
)
from langchain_core.messages import AIMessage, RemoveMessage, ToolCall
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from langchain_quota import ModelCallLimit, ModelCallLimitExceededError, ToolCallLimit
from tests.scene import (
    CONFIG,
    Kind,
    Order,
    Scene,
    asking,
    check_history,
    in_order,
    model_limiter,
    orders,
    tool_limiter,
)
from tests.telemetry import Signals, needs_inline


class JumpAfterModel(AgentMiddleware[Any, Any, Any]):
    """Jumps after each of the first `times` model calls, and says so."""

    def __init__(self, target: str, times: int = 1) -> None:
        super().__init__()
        self.target, self.left = target, times

    @hook_config(can_jump_to=["model", "end", "tools"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.left -= 1
        jumps = self.left >= 0 and state["messages"][-1].type == "ai"
        return {"jump_to": self.target} if jumps else None


class Cache(AgentMiddleware[Any, Any, Any]):
    """Answers model calls itself, without the model, as long as it has answers."""

    def __init__(self, *answers: AIMessage) -> None:
        super().__init__()
        self.answers = list(answers)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return ModelResponse([self.answers.pop()]) if self.answers else await handler(request)


@orders(3)
@pytest.mark.parametrize("target", ["model", "end"])
async def test_jumps_after_the_model(target: str, order: Order, signals: Signals) -> None:
    """Another middleware jumps from after_model, over our hooks: each model call counts once."""
    limiters = (
        model_limiter(signals, thread_limit=5, run_limit=3),
        tool_limiter(signals, run_limit=2),
    )
    items = in_order(order, *limiters, JumpAfterModel(target, 4))
    scene = Scene(signals, lambda messages: "again", items)
    for _ in range(4):
        await scene.play()
        scene.check()
    assert len(scene.model.calls) == (5 if target == "model" else 4)


@needs_inline
@pytest.mark.parametrize("limit", [ModelCallLimit, ToolCallLimit])
async def test_an_ended_run_that_is_led_back(limit: Any, signals: Signals) -> None:
    """An inline quota raises: its hooks cannot keep another middleware from going round."""
    items = [limit(run_limit=1, exit_behavior="end"), JumpAfterModel("model", 99)]
    scene = Scene(signals, lambda _: ["search"] * 2, items, kind="inline")
    for turn in (1, 2):
        with pytest.raises(ModelCallLimitExceededError, match="has ended this run"):
            await scene.play()
        assert len(scene.model.calls) == turn


@orders(3)
async def test_a_cached_answer_is_charged(order: Order, signals: Signals) -> None:
    """A call answered by a cache is charged, but for the one order to avoid."""
    cache = Cache(AIMessage("", tool_calls=[ToolCall(name="search", args={}, id="cached")]))
    models = model_limiter(signals, thread_limit=2)
    tools = tool_limiter(signals, run_limit=0, exit_behavior="end")
    scene = Scene(signals, lambda messages: "fresh", in_order(order, models, tools, cache))
    await scene.play()
    # A cache in front answers without the limiter; the end of the run then skips its after_model.
    counted = 0 if order == (2, 0, 1) else 1
    scene.check(models=counted, models_in_run=counted)
    await scene.play()
    scene.check(models=counted + 1, models_in_run=1)


@pytest.mark.parametrize("kind", ["drop-in", "quota", pytest.param("inline", marks=needs_inline)])
async def test_messages_removed(kind: Kind, signals: Signals) -> None:
    """An application removes the messages of a thread: the thread's counts go on."""
    limits: list[Any] = [ModelCallLimit(thread_limit=5), ToolCallLimit(thread_limit=3)]
    scene = Scene(signals, asking("search", "search"), limits, kind=kind)
    for _ in range(3):
        await scene.play()
        scene.check()
        removed = {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES)]}
        scene.agent.update_state(CONFIG, removed, as_node="model")
    assert scene.ran == ["search"] * 3
    assert len(scene.model.calls) == 5


REVIEWED = HumanInTheLoopMiddleware[Any, Any]({"search": True})
FORMS: dict[str, dict[str, Any]] = {
    "approve": {"type": "approve"},
    "reject": {"type": "reject"},
    "respond": {"type": "respond", "message": "the reviewer's answer"},
    "edit": {"type": "edit", "edited_action": {"name": "calc", "args": {}}},
}


async def reviewed(signals: Signals, items: Sequence[Any], *kinds: str) -> Scene:
    """A run with two searches, and what a person has said of them."""
    scene = Scene(signals, [["search", "search"], "done"], items)
    asked = (await scene.play())["__interrupt__"][0].value["action_requests"]
    assert len(asked) == 2
    await scene.resume({"decisions": [FORMS[kind] for kind in kinds]})
    return scene


@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_review_without_running(kind: str, signals: Signals) -> None:
    """A rejected or answered call is not charged, leaves its room, and is not answered again.

    So where the quota is first; where the review is, such a call stays charged.
    """
    limits = [
        ToolCallLimit("search", run_limit=1, exit_behavior="error"),
        ToolCallLimit(run_limit=4),
    ]
    scene = await reviewed(signals, [*limits, REVIEWED], kind, "approve")
    assert scene.ran == ["search"]
    scene.check()

    scene = await reviewed(signals, [REVIEWED, ToolCallLimit(run_limit=2)], kind, "approve")
    assert scene.ran == ["search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    check_history(scene.state()["messages"])


async def test_review_edited(signals: Signals) -> None:
    """Edited calls are checked as what they became: refused by its limit, not by their own.

    So where the quota is first; where the review is, as what they were.
    """
    limits = ToolCallLimit("search", run_limit=0), ToolCallLimit("calc", run_limit=1)
    scene = await reviewed(signals, [*limits, REVIEWED], "edit", "edit")
    assert scene.ran == ["calc"]
    scene.check()

    limits = ToolCallLimit("search", run_limit=2), ToolCallLimit("calc", run_limit=0)
    scene = await reviewed(signals, [REVIEWED, *limits], "edit", "approve")
    assert sorted(scene.ran) == ["calc", "search"]
    assert scene.used(limits[0]) == (2, 2)
    check_history(scene.state()["messages"])


@pytest.mark.skipif(
    "interrupt_mode" not in signature(HumanInTheLoopMiddleware).parameters,
    reason="this LangChain has no per-call review: pip install -U langchain",
)
@orders(2)
@pytest.mark.parametrize("kinds", [("approve", "edit"), ("reject", "respond")])
async def test_per_call(kinds: Sequence[str], order: Order, signals: Signals) -> None:
    """Per-call review: only admitted calls are asked about; whatever is said, they stay charged."""
    review = HumanInTheLoopMiddleware[Any, Any]({"search": True}, interrupt_mode="per_call")
    items = in_order(order, tool_limiter(signals, run_limit=2), review)
    scene = Scene(signals, [["search"] * 3, "done"], items)

    asked = (await scene.play())["__interrupt__"]
    edit = {"type": "edit", "edited_action": {"name": "search", "args": {"edited": True}}}
    forms = {**FORMS, "edit": edit}
    await scene.resume({each.id: forms[kind] for each, kind in zip(asked, kinds, strict=True)})

    assert scene.ran == (["search"] * 2 if "approve" in kinds else [])
    assert scene.state()["langchain_quota"]["counts"]["run_tools"] == {"__all__": 2}
    check_history(scene.state()["messages"])
    scene.check_requests()
