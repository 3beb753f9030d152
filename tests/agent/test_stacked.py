"""Several limiters on overlapping tools."""

from typing import Any

import pytest
from langchain.agents import middleware as langchain_middleware
from langchain_core.messages import AIMessage

from langchain_quota import (
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from tests.agent.conftest import Order, in_order, orders
from tests.agent.rules import (
    Middleware,
    Scene,
    check_history,
    model_limiter,
    recording,
    tool_limiter,
)
from tests.signals import Signals


class OtherToolLimit(ToolCallLimitMiddleware[Any, Any]):
    """A second limiter on an agent, told apart by its class."""


class OtherQuota(QuotaMiddleware[Any, Any]):
    """A second middleware of many limits on an agent, told apart by its class."""


class OtherModelLimit(ModelCallLimitMiddleware[Any, Any]):
    """A second limiter on an agent, told apart by its class."""


@orders(2)
async def test_refused_by_one_is_charged_to_none(order: Order, signals: Signals) -> None:
    """Two limiters: a call refused by one is answered once and taken back from the other."""
    scene = Scene(
        signals,
        [["search", "search", "calc", "calc"], "done"],
        in_order(
            order, tool_limiter(signals, run_limit=2), tool_limiter(signals, "search", run_limit=1)
        ),
    )

    await scene.turn()

    # The last of the list judges first. What it refused, a later refund does not revive.
    all_tools_first = order == (1, 0)
    assert sorted(scene.ran) == (["search"] if all_tools_first else ["calc", "search"])
    assert scene.metric("tool:*", "refunded") == (1 if all_tools_first else 0)
    assert scene.metric("tool:search", "blocked", "run") == 1
    scene.check()


@orders(2)
async def test_a_refused_call_leaves_room_on_the_thread(order: Order, signals: Signals) -> None:
    """Thread limits of 2 for all and 1 for search: after a refused search, calc still runs."""
    scene = Scene(
        signals,
        [["search", "search"], "done", ["calc"], "done", ["calc", "search"], "done"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=2),
            tool_limiter(signals, "search", thread_limit=1),
        ),
    )

    for _ in range(3):
        await scene.turn()
        scene.check()

    assert scene.ran == ["search", "calc"]


@orders(3)
async def test_three_limiters(order: Order, signals: Signals) -> None:
    """Three limiters on overlapping tools keep the rules over two turns, in every order."""
    batch = ["search", "calc", "search", "calc", "mail"]
    scene = Scene(
        signals,
        [batch, batch, "done", batch, "done"],
        in_order(
            order,
            tool_limiter(signals, thread_limit=5, run_limit=3),
            tool_limiter(signals, "search", thread_limit=2, run_limit=1),
            tool_limiter(signals, "calc", run_limit=1),
        ),
        tools=("search", "calc", "mail"),
    )

    for _ in range(2):
        await scene.turn()
        scene.check()

    assert scene.ran.count("search") == 2
    assert len(scene.answers()) == 15


@orders(3)
async def test_refused_by_two(order: Order, signals: Signals) -> None:
    """A call over the limit of two limiters is answered once, and taken back from the third."""
    scene = Scene(
        signals,
        [["search"], "done"],
        in_order(
            order,
            tool_limiter(signals, run_limit=0),
            tool_limiter(signals, "search", run_limit=0),
            tool_limiter(signals, run_limit=5, limit_name="generous"),
        ),
    )

    await scene.turn()

    assert scene.answers() == [("search", "error")]
    assert scene.metric("generous", "refunded") == (1 if order[-1] == 2 else 0)
    scene.check()


@orders(2)
async def test_end_beside_continue(order: Order, signals: Signals) -> None:
    """`end` beside `continue`: what did not run is charged nowhere and answered once."""
    scene = Scene(
        signals,
        [["calc", "search", "search", "calc"], ["calc"], "done"],
        in_order(
            order,
            tool_limiter(signals, run_limit=3),
            tool_limiter(signals, "search", run_limit=1, exit_behavior="end"),
        ),
    )

    result = await scene.turn()
    scene.check()
    assert scene.ran == []
    assert isinstance(result["messages"][-1], AIMessage)
    assert "'search' tool call limit reached" in result["messages"][-1].content
    assert len(scene.answers()) == 4

    await scene.turn()
    scene.check()
    assert scene.ran == ["calc"]


@orders(2)
async def test_end_beside_end(order: Order, signals: Signals) -> None:
    """Two limiters that both would end the run: one final message, one answer for each call."""
    scene = Scene(
        signals,
        [["search", "calc"], "done"],
        in_order(
            order,
            *(
                tool_limiter(signals, tool, run_limit=0, exit_behavior="end")
                for tool in ("search", "calc")
            ),
        ),
    )

    result = await scene.turn()

    assert sorted(scene.answers()) == [("calc", "error"), ("search", "error")]
    assert len(result["messages"]) == 5
    scene.check()


