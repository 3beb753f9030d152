"""QuotaMiddleware: many limits judged together in one middleware."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import strategies as st

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from tests.scene import Order, Scene, in_order, orders
from tests.signals import Signals

TOOLS = ("search", "calc", "ask")


def quota(signals: Signals, *limits: Limit, **options: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def scene_of(signals: Signals, script: Any, *limits: Limit, tools: Sequence[Any] = TOOLS) -> Scene:
    return Scene(signals, script, [quota(signals, *limits)], tools=tools)


def last_text(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content)


@orders(2)
async def test_a_refused_call_is_charged_to_none(order: Order, signals: Signals) -> None:
    """A call that one limit refuses leaves room in the other, for a later call of its batch."""
    scene = scene_of(
        signals,
        [["search", "search", "calc"], ["calc"], "done"],
        *in_order(order, ToolCallLimit(thread_limit=2), ToolCallLimit("search", run_limit=1)),
    )

    await scene.play()

    assert sorted(scene.ran) == ["calc", "search"]
    assert sorted(scene.answers()) == [
        ("calc", "error"),
        ("calc", "success"),
        ("search", "error"),
        ("search", "success"),
    ]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2, "search": 1}
    assert scene.metric("tool:search", "blocked", "run") == 1
    assert scene.metric("tool:*", "blocked", "thread") == 1
    assert scene.metric("tool:*", "refunded") == 0
    scene.check()


async def test_two_thresholds_over_one_count(signals: Signals) -> None:
    """Two limits on one tool count its calls once: the lower refuses, the higher ends."""
    scene = scene_of(
        signals,
        [["search"] * 3, "done", ["search"], ["search"]],
        ToolCallLimit("search", run_limit=2, name="soft"),
        ToolCallLimit("search", thread_limit=3, exit_behavior="end", name="hard"),
    )

    await scene.play()
    assert scene.state()["thread_tool_call_count"] == {"search": 2}
    assert scene.metric("soft", "blocked", "run") == 1
    assert scene.metric("hard", "blocked", "thread") == 0
    scene.check()

    result = await scene.play()
    assert scene.ran == ["search"] * 3
    assert scene.state()["thread_tool_call_count"] == {"search": 3}
    assert last_text(result) == (
        "'search' tool call limit reached: thread limit exceeded (4/3 calls)."
    )
    scene.check()


async def test_excluded_tools(signals: Signals) -> None:
    """All tools but one: the one left out is neither counted nor refused, and always allowed."""
    scene = scene_of(
        signals,
        [["ask", "search", "ask", "calc", "ask"], "done"],
        ToolCallLimit(run_limit=1, exclude=["ask"]),
    )

    await scene.play()

    assert sorted(scene.ran) == ["ask", "ask", "ask", "search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__-ask": 1}
    assert scene.metric("tool:*-ask", "allowed") == 1
    assert scene.metric("tool:*-ask", "blocked", "run") == 1
    scene.check()


async def test_all_tools_and_all_but_one_stand_apart(signals: Signals) -> None:
    """A limit on all tools and one on all but some keep two counts."""
    scene = scene_of(
        signals,
        [["ask", "search"], ["ask", "search"], "done"],
        ToolCallLimit(run_limit=3),
        ToolCallLimit(run_limit=1, exclude=["ask"]),
    )

    await scene.play()

    assert sorted(scene.ran) == ["ask", "ask", "search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 3, "__all__-ask": 1}
    scene.check()


EXITS = ["continue", "end", "error"]


@pytest.mark.parametrize("exits", list(permutations(EXITS)), ids="-".join)
@pytest.mark.parametrize("hit", [(0, 1), (0, 1, 2)], ids=str)
async def test_the_strongest_exit(
    exits: Sequence[Any], hit: Sequence[int], signals: Signals
) -> None:
    """A batch over several limits does the strongest of what they ask, and names every one."""
    scene = scene_of(
        signals,
        [[TOOLS[index] for index in hit], "done"],
        *(
            ToolCallLimit(tool, run_limit=0, exit_behavior=exit_behavior)
            for tool, exit_behavior in zip(TOOLS, exits, strict=True)
        ),
    )
    strongest = max((exits[index] for index in hit), key=EXITS.index)

    if strongest == "error":
        with pytest.raises(ToolCallLimitExceededError) as raised:
            await scene.play()
        told = str(raised.value)
        assert raised.value.tool_name == TOOLS[exits.index("error")]
    else:
        told = last_text(await scene.play())

    if strongest != "continue":
        for index, tool in enumerate(TOOLS):
            assert (f"'{tool}' tool call limit reached" in told) == (index in hit)
    assert scene.ran == []
    assert len(scene.model.calls) == (2 if strongest == "continue" else 1)
    for index in hit:
        assert scene.metric(f"tool:{TOOLS[index]}", "blocked", "run") == 1
    scene.check(answered=strongest != "error")


@pytest.mark.parametrize("exits", [("end", "end"), ("end", "error"), ("error", "end")], ids=str)
async def test_several_model_limits_are_all_named(exits: tuple[Any, Any], signals: Signals) -> None:
    """Two model limits reached by one call: the stronger exit, and both in its message."""
    scene = scene_of(
        signals,
        [["search"], "never"],
        ModelCallLimit(run_limit=1, exit_behavior=exits[0], name="per run"),
        ModelCallLimit(thread_limit=1, exit_behavior=exits[1], name="per thread"),
    )

    if "error" in exits:
        with pytest.raises(ModelCallLimitExceededError) as raised:
            await scene.play()
        told = str(raised.value)
    else:
        told = last_text(await scene.play())

    assert "run limit (1/1)" in told
    assert "thread limit (1/1)" in told
    assert scene.metric("per run", "blocked", "run") == 1
    assert scene.metric("per thread", "blocked", "thread") == 1
    scene.check()


def eight_limits() -> list[Limit]:
    return [
        ModelCallLimit(run_limit=90),
        ModelCallLimit(thread_limit=900, name="model of the thread"),
        *(ToolCallLimit(tool, run_limit=90) for tool in TOOLS),
        ToolCallLimit(["search", "calc"], run_limit=90),
        ToolCallLimit(thread_limit=900, exclude=["ask"]),
        ToolCallLimit(thread_limit=900),
    ]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ([ToolCallLimit(run_limit=1), ToolCallLimit(thread_limit=2)], "'tool:*'"),
        ([ModelCallLimit(run_limit=1), ModelCallLimit(thread_limit=2)], "'model'"),
        (
            [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=2, name="tool:search")],
            "'tool:search'",
        ),
        (
            [
                ToolCallLimit("search", run_limit=3, name="loose"),
                ToolCallLimit("search", run_limit=2, name="tight"),
            ],
            "'loose' can never be reached: limit 'tight'",
        ),
    ],
    ids=["all tools", "model", "given name", "unreachable"],
)
def test_limits_that_cannot_stand_together(limits: list[Limit], named: str) -> None:
    """Limits with one name, or of which one can never be reached: an error that says which."""
    with pytest.raises(ValueError, match="limit") as raised:
        QuotaMiddleware(limits)

    assert named in str(raised.value)


counts = st.integers(0, 3)
