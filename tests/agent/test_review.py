"""Human review of tool calls, in every order."""

from inspect import signature
from typing import Any, Literal

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware

from langchain_quota import ToolCallLimitExceededError
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import Scene, check_history, tool_limiter
from tests.signals import Signals

Review = Literal["approve", "reject", "respond", "edit"]

per_call = pytest.mark.skipif(
    "interrupt_mode" not in signature(HumanInTheLoopMiddleware).parameters,
    reason="this LangChain has no per-call review: pip install -U langchain",
)


def review(kind: Review, tool: str = "calc") -> dict[str, Any]:
    match kind:
        case "respond":
            return {"type": "respond", "message": "the reviewer's answer"}
        case "edit":
            return {"type": "edit", "edited_action": {"name": tool, "args": {}}}
        case _:
            return {"type": kind}


def decisions(*kinds: Review) -> dict[str, Any]:
    return {"decisions": [review(kind) for kind in kinds]}


def scene_of(
    signals: Signals, *middleware: Any, script: Any = (["search", "search"], "done")
) -> Scene:
    return Scene(signals, list(script), middleware)


@pytest.mark.parametrize("kind", ["reject", "respond"])
@pytest.mark.parametrize("exit_behavior", ["continue", "end", "error"])
async def test_limiter_first_not_run(kind: Review, exit_behavior: Any, signals: Signals) -> None:
    """Limiter first: a rejected or answered call is not charged and not answered again."""
    scene = scene_of(
        signals,
        tool_limiter(signals, run_limit=1, exit_behavior=exit_behavior),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.turn()
    await scene.resume(decisions(kind, "approve"))

    assert scene.ran == ["search"]
    scene.check()


@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_limiter_first_with_limit_0(kind: Review, signals: Signals) -> None:
    """Limiter first, with limit 0: what the reviewer answered has one answer, the reviewer's."""
    scene = scene_of(
        signals,
        tool_limiter(signals, "search", run_limit=0),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.turn()
    result = await scene.resume(decisions(kind, "approve"))

    texts = [str(each.content) for each in result["messages"] if each.type == "tool"]
    assert sum("Tool call limit exceeded" in text for text in texts) == 1
    assert scene.ran == []
    scene.check()


async def test_limiter_first_approved(signals: Signals) -> None:
    """Limiter first: an approved call over the limit does not run, one within it is charged."""
    scene = scene_of(
        signals, tool_limiter(signals, run_limit=1), HumanInTheLoopMiddleware({"search": True})
    )

    await scene.turn()
    await scene.resume(decisions("approve", "approve"))

    assert scene.ran == ["search"]
    scene.check()


async def test_limiter_first_edited(signals: Signals) -> None:
    """Limiter first: an edited call is charged as the tool that it became."""
    scene = scene_of(
        signals,
        tool_limiter(signals, "search", run_limit=1),
        tool_limiter(signals, "calc", run_limit=1),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.turn()
    await scene.resume(decisions("approve", "edit"))

    assert sorted(scene.ran) == ["calc", "search"]
    scene.check()


async def test_limiter_first_edited_into_a_refused_tool(signals: Signals) -> None:
    """Limiter first: an edit does not evade the limit of the tool that the call became."""
    scene = scene_of(
        signals,
        tool_limiter(signals, "calc", run_limit=1),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.turn()
    await scene.resume(decisions("edit", "edit"))

    assert scene.ran == ["calc"]
    assert sorted(status for _, status in scene.answers()) == ["error", "success"]
    scene.check()


async def test_limiter_first_edited_out_of_a_refused_tool(signals: Signals) -> None:
    """Limiter first: a call edited away from an exhausted tool runs, and is not charged to it."""
    scene = scene_of(
        signals,
        tool_limiter(signals, "search", run_limit=0),
        HumanInTheLoopMiddleware({"search": True}),
    )

    await scene.turn()
    await scene.resume(decisions("edit", "approve"))

    assert scene.ran == ["calc"]
    scene.check()


async def test_an_edit_of_an_earlier_turn(signals: Signals) -> None:
    """Limiter first: a later call with an id that was edited once is judged as itself."""
    first, again = (
        [{"name": "search", "args": {}, "id": "same", "type": "tool_call"}] for _ in range(2)
    )
    scene = scene_of(
        signals,
        tool_limiter(signals, "search", run_limit=1),
        tool_limiter(signals, "calc", thread_limit=1),
        HumanInTheLoopMiddleware({"search": True}),
        script=[first, "done", again, "done"],
    )

    await scene.turn()
    await scene.resume(decisions("edit"))
    await scene.turn()
    await scene.resume(decisions("approve"))

    assert scene.ran == ["calc", "search"]
    scene.check()


async def test_review_first_approved(signals: Signals) -> None:
    """Review first: the reviewer is asked about refused calls too; approved, they do not run."""
    scene = scene_of(
        signals, HumanInTheLoopMiddleware({"search": True}), tool_limiter(signals, run_limit=1)
    )

    result = await scene.turn()
    assert len(result["__interrupt__"][0].value["action_requests"]) == 2
    await scene.resume(decisions("approve", "approve"))

    assert scene.ran == ["search"]
    scene.check()


@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_review_first_not_run(kind: Review, signals: Signals) -> None:
    """Review first: a rejected or answered call stays charged, though it did not run."""
    scene = scene_of(
        signals, HumanInTheLoopMiddleware({"search": True}), tool_limiter(signals, run_limit=2)
    )

    await scene.turn()
    result = await scene.resume(decisions(kind, "approve"))

    assert scene.ran == ["search"]
    assert scene.state()["langchain_quota"]["run_tools"] == {"__all__": 2}
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2}
    check_history(result["messages"])


@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_review_first_refused_and_not_run(kind: Review, signals: Signals) -> None:
    """Review first: a refused call that the reviewer answers too has two answers."""
    scene = scene_of(
        signals, HumanInTheLoopMiddleware({"search": True}), tool_limiter(signals, run_limit=1)
    )

    await scene.turn()
    await scene.resume(decisions("approve", kind))

    assert scene.ran == ["search"]
    ids = [each.tool_call_id for each in scene.state()["messages"] if each.type == "tool"]
    assert sorted(ids) == ["call_1", "call_2", "call_2"]


async def test_review_first_edited(signals: Signals) -> None:
    """Review first: an edited call is judged as what it was, and evades the other limit."""
    scene = scene_of(
        signals,
        HumanInTheLoopMiddleware({"search": True}),
        tool_limiter(signals, "search", run_limit=2),
        tool_limiter(signals, "calc", run_limit=0),
    )

    await scene.turn()
    await scene.resume(decisions("edit", "approve"))

    assert sorted(scene.ran) == ["calc", "search"]
    assert scene.state()["langchain_quota"]["run_tools"] == {"search": 2}
    check_history(scene.state()["messages"])


async def test_review_first_end(signals: Signals) -> None:
    """Review first: where `end` stops the batch, the reviewer is not asked."""
    scene = scene_of(
        signals,
        HumanInTheLoopMiddleware({"search": True}),
        tool_limiter(signals, run_limit=1, exit_behavior="end"),
    )

    result = await scene.turn()

    assert "__interrupt__" not in result
    assert scene.ran == []
    scene.check()


async def test_review_first_error(signals: Signals) -> None:
    """Review first: where `error` raises, the reviewer is not asked and nothing is charged."""
    scene = scene_of(
        signals,
        HumanInTheLoopMiddleware({"search": True}),
        tool_limiter(signals, run_limit=1, exit_behavior="error"),
    )

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()

    assert scene.ran == []
    scene.check(answered=False)


async def test_review_between_two_limiters(signals: Signals) -> None:
    """Review between: a rejected call stays charged to the limiter behind the review only."""
    scene = scene_of(
        signals,
        tool_limiter(signals, run_limit=2),
        HumanInTheLoopMiddleware({"search": True}),
        tool_limiter(signals, "search", run_limit=2),
    )

    await scene.turn()
    await scene.resume(decisions("reject", "approve"))

    assert scene.ran == ["search"]
    assert scene.state()["langchain_quota"]["run_tools"] == {"__all__": 1, "search": 2}
    check_history(scene.state()["messages"])


def per_call_scene(signals: Signals, order: Order) -> Scene:
    middleware = in_order(
        order,
        tool_limiter(signals, run_limit=2),
        HumanInTheLoopMiddleware({"search": True}, interrupt_mode="per_call"),
    )
    return scene_of(signals, *middleware, script=[["search"] * 3, "done"])


def per_call_answers(result: dict[str, Any], *reviews: dict[str, Any]) -> dict[str, Any]:
    asked = result["__interrupt__"]
    return {each.id: answer for each, answer in zip(asked, reviews, strict=True)}


@per_call
@orders(2)
async def test_per_call_approved(order: Order, signals: Signals) -> None:
    """Per-call review: only admitted calls are asked about; approved, they run and are charged."""
    scene = per_call_scene(signals, order)

    result = await scene.turn()
    await scene.resume(per_call_answers(result, review("approve"), review("approve")))

    assert scene.ran == ["search"] * 2
    scene.check()


@per_call
@orders(2)
@pytest.mark.parametrize("kind", ["reject", "respond"])
async def test_per_call_not_run(order: Order, kind: Review, signals: Signals) -> None:
    """Per-call review: a rejected or answered call stays charged; it is answered once."""
    scene = per_call_scene(signals, order)

    result = await scene.turn()
    await scene.resume(per_call_answers(result, review(kind), review("approve")))

    assert scene.ran == ["search"]
    assert scene.state()["langchain_quota"]["run_tools"] == {"__all__": 2}
    check_history(scene.state()["messages"])
    scene.check_requests()


@per_call
@orders(2)
async def test_per_call_edited(order: Order, signals: Signals) -> None:
    """Per-call review: an edit cannot change the tool, so the charge is that of what ran."""
    scene = per_call_scene(signals, order)

    result = await scene.turn()
    edited = review("edit", "search")
    await scene.resume(per_call_answers(result, edited, review("approve")))

    assert scene.ran == ["search"] * 2
    scene.check()
