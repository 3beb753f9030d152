"""What a store holds of budgets while a call is made, and what it is charged afterwards."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from itertools import chain, repeat
from typing import Any

import pytest
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGenerationChunk

from langchain_quota import (
    CostLimit,
    Decision,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelUsage,
    Price,
    Quota,
    TokenLimit,
    max_usage,
)
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scenario.test_model_pace import Refused
from tests.scene import ANN, Kind, Scene, cancel_at, either
from tests.stores import DAY, TODAY, Clock, FickleStore, counts, quota, run_counts
from tests.telemetry import Signals
from tests.tokens import GLOBAL, MONEY, RETRY, THREAD, TOTAL, During, ProviderError, answer, spent

LEASE = 900
"""For how long a store holds an amount, in seconds."""
OF_ALL = Quota(1000, per="global")


def memory() -> MemoryStore:
    return MemoryStore(clock=Clock())


def watching(store: Any) -> tuple[list[dict[str, int]], During]:
    """What a store counts at each model call, and the middleware that looks."""
    seen: list[dict[str, int]] = []
    return seen, During(lambda: seen.append(counts(store)))


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
    scene = await Scene(signals, script, [*limits, during], store=store).played()
    await scene.play()
    held = 70 if enforce else 0
    assert [each.get(GLOBAL, 0) for each in seen][:2] == [held, 10 + held]
    refused = "Token limits exceeded: global limit (35/100 tokens, the call may need 70)"
    assert scene.last_text() == (refused if enforce else "Hello.")
    newest = [each.outcome for each in scene.decisions if each.call.kind == "model"][-1]
    assert newest == ("blocked" if enforce else "would_block")


@pytest.mark.parametrize(("reserve", "during"), [(500, "call"), (None, "call"), (500, "observer")])
async def test_a_cancelled_call_is_charged_what_was_held(
    signals: Signals, reserve: int | None, during: str
) -> None:
    """A cancelled call is charged its reserve, or an estimate; before it is made, nothing."""
    store, began = memory(), asyncio.Event()

    async def hang(_: object = None) -> None:
        assert counts(store) == ({GLOBAL: reserve} if reserve else {})
        began.set()
        await asyncio.Event().wait()

    class Slow(ScriptedChatModel):
        async def _agenerate(self, *_: Any, **__: Any) -> Any:
            await hang()

    limit, observers = TokenLimit(quotas=[OF_ALL], reserve=reserve), [hang] * (during != "call")
    options: Any = {"store": store, "on_decision": observers, "tools": ()}
    scene = Scene(signals, Slow(script=[]), [limit], **options)
    await cancel_at(began, scene.play("x" * 300))
    assert counts(store) == ({GLOBAL: reserve or 100} if during == "call" else {})


async def test_what_a_dead_process_held_is_given_back(signals: Signals) -> None:
    """A call that never reports its end holds its amount until the lease is over."""
    clock, seen = Clock(), list[dict[str, int]]()
    store = MemoryStore(clock=clock)

    def lasts() -> None:
        for seconds in (LEASE - 1, 3):
            clock.now += seconds
            seen.append(counts(store))

    await Scene(signals, [answer(60)], [limit_of(1000, 500), During(lasts)], store=store).play()
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

    @wrap_model_call
    async def answering(request: Any, handler: Any) -> Any:
        for _ in range(4):
            await handler(request)
        return AIMessage("mine")

    limit = TokenLimit(run_limit=50, reserve=50, exit_behavior="error")
    script = lambda _: answer(50)  # noqa: E731
    scene = Scene(signals, script, [answering, limit], thread_id=None, checkpointer=None)
    for _ in range(4):
        with pytest.raises(ModelCallLimitExceededError):
            await scene.play()
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) is ModelCallLimitExceededError]
    assert len(kept) <= 3


@pytest.mark.parametrize("enforce", [True, False])
async def test_a_grant_beside_a_reserve(signals: Signals, *, enforce: bool) -> None:
    """Decisions have the limit that a grant raised; a store shows a budget's if it is enforced."""
    store, decisions, quota = memory(), list[Decision](), Quota(1, per="user_id", window=DAY)
    more = TokenLimit(quotas=[replace(quota, limit=50)], enforce=enforce, name="more")
    limits: Any = ModelCallLimit(quotas=[quota], enforce=enforce), limit_of(99, reserve=9), more
    options: Any = {"store": store, "on_decision": decisions.append}
    scene = await Scene(signals, [answer(9)] * 2, limits, **options).played(context=ANN)
    store.grant(f"model:user_id:ann:{TODAY}", 5)
    await scene.play(context=ANN)
    counted = [(decision.outcome, decision.limits[0].counts[-1]) for decision in decisions]
    shown = [(outcome, count.used, count.limit) for outcome, count in counted]
    assert shown == [("allowed", 1, 1), ("allowed", 2, 6)]
    assert store.usages("*tokens:user_id:*")[0].limit == (50 if enforce else None)


def limit_of(most: int, reserve: Any, **options: Any) -> TokenLimit:
    return TokenLimit(quotas=[Quota(most, per="global")], reserve=reserve, **options)


