"""Budgets in a store: amounts are held during a call, and then replaced by what it has used."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from langchain_quota import (
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    Outcome,
    Quota,
    QuotaMiddleware,
    TokenLimit,
)
from langchain_quota.estimates import usage_bound
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage
from langchain_quota.prices import Price, resolve_prices
from langchain_quota.resolved import LEASE
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.scene import ANN, Form, Middleware, Scene, both_forms
from tests.signals import Signals, needs_inline
from tests.stores import DAY, NOON, TODAY, Clock, FickleStore, counts, quota, run_counts

TOTAL = "model.total_tokens"
EITHER = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
GLOBAL = f"{TOTAL}:global:"
FORMS = ["number", "function"]


def answer(tokens: int, *calls: str) -> AIMessage:
    """An answer that has cost so many tokens."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    called = [{"name": name, "args": {}, "id": f"{name}-{tokens}"} for name in calls]
    return AIMessage("Hello.", usage_metadata=used, tool_calls=called)


class During(AgentMiddleware):
    """Does something while a model call is made."""

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


def scene_of(
    signals: Signals,
    script: Any,
    *limits: Limit,
    store: Any,
    beside: list[Middleware] | None = None,
    clock: Clock | None = None,
    form: Form = "async",
    **options: Any,
) -> Scene:
    made = quota(signals, *limits, store=store, clock=clock, **options)
    return Scene(signals, script, [made, *(beside or [])], form=form)


def last(scene: Scene) -> str:
    return str(scene.state()["messages"][-1].text)


@both_forms
async def test_what_is_held_becomes_what_was_used(signals: Signals, form: Form) -> None:
    """During a call one token is held of each budget; afterwards what it used is charged."""
    store, seen = MemoryStore(clock=lambda: NOON), list[dict[str, int]]()
    limit = TokenLimit(
        run_limit=1000, thread_limit=1000, quotas=[Quota(1000, per="user_id", window=DAY)]
    )
    scene = scene_of(
        signals,
        [answer(60, "search"), answer(40)],
        limit,
        store=store,
        beside=[During(lambda: seen.append(counts(store)))],
        form=form,
    )

    await scene.play(context=ANN)

    keys = (f"{TOTAL}:thread:thread-1", f"{TOTAL}:user_id:ann:{TODAY}")
    assert seen == [dict.fromkeys(keys, 1), dict.fromkeys(keys, 61)]
    assert counts(store) == dict.fromkeys(keys, 100)
    assert run_counts(store, TOTAL) == [100]


async def test_agents_share_a_budget(signals: Signals) -> None:
    """What one agent has used another one has not: at nothing left each of them is refused."""
    store = MemoryStore(clock=lambda: NOON)
    limit = TokenLimit(quotas=[Quota(100, per="global")])
    first = scene_of(signals, [answer(99), answer(5)], limit, store=store)
    second = scene_of(signals, [answer(30)], limit, store=store)

    await first.play()
    await second.play()
    await first.play()

    assert counts(store) == {GLOBAL: 129}
    assert last(second) == "Hello."
    assert last(first) == "Token limits exceeded: global limit (129/100 tokens)"


@pytest.mark.parametrize("form_of", [lambda each: each, lambda each: lambda _: each], ids=FORMS)
@pytest.mark.parametrize(
    ("reserves", "held"),
    [
        ((25, 70), 70),
        ((70, 25), 70),
        ((25, 70, 40), 70),
        ((70, None), 70),
        ((None, 70), 70),
        ((None, None), 1),
    ],
    ids=str,
)
async def test_limits_on_one_count_hold_the_most_that_one_reserves(
    signals: Signals, reserves: tuple[int | None, ...], held: int, form_of: Callable[[int], Any]
) -> None:
    """Limits on the same tokens hold the largest of their reserves, once, in whichever order."""
    store, seen = MemoryStore(clock=lambda: NOON), list[dict[str, int]]()
    limits = [
        TokenLimit(
            quotas=[Quota(1000 - index, per="global")],
            reserve=None if each is None else form_of(each),
            name=f"limit-{index}",
        )
        for index, each in enumerate(reserves)
    ]
    during = During(lambda: seen.append(counts(store)))
    scene = scene_of(signals, [answer(5)], *limits, store=store, beside=[during])

    await scene.play()

    assert seen == [{GLOBAL: held}]
    assert counts(store) == {GLOBAL: 5}


