"""What is held for a model call that is made again, refused by its bound, or the last one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
)
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, RetryPolicy, interrupt

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Outcome,
    Quota,
    QuotaMiddleware,
    TokenLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware import _late_use, _let_through
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.scene import CONFIG, Form, Middleware, Scene, both_forms
from tests.signals import Signals, needs_inline
from tests.stores import FickleStore, bound_of, counts

TOTAL = "model.total_tokens"
GLOBAL = f"{TOTAL}:global:"
ASKED: Any = {"messages": [("user", "Hi!")]}
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
RESERVES = pytest.mark.parametrize("reserve", [50, lambda _: 50], ids=["number", "function"])
RETRY: dict[str, Any] = {"max_retries": 1, "initial_delay": 0, "jitter": False}


class ProviderError(Exception):
    """The model's provider fails."""


def answer(tokens: int, *calls: str, text: str = "Hello.") -> AIMessage:
    """An answer that has cost so many tokens."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage(text, usage_metadata=used, tool_calls=called)


class Afterwards(AgentMiddleware):
    """Does something when a model call is done and paid, before anybody has its answer."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.do = do

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        response = handler(request)
        self.do()
        return response

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        response = await handler(request)
        self.do()
        return response


class Watched:
    """A store, and its count after each model call; the first call fails.

    Args:
        fail: What the first call does when it is paid.
    """

    def __init__(self, fail: Callable[[], object] | None = None) -> None:
        self.store = MemoryStore()
        self.seen: list[int] = []
        self._fail = fail

    def __call__(self) -> None:
        self.seen.append(counts(self.store).get(GLOBAL, 0))
        if len(self.seen) == 1 and self._fail is not None:
            self._fail()


def fails() -> None:
    raise ProviderError


def limit_of(most: int, reserve: Any, **options: Any) -> TokenLimit:
    return TokenLimit(quotas=[Quota(most, per="global")], reserve=reserve, **options)


def scene_of(
    signals: Signals,
    watched: Watched,
    script: Any,
    *limits: Limit,
    kind: type[QuotaMiddleware[Any, Any]] = QuotaMiddleware,
    around: Middleware | None = None,
    form: Form = "async",
) -> Scene:
    made = kind(limits, store=watched.store, telemetry=signals.telemetry)
    before = [] if around is None else [around]
    return Scene(signals, script, [*before, made, Afterwards(watched)], form=form)


def last(scene: Scene) -> str:
    return str(scene.state()["messages"][-1].text)


@EITHER
@both_forms
@RESERVES
async def test_a_retry_holds_its_own_amount(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form, reserve: Any
) -> None:
    """Behind a middleware that retries, each attempt holds its reserve, and is charged."""
    watched = Watched(fails)
    script = [answer(60), answer(40)]
    retry = ModelRetryMiddleware(**RETRY)
    limit = limit_of(1000, reserve)
    scene = scene_of(signals, watched, script, limit, kind=kind, around=retry, form=form)

    await scene.play()

    assert watched.seen == [50, 110]
    assert counts(watched.store) == {GLOBAL: 100}
    assert scene.state()["langchain_quota"]["run_spent"] == {TOTAL: 100}
    assert scene.state()["langchain_quota"]["thread_model"] == 1


@EITHER
async def test_a_fallback_holds_its_own_amount(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]]
) -> None:
    """Behind a middleware that falls back, the other model's call holds its reserve."""
    watched = Watched(fails)
    other = ModelFallbackMiddleware(ScriptedChatModel(script=[answer(30)]))
    scene = scene_of(signals, watched, [answer(60)], limit_of(1000, 50), kind=kind, around=other)

    await scene.play()

    assert watched.seen == [50, 110]
    assert counts(watched.store) == {GLOBAL: 90}


@EITHER
@RESERVES
async def test_a_node_that_langgraph_retries_holds_again(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], reserve: Any
) -> None:
    """LangGraph's own retry of a node calls the model again: it holds again, and is charged."""
    watched = Watched(fails)
    limit = limit_of(1000, reserve, run_limit=1000)
    scene = scene_of(signals, watched, [answer(60), answer(40)], limit, kind=kind)
    policy = RetryPolicy(initial_interval=0, jitter=False, retry_on=ProviderError)
    scene.agent.nodes["model"].retry_policy = [policy]

    await scene.play()

    assert watched.seen == [50, 110]
    assert counts(watched.store) == {GLOBAL: 100}
    assert scene.state()["langchain_quota"]["run_spent"] == {TOTAL: 100}