@orders(2)
async def test_end_beside_error(order: Order, signals: Signals) -> None:
    """`end` beside `error`: whichever judges first decides, and neither charges anything."""
    scene = Scene(
        signals,
        [["search", "calc"], "done"],
        in_order(
            order,
            tool_limiter(signals, "search", run_limit=0, exit_behavior="end"),
            tool_limiter(signals, "calc", run_limit=0, exit_behavior="error"),
        ),
    )

    if order[-1] == 0:
        await scene.turn()
        scene.check()
    else:
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
        scene.check(answered=False)
    await scene.turn()
    scene.check()
    assert scene.ran == []


@orders(2)
@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_langchains_tool_limiter_beside_ours(
    order: Order, exit_behavior: Any, signals: Signals
) -> None:
    """LangChain's own tool limiter in the same agent does not spoil our run counts."""
    scene = Scene(
        signals,
        [["search"], ["search"], ["search"], "done", ["search"], ["search"], "done"],
        in_order(
            order,
            langchain_middleware.ToolCallLimitMiddleware(run_limit=9),
            tool_limiter(signals, "search", run_limit=2, exit_behavior=exit_behavior),
        ),
    )

    await scene.turn()
    scene.check()
    assert scene.ran == ["search"] * 2

    await scene.turn()
    scene.check()
    # `end` stopped at the third batch: the next turn got the "done" behind it.
    assert scene.ran == ["search"] * (2 if exit_behavior == "end" else 4)


@orders(2)
async def test_langchains_limiter_on_the_same_counter(order: Order, signals: Signals) -> None:
    """LangChain's limiter on the very tool that ours limits does not spoil our run counts."""
    scene = Scene(
        signals,
        [["search"], ["search"], ["search", "calc"], "done", ["search"], "done"],
        in_order(
            order,
            _LangChainsToolLimit(tool_name="search", run_limit=9),
            tool_limiter(signals, "search", run_limit=2),
        ),
    )

    await scene.turn()
    assert scene.ran == ["search", "search", "calc"]
    assert scene.state()["langchain_quota"]["run_tools"] == {"search": 2}
    check_history(scene.state()["messages"])

    await scene.turn()
    assert scene.ran[3:] == ["search"]
    assert scene.state()["langchain_quota"]["run_tools"] == {"search": 1}


@orders(2)
async def test_langchains_model_limiter_beside_ours(order: Order, signals: Signals) -> None:
    """LangChain's own model limiter in the same agent does not spoil our run counts."""
    scene = Scene(
        signals,
        [["calc"], ["calc"], ["calc"], "done"],
        in_order(order, _LangChainsModelLimit(run_limit=9), model_limiter(signals, run_limit=2)),
    )

    for calls in (2, 4):
        await scene.turn()
        assert len(scene.model.calls) == calls
        assert scene.state()["langchain_quota"]["run_model"] == 2
        check_history(scene.state()["messages"])


class _LangChainsToolLimit(langchain_middleware.ToolCallLimitMiddleware[Any, Any]):
    pass


class _LangChainsModelLimit(langchain_middleware.ModelCallLimitMiddleware[Any, Any]):
    pass


@orders(2)
async def test_two_thresholds_on_one_tool(order: Order, signals: Signals) -> None:
    """Two limiters on one tool, told apart by limit_name, are two thresholds over one count."""
    scene = Scene(
        signals,
        [["search"] * 3, "done", ["search"] * 3, "done"],
        in_order(
            order,
            tool_limiter(signals, "search", run_limit=2),
            tool_limiter(signals, "search", thread_limit=3, limit_name="search per thread"),
        ),
    )

    for ran in (2, 3):
        await scene.turn()
        assert scene.ran == ["search"] * ran
        scene.check()


@orders(2)
async def test_two_tool_limiters_by_subclass(order: Order, signals: Signals) -> None:
    """A limiter and its subclass with limits 4 and 6 on one counter let 4 calls run."""
    scene = Scene(
        signals,
        [["search"] * 3, ["search"] * 3, "done"],
        in_order(
            order,
            tool_limiter(signals, run_limit=4),
            OtherToolLimit(run_limit=6, limit_name="other", telemetry=signals.telemetry),
        ),
    )

    await scene.turn()

    assert scene.ran == ["search"] * 4
    scene.check()


