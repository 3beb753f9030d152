"""Limits beside other middlewares, and retried nodes: what is counted."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import middleware as theirs
from langchain.agents.middleware import HumanInTheLoopMiddleware, ModelResponse
from langchain_core.messages import AIMessage, ToolCall
from langgraph.types import RetryPolicy

from langchain_quota import ConcurrencyLimit, QuotaWarning, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import (
    Kind,
    Middleware,
    Order,
    Scene,
    check_history,
    either,
    in_order,
    model_limiter,
    orders,
    recording,
    tool_limiter,
)
from tests.telemetry import Signals, per_call


@orders(3)
@pytest.mark.parametrize("target", ["model", "end"])
async def test_jumps_after_the_model(target: str, order: Order, signals: Signals) -> None:
    """Another middleware jumps from after_model, over our hooks: each model call counts once."""
    left = iter(range(4))

    @theirs.after_model(can_jump_to=["model", "end"])
    def jump(state: Any, runtime: Any) -> dict[str, Any] | None:
        jumps = next(left, None) is not None and state["messages"][-1].type == "ai"
        return {"jump_to": target} if jumps else None

    models = model_limiter(signals, thread_limit=5, run_limit=3)
    items = in_order(order, models, tool_limiter(signals, run_limit=2), jump)
    scene = Scene(signals, lambda messages: "again", items)
    for _ in range(4):
        (await scene.played()).check()
    assert len(scene.model.calls) == (5 if target == "model" else 4)


@orders(3)
async def test_a_cached_answer_is_charged(order: Order, signals: Signals) -> None:
    """A call answered by a cache is charged, but for the one order to avoid."""
    cached = [AIMessage("", tool_calls=[ToolCall(name="search", args={}, id="cached")])]

    @theirs.wrap_model_call
    async def cache(request: Any, handler: Any) -> Any:
        return ModelResponse([cached.pop()]) if cached else await handler(request)

    models = model_limiter(signals, thread_limit=2)
    tools = tool_limiter(signals, run_limit=0, exit_behavior="end")
    scene = Scene(signals, lambda messages: "fresh", in_order(order, models, tools, cache))
    await scene.play()
    # A cache in front answers without the limiter; the end of the run then skips its after_model.
    counted = 0 if order == (2, 0, 1) else 1
    scene.check(models=counted, models_in_run=counted)
    await scene.play()
    scene.check(models=counted + 1, models_in_run=1)


REVIEWED = HumanInTheLoopMiddleware[Any, Any]({"search": True})
ONE_SEARCH = ToolCallLimit("search", run_limit=1, exit_behavior="error")
FOUR_CALLS = ToolCallLimit(run_limit=4)
SLOTS = ConcurrencyLimit("calc", max_concurrency=2)


def up_to(**most: int) -> list[ToolCallLimit]:
    return [ToolCallLimit(tool, run_limit=number) for tool, number in most.items()]


FORMS: dict[str, dict[str, Any]] = {
    "approve": {"type": "approve"},
    "reject": {"type": "reject"},
    "respond": {"type": "respond", "message": "the reviewer's answer"},
    "edit": {"type": "edit", "edited_action": {"name": "calc", "args": {}}},
}


@pytest.mark.parametrize(
    ("limits", "kinds", "ran", "behind"),
    [
        # Rejected and answered calls are not charged, leave their room, and get no second answer.
        ([ONE_SEARCH, FOUR_CALLS], ("reject", "approve"), ["search"], None),
        ([ONE_SEARCH, FOUR_CALLS], ("respond", "approve"), ["search"], None),
        # Edited ones are checked as what they became: refused by its limit, not by their own.
        (up_to(search=0, calc=1), ("edit", "edit"), ["calc"], None),
        # Behind the review in the list, limits charge what was asked for.
        ([FOUR_CALLS], ("reject", "respond"), [], {"__all__": 2}),
        (up_to(search=2, calc=0), ("edit", "approve"), ["calc", "search"], {"search": 2}),
    ],
)
async def test_a_review(
    limits: list[ToolCallLimit], kinds: Any, ran: list[str], behind: Any, signals: Signals
) -> None:
    """What a person has said of two searches is what limits before the review count and record."""
    items: list[Any] = [*limits, SLOTS, REVIEWED] if behind is None else [REVIEWED, *limits]
    scene = Scene(signals, [["search", "search"], "done"], items)
    scene.limits = [*limits]
    with warnings.catch_warnings(record=True, action="always") as caught:
        [asked] = (await scene.play())["__interrupt__"]
    assert len(asked.value["action_requests"]) == 2
    assert [each.category for each in caught] == [QuotaWarning] * (behind is not None)
    assert all(str(each.message).endswith("list QuotaMiddleware first") for each in caught)
    await scene.resume({"decisions": [FORMS[kind] for kind in kinds]})
    assert sorted(scene.ran) == ran
    check_history(scene.state()["messages"])
    if behind is None:
        scene.check()
        assert [each.call.tool for each in scene.decisions if each.outcome == "allowed"] == ran
    else:
        assert scene.state()["thread_tool_call_count"] == behind


@either
async def test_an_edit_is_of_one_message(kind: Kind, signals: Signals) -> None:
    """A person's edit changes one call, and no later one to which the model gives the same id."""
    script = [[ToolCall(name="search", args={}, id="again")]] * 2
    scene = Scene(signals, [*script, "done"], [*up_to(search=9, calc=9), REVIEWED], kind=kind)
    await scene.play()
    for answer in ("edit", "approve"):
        await scene.resume({"decisions": [FORMS[answer]]})
    assert (scene.ran, scene.decisions[-1].call.tool) == (["calc", "search"], "search")