@pytest.mark.parametrize("reserve", [70, lambda _: 70], ids=["number", "function"])
@pytest.mark.parametrize("enforce", [True, False])
async def test_a_reserve_refuses_for_its_own_limit_only(
    signals: Signals, *, reserve: Any, enforce: bool
) -> None:
    """A limit on the same tokens is judged by its own reserve; one on trial holds nothing."""
    store, seen = MemoryStore(clock=lambda: NOON), list[dict[str, int]]()
    limits = [
        TokenLimit(quotas=[Quota(50, per="global")], run_limit=30),
        TokenLimit(
            quotas=[Quota(100, per="global")], reserve=reserve, enforce=enforce, name="other"
        ),
    ]
    during = During(lambda: seen.append(counts(store)))
    script = [answer(10, "search"), answer(15, "search"), answer(10), answer(1)]
    scene = scene_of(signals, script, *limits, store=store, beside=[during])

    with captured_decisions() as decisions:
        await scene.play()
        await scene.play()

    held = 70 if enforce else 1
    assert [each[GLOBAL] for each in seen][:2] == [held, 10 + held]
    if enforce:
        assert last(scene) == (
            "Token limits exceeded: global limit (35/100 tokens, the call may need 70)"
        )
        return
    assert last(scene) == "Hello."
    outcomes = [each.outcome for each in decisions if each.call.kind == "model"]
    assert outcomes == [*[Outcome.ALLOWED] * 3, Outcome.WOULD_BLOCK]


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
@pytest.mark.parametrize(
    ("small", "large", "refusing"),
    [(40, 85, []), (39, 85, ["small"]), (40, 84, ["large"]), (39, 84, ["small", "large"])],
)
async def test_each_limit_on_one_count_is_judged_by_its_own_reserve(
    signals: Signals, small: int, large: int, refusing: list[str], *, turned: bool
) -> None:
    """After 15 tokens a reserve of 25 needs a limit of 40, one of 70 needs 85, in any order."""
    limits = [
        TokenLimit(quotas=[Quota(small, per="global")], reserve=25, name="small"),
        TokenLimit(quotas=[Quota(large, per="global")], reserve=70, name="large"),
    ]
    store, script = MemoryStore(clock=lambda: NOON), [answer(15, "search"), answer(5)]
    ordered = limits[::-1] if turned else limits
    scene = scene_of(signals, script, *ordered, store=store)

    with captured_decisions() as decisions:
        await scene.play()

    *_, newest = (each for each in decisions if each.call.kind == "model")
    assert sorted(each.limit for each in newest.refused_by) == sorted(refusing)
    assert len(scene.model.calls) == (1 if refusing else 2)


@pytest.mark.parametrize("reserve", [500, None])
async def test_a_cancelled_call_is_charged_what_was_held(
    signals: Signals, reserve: int | None
) -> None:
    """Nobody reports what a cancelled call has used: it is charged its reserve, or an estimate."""
    store, began = MemoryStore(clock=lambda: NOON), asyncio.Event()

    class Slow(ScriptedChatModel):
        async def _agenerate(self, *_: Any, **__: Any) -> Any:
            began.set()
            await asyncio.sleep(3600)

    limit = TokenLimit(quotas=[Quota(1000, per="global")], reserve=reserve)
    made = quota(signals, limit, store=store)
    agent: Any = create_agent(Slow(script=[]), middleware=[made])
    running = asyncio.create_task(agent.ainvoke({"messages": [("user", "x" * 300)]}))
    await asyncio.wait_for(began.wait(), 60)
    assert counts(store) == {GLOBAL: reserve or 1}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert counts(store) == {GLOBAL: reserve or 100}


async def test_what_a_dead_process_held_is_given_back(signals: Signals) -> None:
    """A call that never reports its end holds its amount until the lease is over."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    limit = TokenLimit(quotas=[Quota(1000, per="global")], reserve=500)
    seen: list[dict[str, int]] = []

    def lasts() -> None:
        clock.now += LEASE - 1
        seen.append(counts(store))
        clock.now += 3
        seen.append(counts(store))

    scene = scene_of(signals, [answer(60)], limit, store=store, clock=clock, beside=[During(lasts)])

    await scene.play()

    assert seen == [{GLOBAL: 500}, {}]


@both_forms
async def test_an_outage_denies(signals: Signals, form: Form) -> None:
    """While the store does not answer, no model call is made, and nothing is charged."""
    store = FickleStore(MemoryStore(clock=lambda: NOON))
    store.down = True
    limit = TokenLimit(quotas=[Quota(1000, per="global")])
    scene = scene_of(signals, [answer(60)], limit, store=store, form=form)

    await scene.play()

    assert last(scene) == "Token limit could not be checked: try again later."
    store.down = False
    await scene.play()
    assert counts(store) == {GLOBAL: 60}


@both_forms
@pytest.mark.parametrize("hears", [False, True])
async def test_an_outage_allows_and_is_charged_later(
    signals: Signals, form: Form, *, hears: bool
) -> None:
    """With `"allow"` calls are made, and what they have used is charged when the store is back."""
    store = FickleStore(MemoryStore(clock=lambda: NOON))
    store.down, store.hears = True, hears
    limit = TokenLimit(thread_limit=1000, quotas=[Quota(1000, per="global")], reserve=300)
    scene = scene_of(
        signals, [answer(60), answer(7)], limit, store=store, form=form, on_store_error="allow"
    )

    await scene.play()
    store.down = False
    await scene.play()

    assert counts(store) == {GLOBAL: 67, f"{TOTAL}:thread:thread-1": 67}
    assert scene.state()["langchain_quota"]["thread_spent"] == {TOTAL: 67}


@both_forms
@pytest.mark.parametrize("hears", [False, True])
async def test_an_outage_during_a_call_loses_nothing(
    signals: Signals, form: Form, *, hears: bool
) -> None:
    """A store that fails during a call gets its charge once, when it is back."""
    store, first = FickleStore(MemoryStore(clock=lambda: NOON)), [True]
    store.hears = hears

    def goes_down() -> None:
        store.down = bool(first)
        first.clear()

    limit = TokenLimit(thread_limit=1000, quotas=[Quota(1000, per="global")], reserve=300)
    during = During(goes_down)
    script = [answer(60), answer(7)]
    scene = scene_of(signals, script, limit, store=store, form=form, beside=[during])

    await scene.play()
    assert last(scene) == "Hello."
    store.down = False
    await scene.play()

    assert counts(store) == {GLOBAL: 67, f"{TOTAL}:thread:thread-1": 67}


async def test_a_store_that_was_emptied_begins_with_what_the_state_has(signals: Signals) -> None:
    """A count that a store has lost begins anew where the thread's state is."""
    store = FickleStore(MemoryStore(clock=lambda: NOON))
    limit = TokenLimit(thread_limit=1000)
    script = [answer(60), answer(7), answer(3)]
    scene = scene_of(signals, script, limit, store=store, on_store_error="allow")
    await scene.play()

    store.kept, store.down = MemoryStore(clock=lambda: NOON), True
    await scene.play()
    store.down = False
    await scene.play()

    assert counts(store) == {f"{TOTAL}:thread:thread-1": 70}


