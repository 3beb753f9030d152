"""Tokens a minute: calls reserve tokens, wait for room, and settle; in agents and without them."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, cast

import pytest
from langchain.agents.middleware import ModelFallbackMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatResult

from langchain_quota import MemoryStore, ModelCallLimit, Quota, TokenLimit
from langchain_quota.limits import Limit
from langchain_quota.stores import QuotaUsage
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.scenario.test_model_pace import Refused
from tests.scene import Form, Kind, Scene, both_forms, each_kind, either, until
from tests.stores import DAY, Clock, FickleStore, Passing, SlowStore, counts
from tests.telemetry import Signals
from tests.tokens import RETRY, ProviderError, answer

MINUTE = Quota(60, per="global", window="1m", smooth=True)
"""A token a second, and 60 after a pause."""
KEY = "model.total_tokens:global::60~60"
REQUESTS = "model:global::60~60"
GAUGE = "langchain_quota_waiting_calls"


def limit(reserve: Any = 30, **options: Any) -> TokenLimit:
    """A limit of 60 tokens a minute whose calls wait."""
    return TokenLimit(quotas=[MINUTE], reserve=reserve, wait=DAY, **options)


def using(tokens: int) -> Any:
    """A script whose answers all use so many tokens."""
    return lambda _: answer(tokens)


async def waits(signals: Signals, number: int, name: str = "tokens") -> None:
    """Wait until so many calls wait for a limit."""
    await until(lambda: signals.value(GAUGE, agent="unnamed", limit=name) == number)


@both_forms
@each_kind
async def test_calls_wait_for_room(
    form: Form, kind: Kind, signals: Signals, clock: Passing
) -> None:
    """No time has more tokens than the rate and the burst, though none is lost; waits are told."""
    store, times = MemoryStore(clock=clock), list[float]()

    def script(_: Sequence[Any]) -> AIMessage:
        times.append(clock.now)
        return answer(20)

    scene = Scene(signals, script, [limit()], kind=kind, form=form, store=store)
    with captured_decisions() as decisions:
        for _ in range(12):
            await scene.play()
    assert len(times) == 12
    for first, start in enumerate(times):
        for number, end in enumerate(times[first:], 1):
            assert 20 * number <= 60 + end - start + 1e-3
    # 240 tokens, of which 60 come at once; the last call needs 10 beyond those that it uses.
    assert times[-1] - times[0] == pytest.approx(240 - 60 + 10, abs=0.1)
    waited = [each.waited for each in decisions if each.waited]
    assert (len(decisions), len(waited)) == (12, 10)


async def test_use_beyond_the_reserve_is_debt(signals: Signals, clock: Passing) -> None:
    """It is debt; without a reserve all use is, and a call waits until anything is left."""
    for reserve, pause in ((10, 130 - 60 + 10), (None, 130 - 60 + 1)):
        store = MemoryStore(clock=clock)
        scene = await Scene(signals, using(130), [limit(reserve)], store=store).played()
        assert counts(store) == {KEY: 130}
        start = clock.now
        await scene.play()
        assert clock.now - start == pytest.approx(pause, abs=0.01)


@either
async def test_who_waits_holds_nothing(kind: Kind, signals: Signals, clock: Passing) -> None:
    """Over requests, prompt and answer a call waits for the longest, and is charged once, then."""
    store = MemoryStore(clock=clock)
    requests = ModelCallLimit(quotas=[MINUTE], wait=DAY, run_limit=3)
    prompts = TokenLimit(tokens="input", quotas=[MINUTE], wait=DAY, reserve=20)
    answers = TokenLimit(tokens="output", quotas=[MINUTE], wait=DAY, reserve=60)
    limits: list[Any] = [requests, prompts, answers]
    report: Any = {"input_tokens": 30, "output_tokens": 50}
    scene = Scene(signals, lambda _: answer(80, **report), limits, kind=kind, store=store)
    await scene.play()
    output = "model.output_tokens:global::60~60"
    first = counts(store)
    assert first == {REQUESTS: 1, "model.input_tokens:global::60~60": 30, output: 50}
    clock.may.clear()
    start = clock.now
    run = asyncio.create_task(scene.play())
    await waits(signals, 1, "output_tokens")
    assert counts(store) == first
    clock.may.set()
    await run
    # 50 were used and 60 are reserved: until then the other counts have drained.
    assert clock.now - start == pytest.approx(50, abs=0.1)
    assert counts(store) == {REQUESTS: 1, "model.input_tokens:global::60~60": 30, output: 50}
    (decision,) = scene.decisions
    assert [each.limit for each in decision.limits] == ["model", "input_tokens", "output_tokens"]
    assert decision.waited > 0
    assert scene.usage().model == 2


@pytest.mark.parametrize("order", ["outside", "inside", "fallback", "charges all"])
async def test_beside_retries(order: str, signals: Signals, clock: Passing) -> None:
    """A call that is tried again waits for its turn once, and is charged once for what it used."""
    store, tries = MemoryStore(clock=clock), count()

    def script(_: Sequence[Any]) -> AIMessage:
        clock.now += 5
        if next(tries) == 1:
            raise ProviderError
        return answer(40)

    requests = ModelCallLimit(quotas=[Quota(9, per="global", window="1h")], wait=DAY)
    limits = [requests, limit(50)]
    model = ScriptedChatModel(script=script)
    beside = ModelFallbackMiddleware(model) if order == "fallback" else RETRY
    items: list[Any] = [*limits, beside] if order == "inside" else [beside, *limits]
    charges_all = order == "charges all"
    scene = await Scene(signals, model, items, store=store, charge_all_models=charges_all).played()
    start = clock.now
    await scene.play()
    # 35 of the first 40 have not drained: it waits for room for 50, and tries twice for 5 seconds.
    assert clock.now - start == pytest.approx(25 + 10, abs=0.1)
    tokens = store.peek([KEY])[0]
    assert isinstance(tokens, QuotaUsage)
    # The first call's last tokens drain, and those of the second one begin to.
    assert 30 <= tokens.used <= 45
    assert [each.used for each in store.usages("model:global:*")] == [2]


class TestRateLimiter:
    """The rate limiter of chat models, without an agent."""

    @pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
    async def test_tokens(self, way: str, clock: Passing) -> None:
        """A call waits for its reserve and a request, and is charged its use, however late."""
        store, takes = MemoryStore(clock=clock), [0] * 6 + [61]
        limiter = store.rate_limiter("openai", requests=60, tokens=60, window="1m", reserve=30)

        def script(_: Any) -> AIMessage:
            clock.now += takes.pop(0)
            return answer(20 if takes else 70)

        given: Any = {"rate_limiter": limiter, "callbacks": [limiter], "cache": False}
        model, used, start = ScriptedChatModel(script=script, **given), [], clock.now
        while takes:
            if way == "invoke":
                await asyncio.to_thread(model.invoke, "Hi!")
            elif way == "stream":
                await asyncio.to_thread(lambda: [*model.stream("Hi!")])
            elif way == "ainvoke":
                await model.ainvoke("Hi!")
            else:
                _ = [each async for each in model.astream("Hi!")]
            used.append(counts(store)["model.total_tokens:rate_limiter:openai:60~60"])
        assert used == [20, 39, 50, 50, 50, 50, 40]
        assert clock.now - start == pytest.approx(7 * 20 - 60 + 10 + 61, abs=0.1)

    async def test_many_calls_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each of many tasks is settled by its own use, which several answers report together."""

        class Twice(ScriptedChatModel):
            """A model with two answers to each prompt, as `ChatOpenAI(n=2)`."""

            def _generate(self, *args: Any, **options: Any) -> ChatResult:
                result = super()._generate(*args, **options)
                return ChatResult(generations=result.generations * 2)

        store = MemoryStore(clock=Clock())
        limiter = store.rate_limiter("openai", tokens=90_000, window="1m", reserve=50)
        model = Twice(
            script=lambda messages: answer(int(messages[0].content)),
            rate_limiter=limiter,
            callbacks=[limiter],
        )
        await model.ainvoke("7")
        await asyncio.gather(*(model.ainvoke(str(each)) for each in range(1, 100)))
        await model.agenerate([[HumanMessage("3")], [HumanMessage("4")]])
        key = "model.total_tokens:rate_limiter:openai:60~90000"
        assert counts(store) == {key: 7 + sum(range(100)) + 7}
        cached = model.model_copy(update={"cache": InMemoryCache()})
        for _ in range(3):
            await cached.ainvoke("11")
        assert counts(store) == {key: 7 + sum(range(100)) + 7 + 11}

    async def test_what_fails_is_charged_its_reserve(self) -> None:
        """So is a call whose model reports nothing; an outage after a call keeps its answer."""
        store = FickleStore(MemoryStore(clock=Clock()))
        make: Any = MemoryStore.rate_limiter
        limiter = make(store, "openai", tokens=900, window="1m")
        given: Any = {"rate_limiter": limiter, "callbacks": [limiter]}
        silent = ScriptedChatModel(script=["Hello.", ProviderError()], **given)
        await silent.ainvoke("x" * 40)
        with pytest.raises(ProviderError):
            await silent.ainvoke("x" * 40)
        ((key, both),) = counts(store).items()
        reserved = both // 2
        assert 10 <= reserved <= 20

        def fail(_: Any) -> AIMessage:
            store.down = True
            return answer(500)

        model = ScriptedChatModel(script=fail, **given)
        assert (await model.ainvoke("Hi!")).text == "Hello."
        store.down = False
        # The next request that settles takes it along.
        await ScriptedChatModel(script=using(7), **given).ainvoke("Hi!")
        assert counts(store) == {key: 2 * reserved + 500 + 7}

    async def test_a_cancelled_call_is_not_counted(self) -> None:
        """If the store has heard of it, the next request takes back what it was charged."""
        store, make = SlowStore(MemoryStore(clock=Clock()), heard=True), MemoryStore.rate_limiter
        limiter = cast("Any", make)(store, "openai", requests=9, burst=9, window="1h")
        first = asyncio.create_task(limiter.aacquire())
        await store.reached.wait()
        first.cancel()
        await asyncio.wait([first])
        assert await limiter.aacquire()
        assert [usage.used for usage in store.usages()] == [1]

    @pytest.mark.parametrize(("way", "reserve", "each"), [("invoke", 1, 1), ("ainvoke", 20, 2)])
    async def test_a_provider_that_refuses(
        self, way: str, reserve: int, each: int, clock: Passing
    ) -> None:
        """After an error 429 no call begins before the time it names; then they come evenly."""
        made: Any = MemoryStore(clock=clock).rate_limiter
        limiter = made("openai", requests=60, burst=9, tokens=600, reserve=reserve, window="1m")
        script, times = [Refused(retry_after="30"), "a", "b"], []
        model = ScriptedChatModel(script=script, rate_limiter=limiter, callbacks=[limiter])
        for _ in script:
            with suppress(Refused):
                _ = model.invoke("Hi!") if way == "invoke" else await model.ainvoke("Hi!")
            times.append(clock.now)
        due = [times[0] + 30 + number * each for number in (1, 2)]
        assert times[1:] == pytest.approx(due, abs=0.01)

    def test_mistakes(self) -> None:
        """Each is one line: no limit, too large a reserve, and tokens that nobody told."""
        make = partial(MemoryStore().rate_limiter, "openai", window="1m")
        for said, options in (
            ("give the limiter requests=, tokens=, or both", {}),
            ("reserve is 9 tokens, and limiter 'openai' never has", {"tokens": 5, "reserve": 9}),
            ("reserve must be 1 or more", {"tokens": 5, "reserve": 0}),
            ("burst must be at most the limit, 5, not 6", {"requests": 5, "burst": 6}),
            ("tokens must be 1 or more", {"tokens": 0}),
        ):
            given: Any = options
            with pytest.raises(ValueError, match=said):
                make(**given)
        limiter = make(tokens=5)
        with pytest.raises(RuntimeError, match=r"rate_limiter=limiter and callbacks=\[limiter\]"):
            ScriptedChatModel(script=["Hello."], rate_limiter=limiter).invoke("Hi!")
        model = ScriptedChatModel(script=["Hello."], rate_limiter=limiter, callbacks=[limiter])
        with pytest.raises(ValueError, match="limiter 'openai' never has more than 5 together"):
            model.invoke("x" * 100)


