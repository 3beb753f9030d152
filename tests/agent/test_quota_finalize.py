"""`exit_behavior="finalize"`: the last admitted model call is told so, and ends the run."""

from typing import Any

import pytest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, ToolCall
from langgraph.types import interrupt
from pydantic import BaseModel

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    Outcome,
    QuotaMiddleware,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.messages import FINALIZED
from langchain_quota.testing import captured_decisions
from tests.agent.rules import CONFIG, Middleware, Scene, check_history, recording, tool_limiter
from tests.signals import Signals

LAST = "last model call"
REACHED = "Model call limits exceeded: run limit (2/2)"


class ProviderError(Exception):
    """The model's provider fails."""


class Weather(BaseModel):
    """The weather."""

    degrees: int


def scene_of(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    return Scene(signals, script, [quota], **options)


def told(scene: Scene) -> list[bool]:
    """Whether each request says that it is the last."""
    return [LAST in call.messages[-1].text for call in scene.model.calls]


def texts(scene: Scene) -> list[tuple[str, str]]:
    return [(each.type, each.text) for each in scene.state()["messages"]]


async def test_a_run(signals: Signals) -> None:
    """The last call of a run is told so and its answer ends the run; the next run is new."""
    scene = scene_of(
        signals,
        [["search"], ["search"], "all in all: fine", "hello again"],
        ModelCallLimit(run_limit=3, exit_behavior="finalize"),
    )

    result = await scene.turn()

    assert told(scene) == [False, False, True]
    assert result["messages"][-1].content == "all in all: fine"
    assert scene.ran == ["search", "search"]
    assert LAST not in str(scene.state())
    scene.check()

    result = await scene.turn("and now?")
    assert told(scene)[-1] is False
    assert result["messages"][-1].content == "hello again"
    assert scene.metric("model", "blocked", "run") == 0
    scene.check()


async def test_a_thread(signals: Signals) -> None:
    """The last call of a thread is told so; whatever comes later is refused."""
    scene = scene_of(
        signals,
        ["one", ["search"], "that was all"],
        ModelCallLimit(thread_limit=3, exit_behavior="finalize"),
    )

    await scene.turn()
    result = await scene.turn()
    assert result["messages"][-1].content == "that was all"
    assert told(scene) == [False, False, True]
    scene.check()

    result = await scene.turn()
    assert result["messages"][-1].content == "Model call limits exceeded: thread limit (3/3)"
    assert len(scene.model.calls) == 3
    assert scene.metric("model", "blocked", "thread") == 1
    scene.check()


async def test_no_tools_are_offered(signals: Signals) -> None:
    """Where the history has no tool calls the last call is offered no tools."""
    scene = scene_of(signals, ["done"], ModelCallLimit(run_limit=1, exit_behavior="finalize"))

    await scene.turn()

    assert scene.model.calls[0].tools == ()
    assert told(scene) == [True]


async def test_tools_stay_behind_tool_calls(signals: Signals) -> None:
    """Where the history has tool calls an empty list might be refused: the tools stay."""
    scene = scene_of(
        signals, [["search"], "done"], ModelCallLimit(run_limit=2, exit_behavior="finalize")
    )

    await scene.turn()

    assert [each.tools for each in scene.model.calls] == [("search", "calc")] * 2
    assert told(scene) == [False, True]


@pytest.mark.parametrize("calls_before", [0, 1])
async def test_a_last_answer_with_tool_calls(calls_before: int, signals: Signals) -> None:
    """Tool calls of the last answer are answered as not run, whatever limits them; all is over."""
    last = AIMessage(
        "I would like to go on.",
        tool_calls=[
            {"name": "search", "args": {}, "id": "last_1"},
            {"name": "calc", "args": {}, "id": "last_2"},
        ],
    )
    scene = scene_of(
        signals,
        [*[["search"]] * calls_before, last, "fine"],
        ModelCallLimit(run_limit=calls_before + 1, exit_behavior="finalize"),
        ToolCallLimit("search", thread_limit=5, exit_behavior="error"),
        ToolCallLimit("calc", run_limit=0, exit_behavior="error"),
    )

    with captured_decisions() as decisions:
        await scene.turn()

    assert scene.ran == ["search"] * calls_before
    assert len(scene.model.calls) == calls_before + 1
    assert texts(scene)[-4:] == [
        ("ai", "I would like to go on."),
        ("tool", FINALIZED),
        ("tool", FINALIZED),
        ("ai", "I would like to go on."),
    ]
    assert [each.outcome for each in decisions[-2:]] == [Outcome.SKIPPED] * 2
    assert scene.metric("tool:search", "allowed") == calls_before
    skipped = {
        tool: signals.value(
            "langchain_quota_calls_total",
            agent="unnamed",
            kind="tool",
            tool=tool,
            decision="skipped",
        )
        for tool in ("search", "calc")
    }
    assert skipped == {"search": 1, "calc": 1}
    scene.check()

    await scene.turn()
    assert texts(scene)[-1] == ("ai", "fine")
    scene.check()


async def test_ids_that_come_again(signals: Signals) -> None:
    """A last call with the id of an earlier one takes nothing of that one back."""
    same = AIMessage("", tool_calls=[search_call("same")])
    scene = scene_of(
        signals,
        [same, same.model_copy(), "fine"],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        ToolCallLimit("search", thread_limit=5),
    )

    await scene.turn()
    await scene.turn()

    assert scene.ran == ["search"]
    assert scene.state()["thread_tool_call_count"] == {"search": 1}


def search_call(call_id: str) -> ToolCall:
    return ToolCall(name="search", args={}, id=call_id, type="tool_call")


def last_answer(content: Any) -> AIMessage:
    """An answer that calls a tool nevertheless."""
    return AIMessage(content, tool_calls=[search_call("last")])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", REACHED),
        (" \n", REACHED),
        ([], REACHED),
        ([{"type": "text", "text": ""}], REACHED),
        ("So far: nothing.", "So far: nothing."),
        (
            [
                {"type": "reasoning", "reasoning": "hm"},
                {"type": "text", "text": "So far: "},
                {"type": "text", "text": "nothing."},
            ],
            "So far: nothing.",
        ),
    ],
)
async def test_the_last_text(content: Any, expected: str, signals: Signals) -> None:
    """The run ends with the text of the last answer; without one, with the limit's."""
    scene = scene_of(
        signals,
        [["search"], last_answer(content)],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        name="researcher",
    )

    result = await scene.turn()

    last = result["messages"][-1]
    assert (last.type, last.content, last.name) == ("ai", expected, "researcher")
    assert last.tool_calls == []
    assert scene.ran == ["search"]
    check_history(result["messages"])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Enough for today.", "Enough for today."),
        (lambda decision: f"{decision.refused_by[0].run_used} are enough.", "2 are enough."),
        ("", REACHED),
        (lambda decision: " ", REACHED),
    ],
    ids=["text", "function", "empty", "blank"],
)
async def test_the_last_text_of_the_user(message: Any, expected: str, signals: Signals) -> None:
    """The limit's own message stands in for a missing text, but is never an empty one."""
    scene = scene_of(
        signals,
        [["search"], ["search"]],
        ModelCallLimit(run_limit=2, exit_behavior="finalize", message=message),
    )

    result = await scene.turn()

    assert result["messages"][-1].content == expected
    scene.check()