@orders(2)
async def test_two_unnamed_tool_limiters_by_subclass(order: Order, signals: Signals) -> None:
    """Two limiters of one limit name: the counts are still exact, and answers are single."""
    scene = Scene(
        signals,
        [["search"] * 3, ["search"] * 3, "done"],
        in_order(
            order,
            tool_limiter(signals, run_limit=4),
            OtherToolLimit(run_limit=6, telemetry=signals.telemetry),
        ),
    )

    await scene.turn()

    assert scene.ran == ["search"] * 4
    assert scene.state()["thread_tool_call_count"] == {"__all__": 4}
    assert scene.state()["langchain_quota"]["run_tools"] == {"__all__": 4}
    check_history(scene.state()["messages"])


def two_of_one_name(signals: Signals, **options: Any) -> list[Middleware]:
    """Two limiters whose limits have the same name, their default: `tool:search`."""
    return [
        tool_limiter(signals, "search", **options),
        QuotaMiddleware([ToolCallLimit("search", thread_limit=9)], telemetry=signals.telemetry),
    ]


def charged(scene: Scene) -> float:
    """What both limits let through and have not taken back."""
    return scene.metric("tool:search", "allowed") - scene.metric("tool:search", "refunded")


@orders(2)
async def test_error_beside_a_limit_of_the_same_name(order: Order, signals: Signals) -> None:
    """What one limiter charged before another one raised is refunded, whatever their limits' names.

    The name in the metrics is the limit's own.
    """
    limiters = two_of_one_name(signals, run_limit=1, exit_behavior="error")
    scene = Scene(signals, [["search", "search"], ["search"], "done"], in_order(order, *limiters))

    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"]
    assert scene.state()["thread_tool_call_count"] == {"search": 1}
    assert charged(scene) == 2
    check_history(scene.state()["messages"])


@pytest.mark.parametrize("place", range(3))
async def test_a_third_refuses_what_two_of_one_name_admit(place: int, signals: Signals) -> None:
    """A refused call is taken back from each limiter that charged it before."""
    limiters = two_of_one_name(signals, run_limit=9)
    third = tool_limiter(signals, run_limit=0)
    scene = Scene(signals, [["search"], "done"], [*limiters[:place], third, *limiters[place:]])

    await scene.turn()

    assert scene.ran == []
    # The last of the list judges first, and what is behind the third has charged the call.
    assert scene.metric("tool:search", "refunded") == 2 - place
    assert charged(scene) == 0
    assert set(scene.state()["thread_tool_call_count"].values()) == {0}


@orders(2)
async def test_two_of_one_name_after_a_crash(order: Order, signals: Signals) -> None:
    """A call that both let through, and that crashed, had started: it stays charged to both."""
    ran: list[str] = []
    crash: list[Exception] = [ConnectionError("tool")]
    scene = Scene(
        signals,
        [["search"], "done"],
        in_order(order, *two_of_one_name(signals, run_limit=1, exit_behavior="error")),
        tools=[recording("search", ran, lambda: raised(crash))],
        ran=ran,
    )

    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()

    assert scene.state()["thread_tool_call_count"] == {"search": 1}
    assert charged(scene) == 2


def raised(errors: list[Exception]) -> None:
    raise errors.pop()


@orders(2)
async def test_two_of_one_name_give_up_alone(order: Order, signals: Signals) -> None:
    """What one limiter refuses does not use up the patience of another limit of the same name."""
    searches, calculations = (
        ToolCallLimit(tool, run_limit=0, give_up_after=3, name="impatient")
        for tool in ("search", "calc")
    )
    scene = Scene(
        signals,
        [["search"], ["calc"], ["search"], ["calc"], ["search"], "never"],
        in_order(
            order,
            QuotaMiddleware[Any, Any]([searches], telemetry=signals.telemetry),
            OtherQuota([calculations], telemetry=signals.telemetry),
        ),
    )

    await scene.turn()

    assert len(scene.model.calls) == 5


@orders(2)
async def test_two_model_limiters(order: Order, signals: Signals) -> None:
    """Two model limiters on one agent count each call once, and the smaller limit holds."""
    scene = Scene(
        signals,
        [["calc"], ["calc"], ["calc"], "done"],
        in_order(
            order,
            model_limiter(signals, run_limit=3),
            OtherModelLimit(thread_limit=6, limit_name="thread", telemetry=signals.telemetry),
        ),
    )

    await scene.turn()

    assert len(scene.model.calls) == 3
    scene.check()


@orders(2)
async def test_two_model_limiters_where_the_inner_refuses(order: Order, signals: Signals) -> None:
    """A model call admitted by one limiter and refused by another is charged to neither."""
    scene = Scene(
        signals,
        [["calc"], ["calc"], "done"],
        in_order(
            order,
            model_limiter(signals, run_limit=1),
            model_limiter(signals, run_limit=9, limit_name="generous"),
        ),
    )

    await scene.turn()

    assert len(scene.model.calls) == 1
    scene.check()
