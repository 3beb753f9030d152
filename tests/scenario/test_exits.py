"""What refusals do to runs: `continue`, `end`, `error`, `give_up_after`; and what they say."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolCall

from langchain_quota import Decision, MemoryStore, ModelCallLimit, ToolCallLimit
from langchain_quota.errors import ToolCallLimitExceededError
from langchain_quota.limits import Limit
from tests.scene import Kind, Scene, asking, either, texts
from tests.telemetry import Signals

TOOLS = ("search", "calc", "ask")
EXITS = ["continue", "end", "error"]
REFUSED = "Tool call limit exceeded. Do not call 'search' again."
NO_TOOLS = "Tool call limit exceeded. Do not make additional tool calls"
END: dict[str, Any] = {"exit_behavior": "end"}


def stubborn(_messages: Any) -> list[str]:
    """A model that searches for ever, and never says a word."""
    return ["search"]


async def test_a_refusal_by_two_scopes_is_shown_as_the_threads(signals: Signals) -> None:
    """Where thread and run are used up by the same call, decisions and metrics name the thread."""
    limit = ToolCallLimit("search", thread_limit=1, run_limit=1)
    scene = await Scene(signals, [["search", "search"], "done"], [limit]).played()
    assert [status.scope for each in scene.decisions for status in each.refused_by] == ["thread"]
    assert [scene.metric("tool:search", "blocked", each) for each in ("thread", "run")] == [1, 0]


@pytest.mark.parametrize("make", [lambda: None, MemoryStore], ids=["in the state", "in a store"])
async def test_a_tool_named_model_has_a_count_of_its_own(make: Any, signals: Signals) -> None:
    """Calls of a tool named `model` are no model calls, with a store and without."""
    limits: list[Limit] = [ToolCallLimit("model", thread_limit=100), ModelCallLimit(thread_limit=4)]
    scene = Scene(signals, asking("model", "model"), limits, tools=["model"], store=make())
    for turn in (1, 2):
        await scene.play()
        assert scene.ran == ["model"] * 2 * turn
        assert len(scene.model.calls) == 2 * turn
        scene.check()


@either
@pytest.mark.parametrize("exits", list(permutations(EXITS, 2)), ids="-".join)
async def test_the_strongest_exit(exits: Sequence[Any], kind: Kind, signals: Signals) -> None:
    """A batch over two of three limits does the stronger of what they ask, and names both."""
    limits = [
        ToolCallLimit(tool, run_limit=0, exit_behavior=each)
        for tool, each in zip(TOOLS, (*exits, "end"), strict=True)
    ]
    scene = Scene(signals, [["search", "calc"], "done"], limits, kind=kind, tools=TOOLS)
    strongest = max(exits, key=EXITS.index)
    if strongest == "error":
        with pytest.raises(ToolCallLimitExceededError) as raised:
            await scene.play()
        told = str(raised.value)
        assert raised.value.tool_name == TOOLS[exits.index("error")]
    else:
        await scene.play()
        told = scene.last_text()
    if strongest != "continue":
        named = [f"'{tool}' tool call limit reached" in told for tool in TOOLS]
        assert named == [True, True, False]
    assert scene.ran == []
    assert len(scene.model.calls) == (2 if strongest == "continue" else 1)
    blocked = [scene.metric(f"tool:{tool}", "blocked", "run") for tool in TOOLS]
    assert blocked == [1, 1, 0]
    if kind == "quota" or strongest != "error":
        scene.check(answered=strongest != "error")


@either
@pytest.mark.parametrize("refusals", [1, 3])
async def test_giving_up(refusals: int, kind: Kind, signals: Signals) -> None:
    """The run ends with the refusal that is one too many, and not before; the next is new."""
    limit = ToolCallLimit("search", thread_limit=2, give_up_after=refusals)
    scene = Scene(signals, stubborn, [limit], kind=kind)
    for turn in (1, 2):
        await scene.play()
        assert scene.ran == ["search", "search"]
        assert len(scene.model.calls) == 2 + refusals * turn
        assert scene.last_text() == (
            "'search' tool call limit reached: thread limit exceeded (3/2 calls)."
        )
        assert scene.metric("tool:search", "blocked", "thread") == refusals * turn
        scene.check()


async def test_calls_under_one_id_are_one_refusal(signals: Signals) -> None:
    """Two calls under one id are refused once, and answered once: patience ends no earlier."""
    twins = [ToolCall(name="search", args={}, id="twin", type="tool_call")] * 2
    script = [AIMessage("", tool_calls=twins), ["search"], ["search"], "never"]
    limit = ToolCallLimit("search", run_limit=0, give_up_after=3)
    scene = await Scene(signals, script, [limit]).played()
    assert len(scene.model.calls) == 3
    assert scene.state()["langchain_quota"]["refusals"] == {"QuotaMiddleware": {"tool:search": 3}}
    scene.check()


async def test_limits_lose_patience_alone(signals: Signals) -> None:
    """Each limit counts its own refusals, and only what was hit is named."""
    limits = [ToolCallLimit(each, run_limit=0, give_up_after=3) for each in ("search", "calc")]
    script = [["search"], ["calc"], ["search"], ["calc"], ["calc"], "never"]
    scene = await Scene(signals, script, limits).played()
    assert len(scene.model.calls) == 5
    assert scene.last_text() == "'calc' tool call limit reached: run limit exceeded (1/0 calls)."
    scene.check()


def own_words(decision: Decision) -> str:
    return f"No more {decision.call.tool}: {decision.refused_by[0].limit} is used up."


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([ToolCallLimit("search", run_limit=0)], REFUSED),
        (
            [ToolCallLimit(("search", "fetch"), run_limit=0)],
            "Tool call limit exceeded. Do not call 'fetch' or 'search' again.",
        ),
        (
            [ToolCallLimit(exclude=("calc", "ask"), run_limit=0)],
            f"{NO_TOOLS} other than to 'ask' or 'calc'.",
        ),
        (
            [
                ToolCallLimit(run_limit=0, message="Enough."),
                ToolCallLimit("search", run_limit=0, name="soft"),
                ToolCallLimit("search", thread_limit=0, name="hard"),
                ToolCallLimit(run_limit=0, message="A dry run.", name="trial", enforce=False),
                ToolCallLimit(run_limit=9, thread_limit=9, message="Nothing.", name="large"),
            ],
            f"Enough. {REFUSED}",
        ),
        ([ToolCallLimit("search", run_limit=0, message="")], ""),
    ],
)
async def test_the_refusal_of_a_tool_call(
    limits: list[Limit], expected: str, signals: Signals
) -> None:
    """The model reads which tools not to call, from each limit that refuses, once, in order."""
    scene = Scene(signals, [["search"], "done"], limits)
    assert texts(await scene.play()) == [expected]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (
            [ToolCallLimit(("search", "fetch"), run_limit=2, **END)],
            "'fetch', 'search' tool call limit reached: run limit exceeded (3/2 calls).",
        ),
        (
            [ModelCallLimit(thread_limit=1, run_limit=1)],
            "Model call limits exceeded: thread limit (1/1), run limit (1/1)",
        ),
        (
            [
                ToolCallLimit("search", run_limit=0, message=" \n", **END),
                ToolCallLimit(run_limit=0, message="Enough.", **END),
            ],
            "'search' tool call limit reached: run limit exceeded (3/0 calls). Enough.",
        ),
        ([ModelCallLimit(run_limit=1, message=own_words)], "No more None: model is used up."),
        (
            [ModelCallLimit(run_limit=1, message=lambda _: " \n")],
            "Model call limits exceeded: run limit (1/1)",
        ),
    ],
)
async def test_the_final_message(limits: list[Limit], expected: str, signals: Signals) -> None:
    """The user reads each exceeded threshold, for tools as if the calls had run; never a blank."""
    scene = await Scene(signals, [["search"] * 3], limits).played()
    assert scene.last_text() == expected