async def test_the_last_text_of_several_limits(signals: Signals) -> None:
    """Every limit that would refuse another call is named."""
    scene = scene_of(
        signals,
        [["search"], ["search"]],
        ModelCallLimit(run_limit=2, exit_behavior="finalize", name="run"),
        ModelCallLimit(thread_limit=2, name="thread"),
    )

    result = await scene.turn()

    assert result["messages"][-1].content == (
        f"{REACHED} Model call limits exceeded: thread limit (2/2)"
    )
    scene.check()


@pytest.mark.parametrize("place", [0, 1])
async def test_beside_a_drop_in(place: int, signals: Signals) -> None:
    """A limiter of tools that judges first ends the run with the same text, and charges nothing."""
    drop_in: Middleware = tool_limiter(signals, run_limit=9)
    middleware: list[Middleware] = [
        QuotaMiddleware(
            [ModelCallLimit(run_limit=2, exit_behavior="finalize")], telemetry=signals.telemetry
        )
    ]
    middleware.insert(place, drop_in)
    scene = Scene(signals, [["search"], ["search"]], middleware)

    await scene.turn()

    assert texts(scene)[-2:] == [("tool", FINALIZED), ("ai", REACHED)]
    assert scene.ran == ["search"]
    scene.check()


async def test_the_same_words_each_time(signals: Signals) -> None:
    """A model that says the same with each call is not taken for a run that goes in circles."""
    scene = scene_of(
        signals,
        [AIMessage("Searching.", tool_calls=[search_call(each)]) for each in ("a", "b", "c")],
        ModelCallLimit(run_limit=3, exit_behavior="finalize"),
    )

    result = await scene.turn()

    assert result["messages"][-1].content == "Searching."
    assert scene.ran == ["search"] * 2
    scene.check()