@per_call
@pytest.mark.filterwarnings("ignore:HumanInTheLoop")
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


TURN: list[Any] = [["search"] * 3, ["calc"], "done"]
"""A run that asks for more than the limits below admit."""

NOW: dict[str, Any] = {"initial_delay": 0, "jitter": False}
"""Retries that do not wait."""

FAILED = ConnectionError("not now")
MAIL = "ann@example.com"


def limiters(signals: Signals) -> list[Middleware]:
    """Limiters under which two runs like `TURN` run three searches and one calculation."""
    return [
        model_limiter(signals, thread_limit=9, run_limit=4),
        tool_limiter(signals, "search", thread_limit=3, run_limit=2),
        tool_limiter(signals, thread_limit=4),
    ]


def failing(times: int = 1) -> Callable[[], None]:
    """Raises at the first calls."""
    left = iter([FAILED] * times)

    def fail() -> None:
        for error in left:
            raise error

    return fail


def playing(script: Any) -> ScriptedChatModel:
    """A middleware's own model."""
    return ScriptedChatModel(script=script)


def emulating(ran: list[str]) -> Middleware:
    model = playing(lambda _: recording("search", ran).invoke({}))
    return theirs.LLMToolEmulator(tools=["search"], model=model)


ASK = AIMessage(
    f"Asking {MAIL}", tool_calls=[ToolCall(name="search", args={}, id=each) for each in "abc"]
)
SELECTOR = playing(lambda _: [("ToolSelectionResponse", {"tools": ["calc"]})])
CLEARED = theirs.ClearToolUsesEdit(trigger=1, keep=0, placeholder="cleared")
SHORT: Any = {"trigger": ("messages", 4), "keep": ("messages", 1)}
REDACTED: Any = {"apply_to_output": True, "apply_to_tool_results": True}
TWICE = [*TURN, *TURN]
OTHERS: dict[str, tuple[Callable[[list[str]], Middleware], list[Any]]] = {
    "tool retries": (lambda _: theirs.ToolRetryMiddleware(max_retries=4, **NOW), TWICE),
    "model retries": (
        lambda _: theirs.ModelRetryMiddleware(max_retries=2, **NOW),
        [FAILED, TURN[0], FAILED, FAILED, *TURN[1:], *TURN],
    ),
    "model retries that end in an answer": (
        lambda _: theirs.ModelRetryMiddleware(max_retries=1, **NOW),
        [*TURN[:2], FAILED, FAILED, *TURN],
    ),
    "model fallback": (
        lambda _: theirs.ModelFallbackMiddleware(playing([TURN[0], "done"])),
        [FAILED, TURN[1], FAILED, *TURN],
    ),
    "tool emulator": (emulating, TWICE),
    "context editing": (lambda _: theirs.ContextEditingMiddleware(edits=[CLEARED]), TWICE),
    "redaction": (
        lambda _: theirs.PIIMiddleware("email", **REDACTED),
        [ASK, ["calc"], MAIL, *TURN],
    ),
    "summaries": (
        lambda _: theirs.SummarizationMiddleware(playing(lambda _: "a summary"), **SHORT),
        TWICE,
    ),
    "tool selector": (lambda _: theirs.LLMToolSelectorMiddleware(model=SELECTOR), TWICE),
}


@pytest.mark.parametrize(("make", "script"), OTHERS.values(), ids=OTHERS.keys())
async def test_what_is_counted(make: Any, script: Sequence[Any], signals: Signals) -> None:
    """What a middleware repeats counts once, what it emulates counts, its own calls do not."""
    ran: list[str] = []
    other = make(ran)
    models, *limits = limiters(signals)
    fails = failing(3 if isinstance(other, theirs.ToolRetryMiddleware) else 0)
    tools = [recording("search", ran, fails), recording("calc", ran)]
    scene = Scene(signals, script, [models, other, *limits], tools=tools, ran=ran)
    for run in (1, 2):
        await scene.play(f"I am {MAIL}")
        scene.check(models=3 * run, models_in_run=3)
    assert Counter(scene.ran) == {"search": 3, "calc": 1}


RETRY = RetryPolicy(initial_interval=0, jitter=False, max_attempts=2, retry_on=Exception)
"""Once more, at once, whatever was raised."""


async def test_retried_nodes(signals: Signals) -> None:
    """RetryPolicy on the agent's nodes: what failed runs again and counts once; a refusal, too."""
    ran: list[str] = []
    script = [TURN[0], FAILED, *TURN[1:], *TURN, ["calc"]]
    raising = tool_limiter(signals, "calc", thread_limit=2, exit_behavior="error")
    tools = [recording(each, ran, failing()) for each in ("search", "calc")]
    scene = Scene(signals, script, [*limiters(signals), raising], tools=tools, ran=ran)
    scene.agent.retry_policy = (RETRY,)
    for run in (1, 2):
        (await scene.played()).check(models=3 * run, models_in_run=3)
    assert Counter(ran) == {"search": 3, "calc": 1}