@RESERVES
async def test_another_process_gives_back_what_the_first_one_held(
    signals: Signals, reserve: Any
) -> None:
    """A run that waits behind `before_model`, and is resumed elsewhere, holds its amount once."""
    watched, saver = Watched(), InMemorySaver()

    class Asks(AgentMiddleware):
        async def abefore_model(self, state: Any, runtime: Any) -> None:
            interrupt("May I?")

    def process() -> Any:
        quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
            [limit_of(120, reserve)], store=watched.store, telemetry=signals.telemetry
        )
        model = ScriptedChatModel(script=[answer(60)])
        middleware = [quota, Asks(), Afterwards(watched)]
        return create_agent(model, middleware=middleware, checkpointer=saver)

    await process().ainvoke(ASKED, CONFIG)
    assert 0 < counts(watched.store)[GLOBAL] <= 50
    await process().ainvoke(Command(resume="yes"), CONFIG)

    assert watched.seen == [50]
    assert counts(watched.store) == {GLOBAL: 60}


@EITHER
@both_forms
@pytest.mark.parametrize("shared", [False, True])
async def test_a_call_that_its_bound_refuses_is_not_counted(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form, *, shared: bool
) -> None:
    """A call that its bound refuses is one decision, and counts nowhere as a call."""
    watched, bounds = Watched(), [10, 200]
    quotas = [Quota(5, per="global")] if shared else []
    limits: list[Limit] = [
        ModelCallLimit(run_limit=5, thread_limit=5, quotas=quotas),
        limit_of(100, lambda _: bounds.pop(0)),
    ]
    scene = scene_of(signals, watched, [answer(60, "search")], *limits, kind=kind, form=form)

    with captured_decisions() as decisions:
        await scene.play()

    models = [each.outcome for each in decisions if each.call.kind == "model"]
    assert models == [Outcome.ALLOWED, Outcome.BLOCKED]
    state = scene.state()
    assert (state["thread_model_call_count"], state["langchain_quota"]["run_model"]) == (1, 1)
    thread = {"model:thread:thread-1": 1}
    assert counts(watched.store) == {
        GLOBAL: 60,
        **thread,
        **({"model:global:": 1} if shared else {}),
    }
    assert last(scene) == (
        "Token limits exceeded: global limit (60/100 tokens, the call may need 200)"
    )


async def test_a_bound_that_raises_leaves_the_call_counted(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """With `"error"` a refused call is one decision, which says what the call may need.

    The state counts it like any call that raises. A store does not: the next call finds that out.
    """
    watched, bounds = Watched(), [11, 5]
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=5),
        TokenLimit(run_limit=10, reserve=lambda _: bounds.pop(0), exit_behavior="error"),
    ]
    scene = scene_of(signals, watched, [answer(4)], *limits)

    caplog.set_level(logging.DEBUG, "langchain_quota")
    with captured_decisions() as decisions, pytest.raises(ModelCallLimitExceededError):
        await scene.play()

    assert [each.outcome for each in decisions] == [Outcome.BLOCKED]
    assert [each.needs for each in decisions[0].limits] == [11]
    assert "0 tokens of 10 tokens (run_limit), the call may need 11 tokens" in caplog.text
    assert scene.state()["thread_model_call_count"] == 1
    assert counts(watched.store) == {}

    await scene.play()

    assert scene.state()["thread_model_call_count"] == 1
    assert counts(watched.store) == {"model:thread:thread-1": 1}


@EITHER
@both_forms
@pytest.mark.parametrize("shared", [False, True])
async def test_a_call_that_does_not_fit_is_the_last_one(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form, *, shared: bool
) -> None:
    """With `"finalize"` a call that its bound refuses is made as the last one, if that fits."""
    store = MemoryStore()
    options: dict[str, Any] = {"quotas": [Quota(50, per="global")]} if shared else {}
    limit = TokenLimit(
        run_limit=50,
        # The tools are a part of what a call can use: the last one has none.
        reserve=lambda request: 60 if request.tools else 40,
        exit_behavior="finalize",
        keep=20,
        **options,
    )
    quota = kind([limit], store=store if shared else None, telemetry=signals.telemetry)
    scene = Scene(signals, [], [quota], form=form)
    model = ScriptedChatModel(script=[answer(35, "search", text="")])
    scene.agent = create_agent(model, [_search], middleware=[quota], checkpointer=InMemorySaver())

    await scene.play()

    told = ["last model call" in each.messages[-1].text for each in model.calls]
    assert (told, model.calls[0].tools) == ([True], ())
    # It asks for a tool all the same.
    assert "run limit (0/50 tokens, the rest was kept for the last answer)" in last(scene)
    assert counts(store) == ({GLOBAL: 35} if shared else {})