@either
@pytest.mark.parametrize("reserve", [50, lambda _: 50], ids=["number", "function"])
@pytest.mark.parametrize(("order", "seen"), [("around", [50, 110]), ("inside", [50, 50])])
async def test_a_retry_holds_its_own_amount(
    signals: Signals, kind: Kind, reserve: Any, order: str, seen: list[int]
) -> None:
    """Behind a middleware that retries, each attempt holds its reserve, and is charged."""
    store, when_paid, limit = MemoryStore(), list[int](), limit_of(1000, reserve)

    def paid() -> None:
        when_paid.append(counts(store).get(GLOBAL, 0))
        if len(when_paid) == 1:
            raise ProviderError

    around: list[Any] = [RETRY, limit] if order == "around" else [limit, RETRY]
    items = [*around, During(paid)]
    scene = await Scene(signals, [answer(60), answer(40)], items, kind=kind, store=store).played()
    assert when_paid == seen
    assert counts(store) == {GLOBAL: 100}
    assert dict(scene.usage().run_spent) == {TOTAL: 100}
    assert scene.state()["langchain_quota"]["counts"]["thread_model"] == 1


@either
@pytest.mark.parametrize(("most", "calls"), [(50, 1), (61, 2)])
async def test_a_retry_is_checked_with_what_its_first_attempt_used(
    signals: Signals, kind: Kind, most: int, calls: int
) -> None:
    """Without a reserve, too, a call is made again only if the attempt before it left anything."""
    failures = [ProviderError()]

    def fail() -> None:
        if failures:
            raise failures.pop()

    items: list[Any] = [RETRY, TokenLimit(run_limit=most), During(fail)]
    scene = await Scene(signals, [answer(60), answer(40)], items, kind=kind).played()
    assert len(scene.model.calls) == calls
    assert spent(scene)[1] == (60 if calls == 1 else 100)


@either
@pytest.mark.parametrize("counted", ["here", "in a store", "in an outage"])
async def test_a_call_that_its_bound_refuses_is_not_counted(
    signals: Signals, kind: Kind, counted: str
) -> None:
    """A call that its bound refuses is one decision, and counts nowhere as a call."""
    store, bounds = FickleStore(memory()), [10, 200]

    def bound(_: object) -> int:
        store.down = False
        return bounds.pop(0)

    quotas = [Quota(5, per="global")] * (counted != "here")
    during = During(lambda: setattr(store, "down", counted == "in an outage"))
    models = ModelCallLimit(run_limit=5, thread_limit=5, quotas=quotas)
    items: list[Any] = [models, limit_of(100, bound), during]
    options: Any = {"kind": kind, "store": store, "on_store_error": "allow"}
    scene = await Scene(signals, [answer(60, "search")], items, **options).played()
    outcomes = [each.outcome for each in scene.decisions if each.call.kind == "model"]
    assert outcomes == [Outcome.ALLOWED, Outcome.BLOCKED]
    assert scene.used(models) == (1, 1)
    calls = {"model:global:": 1} if quotas else {}
    assert counts(store) == {GLOBAL: 60, "model:thread:thread-1": 1, **calls}
    refused = "Token limits exceeded: global limit (60/100 tokens, the call may need 200)"
    assert scene.last_text() == refused


@either
async def test_a_call_with_a_reserve_is_told_with_the_counts_before_it(
    signals: Signals, kind: Kind
) -> None:
    """The last call that a limit admits is allowed, though it is told when it is counted."""
    limits: list[Limit] = [ModelCallLimit(run_limit=1, thread_limit=1), limit_of(100, 10)]
    scene = await Scene(signals, [answer(5)], limits, kind=kind, store=MemoryStore()).played()
    (told,) = (each for each in scene.decisions if each.call.kind == "model")
    assert told.outcome is Outcome.ALLOWED
    assert ("run", 0, 1) in [count[:3] for count in told.limits[0].counts]


@either
@pytest.mark.parametrize("shared", [False, True])
async def test_a_call_that_does_not_fit_is_the_last_one(
    signals: Signals, kind: Kind, *, shared: bool
) -> None:
    """With `"finalize"` a call that its bound refuses is made as the last one, if that fits."""
    options: Any = {"run_limit": 50, "quotas": [Quota(50, per="global")] if shared else []}
    # The tools are a part of what a call can use: the last one has none.
    options["reserve"] = lambda request: 60 if request.tools else 40
    options |= {"exit_behavior": "finalize", "keep": 20}
    script, store = [answer(35, "search", text="")], MemoryStore() if shared else None
    scene = await Scene(signals, script, [TokenLimit(**options)], kind=kind, store=store).played()
    (call,) = scene.model.calls
    assert "last model call" in call.messages[-1].text
    assert call.tools == ()
    # It asks for a tool all the same.
    assert "run limit (0/50 tokens, the rest was kept for the last answer)" in scene.last_text()
    assert store is None or counts(store) == {GLOBAL: 35}


DOLLARS = f"{MONEY}:global:"
ASKED: Any = {"messages": [("user", "Hi!")]}


