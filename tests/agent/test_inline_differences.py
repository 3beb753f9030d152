"""Where InlineQuotaMiddleware means something else than QuotaMiddleware: the table of the docs."""

from typing import Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelRetryMiddleware,
)
from langchain_core.messages import AIMessage

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit
from tests.agent.rules import CONFIG, Middleware, Scene
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


class Failing:
    """A model's answer that fails so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, messages: Any) -> str:
        if self.times:
            self.times -= 1
            raise ConnectionError("no answer")
        return "done"


def used(scene: Scene) -> Any:
    return usage(scene.agent.get_state(CONFIG))


@both
async def test_hooks_of_others_run_around_a_refusal(quota: Quota, signals: Signals) -> None:
    """Hooks of a later middleware do not run for a refused model call; inline they do."""
    looking = Looking()
    limits = [ModelCallLimit(run_limit=0)]
    scene = Scene(signals, ["never"], [quota(limits, telemetry=signals.telemetry), looking])
    await scene.turn()
    assert looking.seen == ([] if quota is QuotaMiddleware else ["before", "after"])
    assert not scene.model.calls


@both
async def test_a_call_that_raises(quota: Quota, signals: Signals) -> None:
    """A model call that raises has been charged; inline it has not, since nothing is written."""
    limiter = quota([ModelCallLimit(thread_limit=9)], telemetry=signals.telemetry)
    scene = Scene(signals, Failing(1), [limiter])
    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()
    assert used(scene).model == (2 if quota is QuotaMiddleware else 1)


@both
async def test_a_call_that_raises_with_a_store(quota: Quota, signals: Signals) -> None:
    """With a store a model call that raises is charged either way."""
    limiter = quota(
        [ModelCallLimit(thread_limit=9)], store=MemoryStore(), telemetry=signals.telemetry
    )
    scene = Scene(signals, Failing(1), [limiter])
    with pytest.raises(ConnectionError):
        await scene.turn()
    await scene.turn()
    assert used(scene).model == 2


@both
async def test_an_exception_takes_the_step_with_it(quota: Quota, signals: Signals) -> None:
    """Where a limit raises, the message that asked for the tools stays; inline it is lost."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=0, exit_behavior="error"),
        ModelCallLimit(thread_limit=9),
    ]
    scene = Scene(signals, [["search"]], [quota(limits, telemetry=signals.telemetry)])
    with pytest.raises(ToolCallLimitExceededError):
        await scene.turn()
    kept = [each for each in scene.state()["messages"] if isinstance(each, AIMessage)]
    assert len(kept) == used(scene).model == (1 if quota is QuotaMiddleware else 0)


@pytest.mark.parametrize("order", ["inside", "outside"])
async def test_tries_are_one_call(order: str, signals: Signals) -> None:
    """What a retry tries is one call, whether it is listed behind the inline one or before it."""
    limiter = InlineQuotaMiddleware([ModelCallLimit(thread_limit=9)], telemetry=signals.telemetry)
    retry = ModelRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)
    stack: list[Middleware] = [limiter, retry] if order == "inside" else [retry, limiter]
    scene = Scene(signals, Failing(2), stack)
    await scene.turn()
    assert used(scene).model == 1
    model = {"agent": "unnamed", "kind": "model", "tool": "none"}
    assert signals.value("langchain_quota_calls_total", **model, decision="allowed") == 1


@both
async def test_review_comes_after(quota: Quota, signals: Signals) -> None:
    """A review listed behind it is asked first; behind the inline one last, about all calls."""
    review = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    limiter = quota([ToolCallLimit("search", run_limit=1)], telemetry=signals.telemetry)
    scene = Scene(signals, [["search"] * 2, "done"], [limiter, review])
    result = await scene.turn()
    (interrupt,) = result["__interrupt__"]
    assert len(interrupt.value["action_requests"]) == 2
    answered = [each for each in scene.answers() if each == ("search", "error")]
    assert len(answered) == (0 if quota is QuotaMiddleware else 1)
    await scene.resume({"decisions": [{"type": "approve"}] * 2})
    assert scene.ran == ["search"]
    scene.check()


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
        await scene.turn()
    await scene.invoke(None)
    again = quota is InlineQuotaMiddleware
    assert scene.ran == ["search"]
    assert len(scene.model.calls) == (3 if again else 2)
    assert used(scene).tools["search"] == (2 if again and stored else 1)
    assert used(scene).model == 2
