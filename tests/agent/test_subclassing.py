"""Subclasses and messages, as people change the limiters."""

from typing import Any

import pytest
from langchain.agents.middleware import hook_config
from langchain_core.messages import AIMessage

from langchain_quota import Decision, ModelCallLimitMiddleware, ToolCallLimitMiddleware
from tests.agent.conftest import Form, both_forms
from tests.agent.rules import Scene
from tests.signals import Signals


class Recorder(ToolCallLimitMiddleware[Any, Any]):
    """Has a list of what its hooks did."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.log: list[str] = []


class AsyncOnly(Recorder):
    """Overrides the async hook only."""

    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.log.append("async")
        return await super().aafter_model(state, runtime)


class Both(Recorder):
    """Overrides both forms."""

    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.log.append("sync")
        return super().after_model(state, runtime)

    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.log.append("async")
        return await super().aafter_model(state, runtime)


@both_forms
@pytest.mark.parametrize(
    ("limiter", "logs"),
    [
        (AsyncOnly, {"sync": [], "async": ["async"]}),
        (Both, {"sync": ["sync"], "async": ["async"]}),
    ],
)
async def test_an_override_runs_once_in_its_form(
    form: Form, limiter: type[Recorder], logs: dict[str, list[str]], signals: Signals
) -> None:
    """An override of a hook runs once a model call, in the form that it overrides."""
    mine = limiter(run_limit=1, telemetry=signals.telemetry)
    scene = Scene(signals, [["search", "search"], "done"], [mine], form=form)

    await scene.turn()

    assert mine.log == logs[form] * 2
    assert scene.ran == ["search"]
    scene.check()


class OwnLimit(ToolCallLimitMiddleware[Any, Any]):
    """Ends the run by a rule of its own, before the limiter's."""

    @hook_config(can_jump_to=["end"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if state["messages"][-1].text == "stop":
            return {"jump_to": "end", "messages": [AIMessage("my own limit")]}
        return super().after_model(state, runtime)


async def test_a_limit_of_its_own(signals: Signals) -> None:
    """A subclass that jumps by its own rule ends the run."""
    limiter = OwnLimit(run_limit=1, telemetry=signals.telemetry)
    scene = Scene(signals, ["stop"], [limiter], form="sync")

    result = await scene.turn()

    assert result["messages"][-1].content == "my own limit"


class NoDecorator(ToolCallLimitMiddleware[Any, Any]):
    """Overrides the hook without saying that it may jump."""

    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return super().after_model(state, runtime)


async def test_an_override_keeps_the_end(signals: Signals) -> None:
    """A subclass without `hook_config` still ends the run where the limiter does."""
    scene = Scene(
        signals,
        [["search"], "not reached"],
        [NoDecorator(run_limit=0, exit_behavior="end", telemetry=signals.telemetry)],
        form="sync",
    )

    await scene.turn()

    assert len(scene.model.calls) == 1
    scene.check()


class OwnModelHooks(ModelCallLimitMiddleware[Any, Any]):
    """Records what its sync hooks see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.log: list[str] = []

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.log.append("before_model")
        return super().before_model(state, runtime)

    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.log.append("after_model")
        return super().after_model(state, runtime)

    def after_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        self.log.append("after_agent")
        return None


async def test_overrides_of_the_model_hooks(signals: Signals) -> None:
    """Overrides of a model limiter's sync hooks run once for each call."""
    mine = OwnModelHooks(run_limit=2, telemetry=signals.telemetry)
    scene = Scene(signals, [["calc"], ["calc"], "not reached"], [mine], form="sync")

    await scene.turn()

    around = ["before_model", "after_model"]
    assert mine.log == [*around, *around, "before_model", "after_agent"]
    assert len(scene.model.calls) == 2
    scene.check()


def described(decision: Decision) -> str:
    status = decision.refused_by[0]
    return f"{decision.call.tool}: {status.limit}, {status.scope} of {status.run_limit}"


@pytest.mark.parametrize(
    ("message", "text"),
    [("Enough.", "Enough."), (described, "search: tool:search, run of 0")],
    ids=["text", "function"],
)
@pytest.mark.parametrize("exit_behavior", ["continue", "end"])
async def test_a_tool_limits_message(
    message: Any, text: str, exit_behavior: Any, signals: Signals
) -> None:
    """`message` is what the model reads, and with `end` the final message too."""
    scene = Scene(
        signals,
        [["search"], "done"],
        [
            ToolCallLimitMiddleware(
                tool_name="search",
                run_limit=0,
                exit_behavior=exit_behavior,
                message=message,
                telemetry=signals.telemetry,
            )
        ],
    )

    result = await scene.turn()

    assert result["messages"][2].content == text
    assert result["messages"][3].content == (text if exit_behavior == "end" else "done")
    scene.check()


@pytest.mark.parametrize(
    ("message", "text"),
    [("Enough.", "Enough."), (described, "None: model, run of 1")],
    ids=["text", "function"],
)
async def test_a_model_limits_message(message: Any, text: str, signals: Signals) -> None:
    """`message` is the final message of a model limit."""
    scene = Scene(
        signals,
        [["calc"], "not reached"],
        [ModelCallLimitMiddleware(run_limit=1, message=message, telemetry=signals.telemetry)],
    )

    result = await scene.turn()

    assert result["messages"][-1].content == text
    scene.check()
