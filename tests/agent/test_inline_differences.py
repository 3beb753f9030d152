"""Where InlineQuotaMiddleware means something else than QuotaMiddleware: the table of the docs."""

from typing import Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
)

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    usage,
)
from langchain_quota.limits import Limit
from tests.scene import CONFIG, Scene
from tests.signals import Signals, needs_inline

pytestmark = needs_inline

Quota = type[QuotaMiddleware[Any, Any]] | type[InlineQuotaMiddleware[Any, Any]]
both = pytest.mark.parametrize("quota", [QuotaMiddleware, InlineQuotaMiddleware])


class Looking(AgentMiddleware[Any, Any, Any]):
    """Notes when its hooks run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def before_model(self, state: Any, runtime: Any) -> None:
        self.seen.append("before")

    async def abefore_model(self, state: Any, runtime: Any) -> None:
        self.seen.append("before")

    def after_model(self, state: Any, runtime: Any) -> None:
        self.seen.append("after")

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        self.seen.append("after")


def used(scene: Scene) -> Any:
    return usage(scene.agent.get_state(CONFIG))


@both
async def test_hooks_of_others_run_around_a_refusal(quota: Quota, signals: Signals) -> None:
    """Hooks of a later middleware do not run for a refused model call; inline they do."""
    looking = Looking()
    limits = [ModelCallLimit(run_limit=0)]
    scene = Scene(signals, ["never"], [quota(limits, telemetry=signals.telemetry), looking])
    await scene.play()
    assert looking.seen == ([] if quota is QuotaMiddleware else ["before", "after"])
    assert not scene.model.calls


class Dying(AgentMiddleware[Any, Any, Any]):
    """Takes the process down, once, where the tool calls have just been judged."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 1

    def die(self) -> None:
        if self.times:
            self.times -= 1
            raise ConnectionError("gone")


class DyingInStep(Dying):
    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        response = handler(request)
        self.die()
        return response

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        response = await handler(request)
        self.die()
        return response


class DyingAfterStep(Dying):
    def after_model(self, state: Any, runtime: Any) -> None:
        self.die()

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        self.die()


@both
@pytest.mark.parametrize("stored", [False, True], ids=["in the state", "in a store"])
async def test_a_death_after_judging(
    quota: Quota,
    stored: bool,  # noqa: FBT001 - a row of the table
    signals: Signals,
) -> None:
    """What is judged is judged once; inline the model is called again, and a store keeps both."""
    store = MemoryStore() if stored else None
    limits: list[Limit] = [ToolCallLimit("search", thread_limit=9), ModelCallLimit(thread_limit=9)]
    limiter = quota(limits, store=store, telemetry=signals.telemetry)
    dying = DyingAfterStep() if quota is QuotaMiddleware else DyingInStep()

    def search_once(messages: list[Any]) -> Any:
        return "done" if messages[-1].type == "tool" else ["search"]

    scene = Scene(signals, search_once, [dying, limiter])
    with pytest.raises(ConnectionError):
        await scene.play()
    await scene.invoke(None)
    again = quota is InlineQuotaMiddleware
    assert scene.ran == ["search"]
    assert len(scene.model.calls) == (3 if again else 2)
    assert used(scene).tools["search"] == (2 if again and stored else 1)
    assert used(scene).model == 2