class Streamed(ScriptedChatModel):
    """Streams a word, and then nothing more."""

    begun: Any = None

    async def _astream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="Good "))
        if self.begun is not None:
            self.begun.set()
        await asyncio.Event().wait()


class Budget:
    """A model under budgets of tokens and money in a store whose clock a test sets."""

    def __init__(self, signals: Signals, model: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore(clock=self.clock)
        self.quota = quota(
            signals,
            TokenLimit(quotas=[Quota(10_000, per="global")], reserve=500),
            CostLimit(quotas=[Quota(1, per="global")], reserve="0.0000005"),
            store=FickleStore(self.store),
            clock=self.clock,
            prices=lambda used: Decimal(used.total_tokens) / 10**9,
        )
        self.agent = Scene(signals, model, [self.quota], checkpointer=None).agent

    def charged(self) -> dict[str, int]:
        """What is charged when all that was held is released."""
        self.clock.now += 3600
        return counts(self.store)


async def test_a_stream_that_is_left_is_charged_what_was_held(signals: Signals) -> None:
    """A stream that is left in the middle is charged its reserve: nothing is told."""
    budget = Budget(signals, Streamed(script=[]))
    stream = budget.agent.astream(ASKED, stream_mode="messages")
    async for _ in stream:
        break
    assert counts(budget.store) == {GLOBAL: 500, DOLLARS: 500}
    await stream.aclose()
    assert budget.charged() == {GLOBAL: 500, DOLLARS: 500}


@pytest.mark.parametrize(
    ("error", "held"), [(KeyboardInterrupt, 500), (TimeoutError, 500), (Refused, 0)]
)
def test_an_interrupted_call_is_charged_what_was_held(
    signals: Signals, error: type[BaseException], held: int
) -> None:
    """After Ctrl-C, or a timeout, a call may have been served; not where the provider refused."""
    budget = Budget(signals, [error()])
    with pytest.raises(error):
        budget.agent.invoke(ASKED)
    assert budget.charged() == ({GLOBAL: held, DOLLARS: held} if held else {})


@pytest.mark.filterwarnings("ignore:coroutine .*on_llm_error")
def test_a_call_whose_event_loop_is_gone_is_charged_with_the_next(signals: Signals) -> None:
    """Where nothing can be awaited any more, the next call of this process charges the reserve."""
    budget, loop = Budget(signals, [answer(60)]), asyncio.new_event_loop()
    model = Streamed(script=[], begun=asyncio.Event())
    request: Any = ModelRequest(model=model, messages=[HumanMessage("Hi!")], state={"messages": []})

    async def handler(given: Any) -> Any:
        async for _ in given.model.astream(given.messages):
            pass

    called: Any = budget.quota.awrap_model_call(request, handler)
    running = loop.create_task(called)
    loop.run_until_complete(asyncio.wait_for(model.begun.wait(), 60))
    # Nobody runs the loop again, nor what waits in it.
    running._log_destroy_pending = False  # type: ignore[attr-defined]
    with suppress(RuntimeError):
        # Some versions of LangChain want to report the end of the model run, and need a loop.
        called.close()
    loop.close()
    del running, called
    gc.collect()
    budget.agent.invoke(ASKED)
    assert budget.charged() == {GLOBAL: 560, DOLLARS: 560}


NEEDS = "the call may need 2000"


@pytest.mark.parametrize("quota", [{"burst": 100}, {}, {"smooth": False}])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, NEEDS),
        ({"wait": "10h"}, NEEDS),
        ({"exit_behavior": "error"}, NEEDS),
        ({"exit_behavior": "error", "wait": "10h"}, NEEDS),
        ({"exit_behavior": "finalize", "keep": 50}, "A short answer."),
    ],
)
async def test_exit_behavior_decides(signals: Signals, options: Any, said: str, quota: Any) -> None:
    """It ends the run, raises, or is made without tools if that fits; it does not wait in vain."""
    smooth = Quota(1_000, **{"per": "global", "window": "1h", "smooth": True, **quota})
    reserves = chain((50, 2_000), repeat(50 if "keep" in options else 2_000))
    limit = TokenLimit(quotas=[smooth], reserve=lambda _: next(reserves), **options)
    store, script = MemoryStore(), [answer(40, "search"), answer(20, text="A short answer.")]
    scene = Scene(signals, script, [limit], store=store)
    if options.get("exit_behavior") == "error":
        with pytest.raises(ModelCallLimitExceededError, match=said):
            await scene.play()
    else:
        await scene.play()
        assert said in scene.last_text()
    assert len(scene.model.calls) == 1 + (said != NEEDS)
    assert sum(counts(store).values()) <= 60


async def test_a_reserve_of_parts(signals: Signals) -> None:
    """A reserve whose total is not given is its input and its output."""
    parts = ModelUsage(input_tokens=60, output_tokens=50)
    scene = Scene(signals, [answer(10)], [TokenLimit(run_limit=100, reserve=lambda _: parts)])
    await scene.play()
    assert "the call may need 110" in scene.last_text()
    assert ModelUsage(input_tokens=1, total_tokens=9).total_tokens == 9