def _search() -> str:
    """Search."""
    return "nothing"


async def test_a_last_call_that_does_not_fit_is_not_made(signals: Signals) -> None:
    """Where the last answer's bound does not fit, the run ends: no answer is made shorter."""
    limit = TokenLimit(run_limit=100, reserve=bound_of, exit_behavior="finalize", keep=20)
    scene = scene_of(signals, Watched(), [answer(60, "search")], limit)

    await scene.play()

    assert len(scene.model.calls) == 1
    assert last(scene) == ("Token limits exceeded: run limit (60/100 tokens, the call may need 60)")


async def test_a_store_that_is_down_is_asked_once(signals: Signals) -> None:
    """Where the store does not answer, nothing less is asked for: the run ends."""
    store = FickleStore(MemoryStore())

    class GoesDown(AgentMiddleware):
        async def abefore_model(self, state: Any, runtime: Any) -> None:
            store.down = True

    limit = limit_of(100, bound_of, exit_behavior="finalize", keep=20)
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [limit], store=store, telemetry=signals.telemetry
    )
    scene = Scene(signals, [], [quota, GoesDown()])

    await scene.play()

    assert last(scene) == "Token limit could not be checked: try again later."
    assert scene.fallbacks("deny") == 1


def ends() -> dict[str, Any]:
    """A guardrail that ends the run."""
    return {"jump_to": "end", "messages": [AIMessage("Not that.")]}


@EITHER
@both_forms
async def test_a_reserve_that_fails_gives_back_what_is_held(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form
) -> None:
    """If a function `reserve` raises, nothing is held of the other budgets."""
    watched = Watched()
    other = TokenLimit(tokens="input", run_limit=1000, reserve=lambda _: 1 // 0)
    limits = limit_of(1000, 50), other
    scene = scene_of(signals, watched, [], *limits, kind=kind, form=form)

    with pytest.raises(ZeroDivisionError):
        await scene.play()

    assert counts(watched.store) == {}


async def test_a_cancel_while_an_observer_waits_gives_back_what_is_held(signals: Signals) -> None:
    """A run that is cancelled between its reserve and its call holds nothing."""
    store, waits = MemoryStore(), asyncio.Event()
    seen: list[dict[str, int]] = []

    async def observe(_: object) -> None:
        seen.append(counts(store))
        waits.set()
        await asyncio.Event().wait()

    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [limit_of(1000, 50)], store=store, on_decision=observe, telemetry=signals.telemetry
    )
    running = asyncio.ensure_future(Scene(signals, [], [quota]).play())
    await asyncio.wait_for(waits.wait(), 60)
    running.cancel()
    await asyncio.wait([running])

    assert running.cancelled()
    assert (seen, counts(store)) == ([{GLOBAL: 50}], {})


@RESERVES
@both_forms
async def test_a_call_that_this_process_forgets_is_charged_once(
    signals: Signals, form: Form, reserve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 calls a process knows whether they were made: one beyond them holds anew.

    It is as if another process made it: what was held is given back, and each attempt is charged
    once.
    """
    monkeypatch.setattr(_let_through, "MAX_LET_THROUGH", 0)
    watched = Watched(fails)
    script = [answer(60), answer(40, "search"), answer(10)]
    retry = ModelRetryMiddleware(**RETRY)
    scene = scene_of(signals, watched, script, limit_of(1000, reserve), around=retry, form=form)

    await scene.play()

    assert watched.seen == [50, 110, 150]
    assert counts(watched.store) == {GLOBAL: 110}
    assert scene.state()["langchain_quota"]["run_spent"] == {TOTAL: 110}


async def test_what_this_process_forgets_is_in_the_store(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 runs a process knows what failed calls have used: beyond them the state loses it.

    The store has it, and what other calls have used is counted once in both.
    """
    monkeypatch.setattr(_late_use, "MAX_LATE", 0)
    watched = Watched(fails)
    script = [answer(60), answer(40, "search"), answer(10)]
    scene = scene_of(signals, watched, script, limit_of(1000, 50))

    with pytest.raises(ProviderError):
        await scene.play()
    await scene.play()

    assert counts(watched.store) == {GLOBAL: 110}
    assert scene.state()["langchain_quota"]["thread_spent"] == {TOTAL: 50}
