"""`exit_behavior="finalize"`: the last admitted model call is told so, and ends the run.

The call that delivers a structured answer is no tool call, and no limit ends a run behind it.
"""

from collections import Counter
from typing import Any

import pytest
from langchain.agents.structured_output import AutoStrategy, ToolStrategy
from langchain_core.messages import AIMessage, ToolCall

from langchain_quota import ModelCallLimit, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from tests.scene import FINALIZED, INVALID, VALID, Kind, Scene, Weather, each_middleware, either
from tests.telemetry import Signals

LAST = "last model call"
TWO = ModelCallLimit(run_limit=2, exit_behavior="finalize")
GO_ON = "I would like to go on."


def told(scene: Scene) -> list[bool]:
    """Whether each request says that it is the last."""
    return [LAST in call.messages[-1].text for call in scene.model.calls]


@either
async def test_a_run(kind: Kind, signals: Signals) -> None:
    """The last call of a run is told so and its answer ends the run; the next run is new."""
    limit = ModelCallLimit(run_limit=3, exit_behavior="finalize")
    script = [["search"], ["search"], "all in all: fine", "hello again"]
    scene = await Scene(signals, script, [limit], kind=kind).played()
    assert told(scene) == [False, False, True]
    # Where the history has tool calls an empty list might be refused.
    assert scene.model.calls[-1].tools == ("search", "calc")
    assert scene.last_text() == "all in all: fine"
    assert scene.ran == ["search", "search"]
    assert LAST not in str(scene.state())
    scene.check()
    await scene.play("and now?")
    assert told(scene)[-1] is False
    assert scene.last_text() == "hello again"
    assert scene.metric("model", "blocked", "run") == 0
    scene.check()


@either
async def test_a_thread(kind: Kind, signals: Signals) -> None:
    """The last call of a thread is told so, also a computed one; what comes later is refused."""
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=lambda state, runtime: 3, exit_behavior="finalize"),
        ModelCallLimit(run_limit=9, exit_behavior="finalize", name="run"),
    ]
    scene = await Scene(signals, ["one", ["search"], "that was all"], limits, kind=kind).played()
    await scene.play()
    assert scene.last_text() == "that was all"
    assert told(scene) == [False, False, True]
    scene.check()
    await scene.play()
    assert scene.last_text() == "Model call limits exceeded: thread limit (3/3)"
    assert len(scene.model.calls) == 3
    assert scene.metric("model", "blocked", "thread") == 1
    scene.check()


async def test_no_tools_are_offered(signals: Signals) -> None:
    """Where the history has no tool calls the last call is offered no tools, of nobody."""
    limit = ModelCallLimit(run_limit=1, exit_behavior="finalize")
    tools: Any = ["search", {"type": "web_search"}]
    scene = await Scene(signals, ["done"], [limit], tools=tools).played()
    assert scene.model.calls[0].tools == ()
    assert told(scene) == [True]


@either
async def test_beside_a_lower_limit(kind: Kind, signals: Signals) -> None:
    """A lower limit that ends the run is reached first, and no call is told that it is last."""
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=9, exit_behavior="finalize", name="thread"),
        ModelCallLimit(run_limit=2, name="run"),
    ]
    scene = await Scene(signals, [["search"], ["search"]], limits, kind=kind).played()
    assert scene.last_text() == "Model call limits exceeded: run limit (2/2)"
    assert told(scene) == [False, False]
    scene.check()


@either
async def test_a_last_answer_with_tool_calls(kind: Kind, signals: Signals) -> None:
    """Tool calls of the last answer are answered as not run, whatever limits them; all is over."""
    calls = [ToolCall(name=name, args={}, id=name) for name in ("search", "calc")]
    script = [["search"], AIMessage(GO_ON, tool_calls=calls), "fine"]
    limits: list[Limit] = [
        TWO,
        ToolCallLimit("search", thread_limit=5, exit_behavior="error"),
        ToolCallLimit("calc", run_limit=0, exit_behavior="error"),
    ]
    scene = await Scene(signals, script, limits, kind=kind).played()
    assert scene.ran == ["search"]
    said = [(each.type, each.text) for each in scene.result["messages"][-4:]]
    assert said == [("ai", GO_ON), ("tool", FINALIZED), ("tool", FINALIZED), ("ai", GO_ON)]
    assert [each.outcome for each in scene.decisions[-2:]] == [Outcome.SKIPPED] * 2
    assert scene.metric("tool:search", "allowed") == 1
    assert (scene.calls("skipped", "search"), scene.calls("skipped", "calc")) == (1, 1)
    scene.check()
    await scene.play()
    assert scene.last_text() == "fine"
    scene.check()


@pytest.mark.parametrize("strategy", [ToolStrategy, AutoStrategy])
async def test_structured_by_a_tool(strategy: Any, signals: Signals) -> None:
    """The last call is offered the tool of the structured answer and nothing else, and gives it."""
    options: dict[str, Any] = {"response_format": strategy(Weather)}
    scene = await Scene(signals, [["search"], [VALID]], [TWO], **options).played()
    assert scene.model.calls[-1].tools == ("Weather",)
    assert told(scene)[-1]
    assert scene.result["structured_response"] == Weather(degrees=20)
    scene.check()


EXITS = ["continue", "end", "error"]
each_exit = pytest.mark.parametrize("exit_behavior", EXITS)


def scene_of(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    return Scene(signals, script, limits, response_format=ToolStrategy(Weather), **options)


@each_middleware
@each_exit
async def test_a_refusal_beside_it(exit_behavior: Any, kind: Kind, signals: Signals) -> None:
    """Beside a delivered answer a refusal only refuses: no error, no last word; the rest runs."""
    scene = scene_of(
        signals,
        [["search", VALID, "search", "calc"]],
        ToolCallLimit("search", run_limit=1, exit_behavior=exit_behavior),
        ToolCallLimit(run_limit=4),
        kind=kind,
    )
    result = await scene.play()
    assert result["structured_response"] == Weather(degrees=20)
    assert result["messages"][-1].type == "tool"
    assert Counter(scene.ran) == {"search": 1, "calc": 1}
    scene.check()


@pytest.mark.parametrize(
    "limit",
    [
        ToolCallLimit("search", run_limit=0, give_up_after=1),
        ToolCallLimit(run_limit=0, exit_behavior="end"),
        ModelCallLimit(run_limit=1, exit_behavior="finalize"),
    ],
    ids=["give up", "end", "finalize"],
)
@either
async def test_no_limit_ends_the_run_behind_it(kind: Kind, limit: Limit, signals: Signals) -> None:
    """After a delivered answer no limit ends the run: nothing else runs, no message follows it."""
    scene = await scene_of(signals, [["search", VALID]], limit, kind=kind).played()
    assert scene.result["structured_response"] == Weather(degrees=20)
    assert [each.type for each in scene.result["messages"]] == ["human", "ai", "tool", "tool"]
    assert scene.ran == []
    scene.check()


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_a_retry_in_the_next_turn(exit_behavior: Any, signals: Signals) -> None:
    """Neither a retried answer nor that of an earlier turn softens a refusal of this one."""
    limit = ToolCallLimit(run_limit=0, exit_behavior=exit_behavior)
    scene = await scene_of(signals, [[VALID], [INVALID, "search"]], limit, kind="drop-in").played()
    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.play()
    else:
        await scene.play()
        assert "limit reached" in scene.last_text()
    scene.check(answered=exit_behavior == "end")
    assert scene.ran == []