@pytest.mark.parametrize("scope", ["run_limit", "thread_limit"])
async def test_zero(scope: str, signals: Signals) -> None:
    """A limit of 0 has no last call: the run ends with the limit's message."""
    thresholds: Any = {scope: 0}
    scene = scene_of(signals, [], ModelCallLimit(exit_behavior="finalize", **thresholds))

    result = await scene.turn()

    scope_name = scope.removesuffix("_limit")
    expected = f"Model call limits exceeded: {scope_name} limit (0/0)"
    assert result["messages"][-1].content == expected
    assert scene.model.calls == ()
    scene.check()


async def test_a_computed_limit(signals: Signals) -> None:
    """The last call of a computed limit is told so, too."""
    scene = scene_of(
        signals,
        [["search"], "done"],
        ModelCallLimit(run_limit=lambda state, runtime: 2, exit_behavior="finalize"),
    )

    result = await scene.turn()

    assert told(scene) == [False, True]
    assert result["messages"][-1].content == "done"
    scene.check()


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_beside_a_lower_limit(exit_behavior: Any, signals: Signals) -> None:
    """A lower limit that ends or raises is reached first, and no call is told that it is last."""
    scene = scene_of(
        signals,
        [["search"], ["search"]],
        ModelCallLimit(thread_limit=9, exit_behavior="finalize", name="thread"),
        ModelCallLimit(run_limit=2, exit_behavior=exit_behavior, name="run"),
    )

    if exit_behavior == "end":
        result = await scene.turn()
        assert result["messages"][-1].content == "Model call limits exceeded: run limit (2/2)"
    else:
        with pytest.raises(ModelCallLimitExceededError):
            await scene.turn()
    assert told(scene) == [False, False]
    scene.check()


async def test_two_that_finalize(signals: Signals) -> None:
    """Whichever limit is used up first makes a call the last."""
    scene = scene_of(
        signals,
        [["search"], "one", "two"],
        ModelCallLimit(thread_limit=3, exit_behavior="finalize", name="thread"),
        ModelCallLimit(run_limit=2, exit_behavior="finalize", name="run"),
    )

    await scene.turn()
    await scene.turn()

    assert told(scene) == [False, True, True]
    scene.check()


async def test_a_last_call_that_fails(signals: Signals) -> None:
    """A last call that raised is repeated as the last when the run goes on."""
    scene = scene_of(
        signals,
        [["search"], ProviderError("overloaded"), ["search"]],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
    )
    with pytest.raises(ProviderError):
        await scene.turn()

    await scene.go_on()

    assert told(scene) == [False, True, True]
    assert scene.ran == ["search"]
    assert texts(scene)[-2:] == [("tool", FINALIZED), ("ai", REACHED)]
    scene.check(models=2, models_in_run=2)


async def test_a_run_that_was_interrupted(signals: Signals) -> None:
    """A run that waited for a human has its last call where it would have had it."""
    ran: list[str] = []
    ask = recording("ask", ran, lambda: interrupt("what?"))
    scene = scene_of(
        signals,
        [["ask"], "done"],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        tools=[ask],
        ran=ran,
    )

    await scene.turn()
    assert told(scene) == [False]
    result = await scene.resume("this")

    assert told(scene) == [False, True]
    assert result["messages"][-1].content == "done"
    scene.check()