@EITHER
@both_forms
@pytest.mark.parametrize("shared", [False, True])
async def test_a_function_says_what_a_call_can_use(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form, *, shared: bool
) -> None:
    """A call is made only if the most that it can use is left; a store holds that meanwhile."""
    store, seen = MemoryStore(), list[dict[str, int]]()
    bounds: list[Any] = [ModelUsage(input_tokens=70, output_tokens=20, total_tokens=90), 30, 41]
    quotas = [Quota(100, per="global")] if shared else []
    limit = TokenLimit(run_limit=100, quotas=quotas, reserve=lambda _: bounds.pop(0))
    made = kind([limit], store=store if shared else None, telemetry=signals.telemetry)
    during = During(lambda: seen.append(counts(store)))
    script = [answer(50, "search"), answer(10, "search")]
    scene = Scene(signals, script, [made, during], form=form)

    with captured_decisions() as decisions:
        await scene.play()

    assert len(scene.model.calls) == 2
    amounts = "60/100 tokens, the call may need 41"
    beside = f", global limit ({amounts})" if shared else ""
    assert last(scene) == f"Token limits exceeded: run limit ({amounts}){beside}"
    assert decisions[-1].outcome is Outcome.BLOCKED
    assert scene.state()["langchain_quota"]["run_spent"] == {TOTAL: 60}
    assert seen == ([{GLOBAL: 90}, {GLOBAL: 80}] if shared else [{}, {}])
    assert counts(store) == ({GLOBAL: 60} if shared else {})


async def test_the_most_that_a_call_can_cost_is_held(signals: Signals) -> None:
    """The bound that is shipped is priced as high as it can be, and then corrected."""
    store, seen = MemoryStore(), list[dict[str, int]]()
    bounds: list[ModelUsage] = []

    def bound(request: ModelRequest[Any]) -> ModelUsage:
        bounds.append(usage_bound(request))
        return bounds[-1]

    limit = CostLimit(quotas=[Quota("5", per="global")], reserve=bound)
    prices = {"scripted": Price(input=1, output=10, cache_creation=2)}
    during = During(lambda: seen.append(counts(store)))
    made = quota(
        signals, limit, store=store, prices=lambda used: resolve_prices(prices)(named(used))
    )
    scene = Scene(signals, [answer(60)], [made, during])

    await scene.play()

    ((held,), (charged,)) = (each.values() for each in (seen[0], counts(store)))
    assert held == 2 * bounds[0].input_tokens + 10 * 16_384
    assert charged == 59 + 10


def named(used: ModelUsage) -> ModelUsage:
    return replace(used, response_model="scripted")


@EITHER
@both_forms
async def test_a_refused_structured_response_ends_the_run(
    signals: Signals, kind: type[QuotaMiddleware[Any, Any]], form: Form
) -> None:
    """LangChain leads a run without its structured response back: the run still ends."""
    limit = TokenLimit(run_limit=10, reserve=lambda _: 11)
    made = kind([limit], telemetry=signals.telemetry)
    scene = Scene(signals, [], [made], form=form, response_format=ToolStrategy(Weather))

    await scene.play()
    await scene.play()

    finals = [each for each in scene.state()["messages"] if each.type == "ai"]
    text = "Token limits exceeded: run limit (0/10 tokens, the call may need 11)"
    assert [each.text for each in finals] == [text] * 2


class Weather(BaseModel):
    """The weather."""

    degrees: int
