"""`give_up_after`: a model that will not listen ends its run after so many refusals."""

from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import ToolCall
from langgraph.types import interrupt
from pydantic import BaseModel

from langchain_quota import (
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests.agent.rules import Scene, recording
from tests.signals import Signals

REACHED = "'search' tool call limit reached: run limit exceeded"


class Weather(BaseModel):
    """The weather."""

    degrees: int


def scene_of(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    return Scene(signals, script, [quota], **options)


def stubborn(_messages: Any) -> list[str]:
    """A model that searches for ever."""
    return ["search"]


def last_text(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content)


@pytest.mark.parametrize("refusals", [1, 2, 5])
async def test_one_by_one(refusals: int, signals: Signals) -> None:
    """The run ends with the refusal that is one too many, and not before."""
    scene = scene_of(
        signals, stubborn, ToolCallLimit("search", run_limit=2, give_up_after=refusals)
    )

    result = await scene.turn()

    assert scene.ran == ["search", "search"]
    assert len(scene.model.calls) == 2 + refusals
    assert scene.answers() == [("search", "success")] * 2 + [("search", "error")] * refusals
    assert last_text(result) == f"{REACHED} (3/2 calls)."
    assert scene.metric("tool:search", "blocked", "run") == refusals
    scene.check()


async def test_without_it(signals: Signals) -> None:
    """Without it a model may be refused as often as it likes."""
    scene = scene_of(signals, [["search"]] * 20 + ["done"], ToolCallLimit("search", run_limit=1))

    result = await scene.turn()

    assert last_text(result) == "done"
    assert scene.metric("tool:search", "blocked", "run") == 19
    scene.check()


async def test_several_in_a_batch(signals: Signals) -> None:
    """Every refused call of a batch counts, and the batch that goes too far runs nothing."""
    scene = scene_of(
        signals,
        [["search", "search"], ["calc"], ["calc", "search", "search"], "never"],
        ToolCallLimit("search", run_limit=1, give_up_after=3),
        ToolCallLimit(run_limit=9),
    )

    with captured_decisions() as decisions:
        result = await scene.turn()

    assert sorted(scene.ran) == ["calc", "search"]
    assert last_text(result) == f"{REACHED} (3/1 calls)."
    last_batch = [(each.call.tool, each.outcome) for each in decisions[-3:]]
    assert last_batch == [
        ("calc", Outcome.SKIPPED),
        ("search", Outcome.BLOCKED),
        ("search", Outcome.BLOCKED),
    ]
    refusing = decisions[-1].refused_by[0]
    assert refusing.exit_behavior == "end"
    assert scene.metric("tool:*", "allowed") == 2
    scene.check()


async def test_a_new_run_is_given_a_new_chance(signals: Signals) -> None:
    """Refusals are counted by run: the next turn may be refused as often again."""
    scene = scene_of(signals, stubborn, ToolCallLimit("search", thread_limit=1, give_up_after=2))

    requests = []
    for _ in range(3):
        await scene.turn()
        requests.append(len(scene.model.calls))
        scene.check()

    assert scene.ran == ["search"]
    assert requests == [3, 5, 7]


async def test_an_interrupted_run_is_not(signals: Signals) -> None:
    """A run that waited for a human goes on with its refusals."""
    ran: list[str] = []
    ask = recording("ask", ran, lambda: interrupt("what?"))
    scene = scene_of(
        signals,
        [["search"], ["ask"], ["search"], "never"],
        ToolCallLimit("search", run_limit=0, give_up_after=2),
        tools=["search", ask],
        ran=ran,
    )

    await scene.turn()
    result = await scene.resume("this")

    assert ran == ["ask"]
    assert len(scene.model.calls) == 3
    assert last_text(result) == f"{REACHED} (1/0 calls)."
    scene.check()


async def test_limits_lose_patience_alone(signals: Signals) -> None:
    """Each limit counts its own refusals, and only what was hit is named."""
    scene = scene_of(
        signals,
        [["search"], ["calc"], ["search"], ["calc"], ["calc"], "never"],
        ToolCallLimit("search", run_limit=0, give_up_after=3),
        ToolCallLimit("calc", run_limit=0, give_up_after=3),
    )

    result = await scene.turn()

    assert len(scene.model.calls) == 5
    assert last_text(result) == ("'calc' tool call limit reached: run limit exceeded (1/0 calls).")
    scene.check()


@pytest.mark.parametrize("copies", [1, 2])
async def test_an_id_that_is_given_twice(copies: int, signals: Signals) -> None:
    """Calls of one id are one refusal, in their batch and for the rest of the run."""
    twin = ToolCall(name="search", args={}, id="twin", type="tool_call")
    scene = scene_of(
        signals,
        [[twin] * copies, ["search"], ["search"], "never"],
        ToolCallLimit("search", run_limit=0, give_up_after=3),
    )

    result = await scene.turn()

    assert len(scene.model.calls) == 3
    assert last_text(result) == f"{REACHED} (1/0 calls)."


async def test_a_call_that_two_refuse(signals: Signals) -> None:
    """A call that two limits refuse counts for both; the last word names both."""
    scene = scene_of(
        signals,
        [["search"], ["search"], "never"],
        ToolCallLimit("search", run_limit=0, give_up_after=2),
        ToolCallLimit(run_limit=0),
    )

    result = await scene.turn()

    assert len(scene.model.calls) == 2
    assert last_text(result) == (
        f"{REACHED} (1/0 calls). Tool call limit reached: run limit exceeded (1/0 calls)."
    )
    scene.check()


async def test_the_own_message(signals: Signals) -> None:
    """A limit's own message is the last word, too."""
    scene = scene_of(
        signals,
        stubborn,
        ToolCallLimit("search", run_limit=0, give_up_after=1, message="Enough searching."),
    )

    result = await scene.turn()

    assert last_text(result) == "Enough searching."
    assert len(scene.model.calls) == 1
    scene.check()


async def test_an_error_goes_first(signals: Signals) -> None:
    """A limit that raises raises, in the batch with which another gives up."""
    scene = scene_of(
        signals,
        [["search", "calc"], "done"],
        ToolCallLimit("search", run_limit=0, give_up_after=1),
        ToolCallLimit("calc", run_limit=0, exit_behavior="error"),
    )

    with pytest.raises(ToolCallLimitExceededError) as raised:
        await scene.turn()

    assert REACHED in str(raised.value)
    assert raised.value.tool_name == "calc"
    scene.check(answered=False)


async def test_a_structured_answer_goes_first(signals: Signals) -> None:
    """Beside a delivered structured answer there is nothing to give up: no last word."""
    scene = scene_of(
        signals,
        [["search", ("Weather", {"degrees": 20})]],
        ToolCallLimit("search", run_limit=0, give_up_after=1),
        response_format=ToolStrategy(Weather),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert [each.type for each in result["messages"]] == ["human", "ai", "tool", "tool"]
    scene.check()
