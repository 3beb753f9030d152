"""`exit_behavior="finalize"`: the last admitted model call is told so, and ends the run."""

from typing import Any

import pytest
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from pydantic import BaseModel

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
)
from langchain_quota.limits import Limit
from tests.scene import Scene
from tests.signals import Signals

LAST = "last model call"


class Weather(BaseModel):
    """The weather."""

    degrees: int


def scene_of(signals: Signals, script: Any, *limits: Limit, **options: Any) -> Scene:
    quota = QuotaMiddleware(limits, telemetry=signals.telemetry)
    return Scene(signals, script, [quota], **options)


def told(scene: Scene) -> list[bool]:
    """Whether each request says that it is the last."""
    return [LAST in call.messages[-1].text for call in scene.model.calls]


async def test_a_run(signals: Signals) -> None:
    """The last call of a run is told so and its answer ends the run; the next run is new."""
    scene = scene_of(
        signals,
        [["search"], ["search"], "all in all: fine", "hello again"],
        ModelCallLimit(run_limit=3, exit_behavior="finalize"),
    )

    result = await scene.play()

    assert told(scene) == [False, False, True]
    assert result["messages"][-1].content == "all in all: fine"
    assert scene.ran == ["search", "search"]
    assert LAST not in str(scene.state())
    scene.check()

    result = await scene.play("and now?")
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

    await scene.play()
    result = await scene.play()
    assert result["messages"][-1].content == "that was all"
    assert told(scene) == [False, False, True]
    scene.check()

    result = await scene.play()
    assert result["messages"][-1].content == "Model call limits exceeded: thread limit (3/3)"
    assert len(scene.model.calls) == 3
    assert scene.metric("model", "blocked", "thread") == 1
    scene.check()


async def test_no_tools_are_offered(signals: Signals) -> None:
    """Where the history has no tool calls the last call is offered no tools."""
    scene = scene_of(signals, ["done"], ModelCallLimit(run_limit=1, exit_behavior="finalize"))

    await scene.play()

    assert scene.model.calls[0].tools == ()
    assert told(scene) == [True]


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
        result = await scene.play()
        assert result["messages"][-1].content == "Model call limits exceeded: run limit (2/2)"
    else:
        with pytest.raises(ModelCallLimitExceededError):
            await scene.play()
    assert told(scene) == [False, False]
    scene.check()


VALID = ("Weather", {"degrees": 20})


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

    result = await scene.play()

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

    result = await scene.play()

    # Behind tool calls an empty list might be refused.
    assert scene.model.calls[-1].tools == (("search", "calc") if calls_before else ())
    assert told(scene)[-1]
    assert result["structured_response"] == Weather(degrees=20)
    scene.check()