HOUR: dict[str, Any] = {"per": "global", "window": "1h", "smooth": True}
ASKED: Any = {"messages": [("user", "Hi!")]}


class Slow(ScriptedChatModel):
    """Answers after a while."""

    async def _agenerate(self, *args: Any, **options: Any) -> ChatResult:
        await asyncio.sleep(0.05)
        return super()._generate(*args, **options)

    def _generate(self, *args: Any, **options: Any) -> ChatResult:
        time.sleep(0.05)
        return super()._generate(*args, **options)


@pytest.mark.parametrize("limited_by", ["a limit", "a rate limiter", "reservations"])
@both_forms
async def test_waiting_calls_see_what_others_give_back(
    signals: Signals, form: Form, limited_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends wakes the next one: nobody waits for the rate, or asks again and again."""
    for module in ("features.waiting", "agents.rate_limiter"):
        monkeypatch.setattr(f"langchain_quota.{module}.LOOKS_AGAIN", 60.0)
    store, options = FickleStore(MemoryStore()), dict[str, Any](script=lambda _: answer(10))
    limits: list[Limit] = [TokenLimit(quotas=[Quota(1_000, **HOUR)], reserve=900, wait="1h")]
    if limited_by != "a limit":
        reserve, reservations = (900, 9) if limited_by == "a rate limiter" else (1, 1)
        monkeypatch.setattr("langchain_quota.stores.counts.MAX_HELD", reservations)
        make: Any = MemoryStore.rate_limiter
        limiter = make(store, "openai", tokens=1_000, window="1h", reserve=reserve)
        options |= {"rate_limiter": limiter, "callbacks": [limiter]}
        limits = []
    agent = Scene(signals, Slow(**options), limits, store=store, checkpointer=None).agent

    def run(_: int) -> Any:
        return agent.ainvoke(ASKED) if form == "async" else asyncio.to_thread(agent.invoke, ASKED)

    async with asyncio.timeout(50):
        await asyncio.gather(*map(run, range(5)))
    assert sum(counts(store).values()) <= 50
    assert len(store.asked) <= 30