VALID = ("Weather", {"degrees": 20})
INVALID = ("Weather", {"degrees": "warm"})


@pytest.mark.parametrize("strategy", [ToolStrategy, AutoStrategy])
@pytest.mark.parametrize("calls_before", [0, 1])
async def test_structured_by_a_tool(strategy: Any, calls_before: int, signals: Signals) -> None:
    """The last call is offered the tool of the structured answer and nothing else, and gives it."""
    scene = scene_of(
        signals,
        [*[["search"]] * calls_before, [VALID]],
        ModelCallLimit(run_limit=calls_before + 1, exit_behavior="finalize"),
        response_format=strategy(Weather),
    )

    result = await scene.turn()

    assert scene.model.calls[-1].tools == ("Weather",)
    assert told(scene)[-1]
    assert result["structured_response"] == Weather(degrees=20)
    scene.check()


@pytest.mark.parametrize("strategy", [ProviderStrategy, AutoStrategy])
@pytest.mark.parametrize("calls_before", [0, 1])
async def test_structured_by_the_provider(
    strategy: Any, calls_before: int, signals: Signals
) -> None:
    """A last call whose answer the provider structures gives it, with care for empty lists."""
    scene = scene_of(
        signals,
        [*[["search"]] * calls_before, '{"degrees": 20}'],
        ModelCallLimit(run_limit=calls_before + 1, exit_behavior="finalize"),
        response_format=strategy(Weather),
    )
    scene.model.profile = {"structured_output": True}

    result = await scene.turn()

    # Behind tool calls an empty list might be refused.
    assert scene.model.calls[-1].tools == (("search", "calc") if calls_before else ())
    assert told(scene)[-1]
    assert result["structured_response"] == Weather(degrees=20)
    scene.check()


@pytest.mark.parametrize("batch", [[VALID, "search"], ["search", VALID]], ids=["before", "behind"])
async def test_a_structured_answer_and_more(batch: Any, signals: Signals) -> None:
    """Beside the structured answer of the last call nothing else runs."""
    scene = scene_of(
        signals,
        [["search"], batch],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        response_format=ToolStrategy(Weather),
    )

    result = await scene.turn()

    assert result["structured_response"] == Weather(degrees=20)
    assert scene.ran == ["search"]
    assert scene.answers()[1:] == [("Weather", "success"), ("search", "error")]
    scene.check()


async def test_an_invalid_structured_answer(signals: Signals) -> None:
    """An invalid structured answer of the last call does not take the run over its limit."""
    scene = scene_of(
        signals,
        [["search"], [INVALID]],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        response_format=ToolStrategy(Weather),
    )

    result = await scene.turn()

    assert result.get("structured_response") is None
    assert len(scene.model.calls) == 2
    assert result["messages"][-1].type == "ai"
    scene.check()


async def test_a_streaming_agent(signals: Signals) -> None:
    """The words of the last answer are streamed, and nothing of what the model was told."""
    scene = scene_of(
        signals,
        [["search"], "all in all fine"],
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
    )
    given: Any = {"messages": [("user", "hi")]}
    stream_mode = ["messages", "updates"]

    stream = scene.agent.astream(given, CONFIG, stream_mode=stream_mode)
    events = [event async for event in stream]

    words = [
        event[0].text
        for kind, event in events
        if kind == "messages" and event[0].type == "AIMessageChunk" and event[0].text
    ]
    assert words == ["all", " in", " all", " fine"]
    assert LAST not in str(events)
    assert told(scene) == [False, True]
    assert texts(scene)[-1] == ("ai", "all in all fine")
    scene.check()


async def test_telling_and_finalizing(signals: Signals) -> None:
    """With `tell_model` and "finalize", the last request says only that it is the last."""
    quota = QuotaMiddleware(
        [ModelCallLimit(run_limit=2, near=0.1, exit_behavior="finalize")],
        tell_model=True,
        hide_exhausted=True,
        telemetry=signals.telemetry,
    )
    scene = Scene(signals, [["search"], "done"], [quota])

    await scene.turn()

    first, last = [call.messages[-1].text for call in scene.model.calls]
    assert first == "hi\n\nBudget: this is model call 1 of 2."
    assert LAST in last
    scene.check()
