"""What a store holds of budgets while a call is made, and what it is charged afterwards."""

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
from langchain.agents.middleware.types import AgentMiddleware, ModelRequest
from langchain_core.messages import AIMessage

from langchain_quota import (
    CostLimit,
    Decision,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Price,
    Quota,
    TokenLimit,
    max_usage,
)
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.scene import ANN, Kind, Scene, cancel_at, either
from tests.stores import DAY, TODAY, Clock, FickleStore, counts, run_counts
from tests.telemetry import Signals
from tests.tokens import GLOBAL, MONEY, THREAD, TOTAL, During, ProviderError, answer, spent

LEASE = 900
"""For how long a store holds an amount, in seconds."""
OF_ALL = Quota(1000, per="global")


def memory() -> MemoryStore:
    return MemoryStore(clock=Clock())


def watching(store: Any) -> tuple[list[dict[str, int]], During]:
    """What a store counts at each model call, and the middleware that looks."""
    seen: list[dict[str, int]] = []
    return seen, During(lambda: seen.append(counts(store)))


async def test_what_is_held_becomes_what_was_used(signals: Signals) -> None:
    """During a call its reserve is held of each budget; afterwards what it used is charged."""
    store = memory()
    seen, during = watching(store)
    quotas = [Quota(1000, per="user_id", window=DAY)]
    limit = TokenLimit(run_limit=1000, thread_limit=1000, quotas=quotas, reserve=70)
    script = [answer(60, "search"), answer(40)]
    await Scene(signals, script, [limit, during], store=store).play(context=ANN)
    keys = (THREAD, f"{TOTAL}:user_id:ann:{TODAY}")
    assert seen == [dict.fromkeys(keys, 70), dict.fromkeys(keys, 130)]
    assert counts(store) == dict.fromkeys(keys, 100)
    assert run_counts(store, TOTAL) == [100]


@pytest.mark.parametrize("computed", [False, True], ids=["numbers", "functions"])
@pytest.mark.parametrize("reserves", [(25, 70), (70, None)], ids=str)
async def test_limits_on_one_count_hold_the_most_that_one_reserves(
    signals: Signals, reserves: tuple[int | None, ...], *, computed: bool
) -> None:
    """Limits on the same tokens hold the largest of their reserves, once, in whichever order."""
    store = memory()
    seen, during = watching(store)

    def limit(most: int, reserve: int | None) -> TokenLimit:
        given = (lambda _: reserve) if computed and reserve else reserve
        return TokenLimit(quotas=[Quota(most, per="global")], reserve=given, name=f"limit-{most}")

    limits = [limit(1000 + index, each) for index, each in enumerate(reserves)]
    await Scene(signals, [answer(5)], [*limits, during], store=store).play()
    assert seen == [{GLOBAL: 70}]
    assert counts(store) == {GLOBAL: 5}


@pytest.mark.parametrize("enforce", [True, False])
async def test_a_reserve_refuses_for_its_own_limit_only(signals: Signals, *, enforce: bool) -> None:
    """A limit on the same tokens is checked by its own reserve; one in a dry run holds nothing."""
    store = memory()
    seen, during = watching(store)
    quotas = [Quota(100, per="global")]
    limits = [
        TokenLimit(quotas=[Quota(50, per="global")], run_limit=30),
        TokenLimit(quotas=quotas, reserve=70, enforce=enforce, name="other"),
    ]
    script = [answer(10, "search"), answer(15, "search"), answer(10), answer(1)]
    scene = Scene(signals, script, [*limits, during], store=store)
    await scene.play()
    await scene.play()
    held = 70 if enforce else 0
    assert [each.get(GLOBAL, 0) for each in seen][:2] == [held, 10 + held]
    refused = "Token limits exceeded: global limit (35/100 tokens, the call may need 70)"
    assert scene.last_text() == (refused if enforce else "Hello.")
    newest = [each.outcome for each in scene.decisions if each.call.kind == "model"][-1]
    assert newest == ("blocked" if enforce else "would_block")


@pytest.mark.parametrize("reserve", [500, None])
async def test_a_cancelled_call_is_charged_what_was_held(
    signals: Signals, reserve: int | None
) -> None:
    """Nobody reports what a cancelled call has used: it is charged its reserve, or an estimate."""
    store, began = memory(), asyncio.Event()

    class Slow(ScriptedChatModel):
        async def _agenerate(self, *_: Any, **__: Any) -> Any:
            assert counts(store) == ({GLOBAL: reserve} if reserve else {})
            began.set()
            await asyncio.Event().wait()

    limit = TokenLimit(quotas=[OF_ALL], reserve=reserve)
    scene = Scene(signals, Slow(script=[]), [limit], store=store, tools=())
    await cancel_at(began, scene.play("x" * 300))
    assert counts(store) == {GLOBAL: reserve or 100}


async def test_a_call_that_cannot_be_made_holds_nothing(signals: Signals) -> None:
    """Who is cancelled between the reserve and the call, while an observer works, has used none."""
    store, began = memory(), asyncio.Event()

    async def observe(_: Decision) -> None:
        assert counts(store) == {GLOBAL: 500}
        began.set()
        await asyncio.Event().wait()

    limit = TokenLimit(quotas=[OF_ALL], reserve=500)
    scene = Scene(signals, [answer(60)], [limit], store=store, on_decision=observe)
    await cancel_at(began, scene.play())
    assert counts(store) == {}
    assert len(scene.model.calls) == 0


async def test_what_a_dead_process_held_is_given_back(signals: Signals) -> None:
    """A call that never reports its end holds its amount until the lease is over."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    limit = TokenLimit(quotas=[OF_ALL], reserve=500)
    seen: list[dict[str, int]] = []

    def lasts() -> None:
        clock.now += LEASE - 1
        seen.append(counts(store))
        clock.now += 3
        seen.append(counts(store))

    await Scene(signals, [answer(60)], [limit, During(lasts)], store=store).play()
    assert seen == [{GLOBAL: 500}, {}]


@either
async def test_a_step_that_runs_again_is_charged_again(signals: Signals, kind: Kind) -> None:
    """A run that goes on behind a failed call is charged both calls, and holds for the second."""
    store, seen, failures = memory(), list[dict[str, int]](), [ProviderError()]

    def fail() -> None:
        seen.append(counts(store))
        if failures:
            raise failures.pop()

    limit = TokenLimit(run_limit=1000, quotas=[OF_ALL], reserve=5)
    script = [answer(60), answer(40)]
    scene = Scene(signals, script, [limit, During(fail)], kind=kind, store=store)
    with pytest.raises(ProviderError):
        await scene.play()
    await scene.go_on()
    assert seen == [{GLOBAL: 5}, {GLOBAL: 65}]
    assert counts(store) == {GLOBAL: 100}
    assert run_counts(store, TOTAL) == [100]
    assert spent(scene)[1] == 100


@pytest.mark.parametrize("hears", [False, True])
async def test_an_outage_during_a_call_loses_nothing(signals: Signals, *, hears: bool) -> None:
    """A store that fails during a call gets its charge once, when it is back."""
    store, first = FickleStore(memory()), [True]
    store.hears = hears

    def goes_down() -> None:
        store.down = bool(first)
        first.clear()

    limit = TokenLimit(thread_limit=1000, quotas=[OF_ALL], reserve=300)
    script = [answer(60), answer(7)]
    scene = await Scene(signals, script, [limit, During(goes_down)], store=store).played()
    assert scene.last_text() == "Hello."
    store.down = False
    await scene.play()
    assert counts(store) == {GLOBAL: 67, THREAD: 67}


async def test_a_store_that_was_emptied_begins_with_what_the_state_has(signals: Signals) -> None:
    """A count that a store has lost begins anew where the thread's state is."""
    store = FickleStore(memory())
    script = [answer(60), answer(7), answer(3)]
    options: Any = {"store": store, "on_store_error": "allow"}
    scene = await Scene(signals, script, [TokenLimit(thread_limit=1000)], **options).played()
    store.kept, store.down = memory(), True
    await scene.play()
    store.down = False
    await scene.play()
    assert counts(store) == {THREAD: 70}


@pytest.mark.parametrize(
    ("price", "least"),
    [({"cache_creation": 20}, 20), ({"cache_creation_1h": 30}, 30), ({"cache_read": 3}, 10)],
)
async def test_the_most_that_a_call_can_cost_is_held(
    signals: Signals, price: dict[str, Any], least: int
) -> None:
    """The bound that is shipped is priced as high as it can be, and then corrected."""
    store = memory()
    seen, during = watching(store)
    bounds: list[ModelUsage] = []

    def bound(request: ModelRequest[Any]) -> ModelUsage:
        bounds.append(replace(max_usage(request), input_tokens=100, total_tokens=100))
        return bounds[-1]

    limit = CostLimit(quotas=[Quota(5, per="global")], reserve=bound)
    model = ScriptedChatModel(model="mine", script=[answer(60)])
    prices = {"mine": Price(**{"input": 10, "output": 1, "reasoning": 2, **price})}
    await Scene(signals, model, [limit, during], store=store, prices=prices).play()
    assert seen == [{f"{MONEY}:global:": (least * 100 + 2 * 16_384) * 1000}]
    assert counts(store) == {f"{MONEY}:global:": (10 * 59 + 1) * 1000}


async def test_refusals_that_nobody_raises_are_forgotten(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another middleware answers in place of blocked calls, the newest few are kept."""
    monkeypatch.setattr("langchain_quota.features.budgets.budgets.MAX_LATE", 3)

    class Answering(AgentMiddleware[Any, Any]):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            for _ in range(4):
                await handler(request)
            return AIMessage("mine")

    limit = TokenLimit(run_limit=50, reserve=50, exit_behavior="error")
    script = lambda _: answer(50)  # noqa: E731
    scene = Scene(signals, script, [Answering(), limit], thread_id=None, checkpointer=None)
    for _ in range(4):
        with pytest.raises(ModelCallLimitExceededError):
            await scene.play()
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) is ModelCallLimitExceededError]
    assert len(kept) <= 3


@pytest.mark.parametrize("enforce", [True, False])
async def test_a_grant_beside_a_reserve(signals: Signals, *, enforce: bool) -> None:
    """The decision about a call that waits for its request has the limit that a grant raised."""
    store, decisions = memory(), list[Decision]()
    quota = Quota(1, per="user_id", window=DAY)
    calls = ModelCallLimit(quotas=[quota], enforce=enforce)
    tokens = TokenLimit(run_limit=9, reserve=9)
    options: Any = {"store": store, "on_decision": decisions.append}
    scene = await Scene(signals, [answer(9)] * 2, [calls, tokens], **options).played(context=ANN)
    store.grant(f"model:user_id:ann:{TODAY}", 5)
    await scene.play(context=ANN)
    counted = [(decision.outcome, decision.limits[0].counts[-1]) for decision in decisions]
    shown = [(outcome, count.used, count.limit) for outcome, count in counted]
    assert shown == [("allowed", 1, 1), ("allowed", 2, 6)]
