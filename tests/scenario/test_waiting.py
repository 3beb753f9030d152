"""Calls that wait for room in a quota: in order, evenly, and not for too long."""

import asyncio
import gc
import re
import threading
import time
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    RedisStore,
    RepeatLimit,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.limits import Limit
from langchain_quota.testing import captured_decisions
from tests import scene as scenes
from tests.scene import PATIENCE, Form, Kind, Scene, asking, both_forms, recording, texts, until
from tests.stores import DAY, NOON, Clock, FickleStore, Passing, patch_pauses
from tests.telemetry import Signals, attributes, paid

WHO: ContextVar[int] = ContextVar("who")
APPROVE = {"decisions": [{"type": "approve"}]}
HOURLY = Quota(1, per="global", window="1h", smooth=True)
GAUGE, WAITS = "langchain_quota_waiting_calls", "langchain_quota_wait_seconds_count"
SEARCH = {"agent": "unnamed", "limit": "tool:search"}
DECISIONS = ("allowed", "blocked", "would_block", "cancelled")


class Noting(MemoryStore):
    """A store that notes whose calls it admits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.admitted: list[int] = []
        self.asked = 0
        self.refused = threading.Semaphore(0)

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        result = super().acquire(request)
        # A request that only settles has no calls.
        if request.demands and any(
            ":global:" in str(each.key) for each in request.counters.values()
        ):
            self.asked += 1
            if result.stopped or not all(result.admitted):
                self.refused.release()
            else:
                self.admitted.append(WHO.get(0))
        return result


class Stepped(Clock):
    """A clock that a test moves, and on which calls wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        patch_pauses(patch, self.wait)

    async def wait(self, form: str, seconds: float) -> None:
        target = self.now + seconds
        while self.now < target:
            await asyncio.sleep(0.001) if form else time.sleep(0.001)  # noqa: ASYNC251 - in the sync form


def waits(number: int, signals: Signals) -> bool:
    """Whether so many calls wait now."""
    return signals.value(GAUGE, **SEARCH) == number


@pytest.mark.parametrize("kind", ["tool", "model", "tokens"])
@both_forms
async def test_first_come_first_served(
    form: Form, kind: str, signals: Signals, clock: Passing
) -> None:
    """The calls of a process, in threads or tasks, are admitted in the order of their arrival."""
    clock.may.clear()
    store = Noting(clock=clock)
    slow = Quota(1, per="global", window="5s", smooth=True)
    limited: Any = {"quotas": [slow], "wait": DAY, "name": "tool:search"}
    tool, model = ToolCallLimit("search", **limited), ModelCallLimit(**limited)
    limit: Any = {"tool": tool, "model": model, "tokens": TokenLimit(reserve=1, **limited)}[kind]
    script = asking("search") if kind == "tool" else lambda _: paid(1)
    agent = Scene(signals, script, [limit], form=form, store=store).agent
    runs: list[Any] = []
    for who in range(5):
        WHO.set(who)
        given: Any = {"messages": [("user", "hi")]}, {"configurable": {"thread_id": str(who)}}
        run = agent.ainvoke(*given) if form == "async" else asyncio.to_thread(agent.invoke, *given)
        runs.append(asyncio.create_task(run))
        await until(lambda: store.admitted)
        await until(partial(waits, who, signals))
    clock.may.set()
    await asyncio.gather(*runs)
    assert store.admitted == [*range(5)]


@pytest.mark.parametrize(
    ("kind", "most", "runs", "used"),
    [
        (ModelCallLimit, 4, 5, [4, 4, 2]),
        (partial(ToolCallLimit, "search"), 1, 2, [1, 1]),
        (TokenLimit, 10, 2, [10, 10]),
        (partial(TokenLimit, reserve=10), 14, 2, [5] * 4),
    ],
)
async def test_a_window_ends(
    kind: Any, most: int, runs: int, *, used: Any, signals: Signals, clock: Passing
) -> None:
    """A call waits until a fixed window ends, and is counted in the next one."""
    store = MemoryStore(clock=clock)
    limit = kind(quotas=[Quota(most, per="global", window="1s")], wait=PATIENCE)
    script = [paid(5, "search"), paid(5)] * runs
    scene = Scene(signals, script, [limit], store=store, hide_exhausted=True)
    for _ in range(runs):
        await scene.play()
        assert scene.last_text() == "done"
    assert [each.used for each in store.usages("*:global:*") if each.used] == used


async def test_what_metrics_say_of_waits_and_rates(signals: Signals) -> None:
    """Each call of a message counts once; an outage has no waits; a rate has its unit."""
    quota = Quota(2, per="global", window="1h", smooth=True, burst=2)
    limit = ToolCallLimit("search", quotas=[quota], wait=PATIENCE)
    gone = RedisStore("redis://:secret@127.0.0.1:1/0")
    for name, store in (("now", MemoryStore()), ("gone", gone)):
        options: Any = {"store": store, "on_store_error": "block", "name": name}
        await Scene(signals, asking(*["search"] * 3), [limit], **options).play()
    waits = signals.samples(WAITS, limit="tool:search")
    assert waits == {("now", end): n for end, n in zip(DECISIONS, (2, 1, 0, 0), strict=True)}
    lost = signals.samples("langchain_quota_store_fallbacks_total", agent="gone", action="block")
    assert lost == {("redis 127.0.0.1:1",): 3}
    rates = signals.samples("langchain_quota_limit", limit="tool:search", scope="global")
    assert rates[("now", "calls per hour")] == 2
    fast = Quota(24_000_000, per="global", window="1m", smooth=True)
    await Scene(signals, "x", [TokenLimit(quotas=[fast])], store=MemoryStore(), name="x").play()
    rates = signals.samples("langchain_quota_limit", limit="tokens", scope="global")
    assert rates == {("x", "tokens per minute"): 24_000_000}


@both_forms
async def test_whose_turn_does_not_come(form: Form, signals: Signals) -> None:
    """Behind others its time can end, too, but once; a model call ends as its limit says."""
    store, asks = Noting(), ToolCallLimit(run_limit=1, exit_behavior="ask")
    patient = ModelCallLimit(quotas=[HOURLY], wait=2 * 3600)
    hasty = ModelCallLimit(quotas=[HOURLY], wait=0.05, exit_behavior="error")
    cases: Any = ("first", [patient]), ("last", [hasty, asks])
    first, last = (
        Scene(signals, lambda _: "done", limits, form=form, store=store, thread_id=name)
        for name, limits in cases
    )
    await first.play()
    waits = threading.Thread(target=lambda: asyncio.run(first.play()), daemon=True)
    waits.start()
    assert await asyncio.to_thread(store.refused.acquire, timeout=PATIENCE)
    with pytest.raises(ModelCallLimitExceededError, match="resets at"):
        await last.play()
    blocked = signals.value(WAITS, agent="unnamed", limit="model", decision="blocked")
    assert (signals.value(GAUGE, agent="unnamed", limit="model"), blocked) == (1, 1)
    store.reset([each.key for each in store.usages()])
    await asyncio.to_thread(waits.join, PATIENCE)
    assert first.last_text() == "done"


# LangGraph cannot end its own tasks in a loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_whose_event_loop_is_closed(signals: Signals, clock: Passing) -> None:
    """A call that can never go on leaves the line when its turn comes."""
    clock.may.clear()
    slow, store = Quota(1, per="global", window="5s", smooth=True), Noting(clock=clock)
    limit = ToolCallLimit("search", quotas=[slow], wait=DAY)
    first, second, abandoned, last = (
        Scene(signals, asking("search"), [limit], store=store, thread_id=str(each)).play()
        for each in range(4)
    )
    await first
    loop, runs = asyncio.new_event_loop(), [asyncio.create_task(second)]
    loop.set_exception_handler(lambda *_: None)  # it tells of the task that is destroyed
    await until(partial(waits, 1, signals))
    kept = loop.create_task(abandoned)
    await asyncio.to_thread(loop.run_until_complete, until(partial(waits, 2, signals)))
    loop.close()
    runs.append(asyncio.create_task(last))
    await until(partial(waits, 3, signals))
    clock.may.set()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*runs)
    del kept, abandoned, loop
    gc.collect()


async def test_who_waits_keeps_no_other_user_waiting(signals: Signals, clock: Passing) -> None:
    """20 users do not wait behind one whose own quota has no room; hers keeps its order.

    A call that is cancelled leaves the line, and nothing is charged. All is visible.
    """
    clock.may.clear()
    store = Noting(clock=clock)
    shared = Quota(100, per="global", window="1s", smooth=True, burst=30)
    own = Quota(1, per="user", window="8s", smooth=True)
    limit = ToolCallLimit("search", quotas=[shared, own], wait=DAY)
    agent = Scene(signals, asking("search"), [limit], store=store).agent

    def run(user: str, thread: object) -> asyncio.Task[Any]:
        given: Any = {"messages": [("user", user)]}, {"configurable": {"thread_id": str(thread)}}
        return asyncio.create_task(agent.ainvoke(*given, context={"user": user}))

    with captured_decisions() as decisions:
        hers = []
        for who in range(4):
            WHO.set(who)
            hers.append(run("ada", who))
            await until(lambda: store.admitted)
            await until(partial(waits, who, signals))
        WHO.set(9)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(run(str(each), each) for each in range(10, 30)))
        assert waits(3, signals)
        assert {each.waited for each in decisions} == {0.0}
        hers[2].cancel()
        await asyncio.wait(hers[2:3], timeout=PATIENCE)
        clock.may.set()
        await asyncio.wait_for(asyncio.gather(hers[1], hers[3]), PATIENCE)
    assert [who for who in store.admitted if who != 9] == [0, 1, 3]
    assert [signals.value(WAITS, decision=each, **SEARCH) for each in DECISIONS] == [23, 0, 0, 1]
    assert signals.value(GAUGE, **SEARCH) == 0
    events = [each for span in signals.decision_spans() for each in span.events]
    assert [event.name for event in events] == ["langchain_quota.waited"] * 2
    assert all(float(str(dict(each.attributes or {})["seconds"])) > 0 for each in events)


async def test_a_call_without_a_limit_waits_for_nobody(signals: Signals, clock: Passing) -> None:
    """It does not stand behind a call for which the same quota has no room."""
    clock.may.clear()
    quota, store = Quota(lambda _, at: at.context, per="global", window="1h"), Noting(clock=clock)
    limit = ToolCallLimit("search", quotas=[quota], wait=DAY)
    first, last = (
        Scene(signals, asking("search"), [limit], store=store, context=most, thread_id=str(most))
        for most in (1, None)
    )
    await first.play()
    assert waits(0, signals)
    behind = asyncio.create_task(first.play())
    await until(partial(waits, 1, signals))
    await asyncio.wait_for(last.play(), PATIENCE)
    assert (last.ran, behind.cancel()) == (["search"], True)


@pytest.mark.parametrize("early", ["grant", "reset"])
async def test_room_that_comes_early(
    early: str, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a second it is noticed: by the first of those who wait, and nobody else asks."""
    store, pauses = Noting(clock=Clock()), list[float]()
    limit = ToolCallLimit("search", quotas=[Quota(3, per="global", window="1h")], wait=DAY)
    scene = Scene(signals, asking("search"), [limit], store=store)
    for _ in range(3):
        await scene.play()
    key = store.usages("search:global:*")[0].key

    async def wait(_: str, seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)
        if waits(3, signals):
            store.grant(key, 3) if early == "grant" else store.reset([key])

    patch_pauses(monkeypatch, wait)
    scenes = [
        Scene(signals, asking("search"), [limit], store=store, thread_id=str(each))
        for each in range(3)
    ]
    await asyncio.gather(*(each.play() for each in scenes))
    assert max(pauses) <= 1
    assert store.asked == 3 + 3 + len(pauses)


@both_forms
@scenes.each_kind
async def test_the_calls_of_a_message_start_one_after_the_other(
    form: Form, kind: Kind, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are admitted together, and the tools' own clock shows the even rate and the burst."""
    clock, started = Stepped(monkeypatch), list[float]()
    store = Noting(clock=clock)
    quota = Quota(60, per="global", window="1m", smooth=True, burst=2)
    limit = ToolCallLimit("search", quotas=[quota], wait=5)
    search = recording("search", [], lambda: started.append(clock.now - NOON))
    script: Any = asking(*["search"] * 4, "calc")
    options: Any = {"kind": kind, "form": form, "store": store, "tools": [search, "calc"]}
    scene = Scene(signals, script, [limit], **options)
    expected = [0, 0, 1, 2, 3, 4, 5, 6]

    async def twice() -> None:
        await scene.play()
        await scene.play()

    plays = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(twice())))
    for moment in range(7):
        known = sum(each <= moment for each in expected)
        await until(lambda: len(started) >= known)  # noqa: B023 - it is awaited
        clock.now += 1
    await plays
    assert started == expected
    assert scene.ran == ["calc"] * 2
    assert len(store.admitted) == 2


@pytest.mark.parametrize("exits", ["continue", "end", "error"])
async def test_a_start_that_comes_too_late(exits: Any, signals: Signals, clock: Passing) -> None:
    """The limit's exit follows at once, and says when there is room."""
    store = MemoryStore(clock=clock)
    quota = Quota(60, per="global", window="1m", smooth=True)
    limit = ToolCallLimit("search", quotas=[quota], wait=2.5, exit_behavior=exits)
    scene = await Scene(signals, asking("search"), [limit], store=store).played()
    options: Any = {"store": store, "thread_id": "2"}
    scene = Scene(signals, asking(*["search"] * 3, "calc"), [limit], **options)
    room = r"resets at 2026-01-01T12:00:0\dZ"
    if exits == "error":
        with pytest.raises(ToolCallLimitExceededError, match=room):
            await scene.play()
    else:
        assert re.search(room, " ".join(texts(await scene.play())))
    assert signals.value(WAITS, decision="blocked", **SEARCH) == 1
    used = [each.used for each in store.usages("search:global:*")]
    if exits == "continue":
        assert sorted(scene.ran) == ["calc", "search", "search"]
    else:
        assert (scene.ran, used, clock.now) == ([], [1], NOON)


@pytest.mark.parametrize("again", ["here", "in another process"])
@pytest.mark.parametrize("kind", ["quota", "graph"])
async def test_a_cancelled_start(kind: Kind, again: str, signals: Signals, clock: Passing) -> None:
    """It is refunded; resumed, wherever, it is charged again, once. No message names customers."""
    clock.may.clear()
    store = MemoryStore(clock=clock)
    smooth = Quota(60, per="global", window="1m", smooth=True)
    daily = Quota(9, per=lambda *_: "Acme", window="1d", name="daily")
    limit = ToolCallLimit("search", quotas=[smooth, daily], wait=5)
    options: Any = {"kind": kind, "store": store, "checkpointer": InMemorySaver()}
    first, other = (Scene(signals, asking(*["search"] * 3), [limit], **options) for _ in "ab")

    def used() -> list[int]:
        return [each.used for each in store.usages("search:daily:Acme:86400:*")]

    task = asyncio.create_task(first.play())
    await until(lambda: waits(2, signals) and first.ran)
    assert (first.ran, used()) == (["search"], [3])
    task.cancel()
    await asyncio.wait([task])
    assert used() == [1]
    clock.may.set()
    await (first if again == "here" else other).go_on()
    assert len(first.ran + other.ran) >= 3
    assert (used(), "Acme" in repr(first.state()["messages"])) == ([3], False)
    spans = [each for each in signals.decision_spans() if each.events]
    decided = [attributes(each)["decision"] for each in spans]
    assert sorted(decided) == ["allowed"] * 2 + ["cancelled"] * 2
    assert {attributes(each)["gen_ai.conversation.id"] for each in spans} == {"thread-1"}


async def test_the_calls_of_a_message_wait_together(signals: Signals, clock: Passing) -> None:
    """They run when there is room for all; if there never is, they are checked at once."""
    store = MemoryStore(clock=clock)
    quota = Quota(2, per="global", window="1s", smooth=True, burst=2)
    limit = ToolCallLimit("search", quotas=[quota], wait=PATIENCE)
    scene = Scene(signals, asking("search", "search", "calc"), [limit], store=store)
    for waits in (False, True):
        await scene.play()
        tools = [each for each in scene.decisions if each.call.kind == "tool"]
        assert [each.waited > 0 for each in tools] == [waits] * 3
    assert scene.ran.count("search") == 4


async def test_a_call_that_cannot_run_at_all(signals: Signals, clock: Passing) -> None:
    """Nobody waits for room for a call that another limit refuses: the store is not polled."""
    store = Noting(clock=clock)
    smooth = Quota(7, per="global", window="7s", smooth=True)
    daily = Quota(2, per="global", window="1d", name="daily")
    calls = ToolCallLimit(["search", "calc"], quotas=[smooth, daily], wait=2)
    scene = Scene(signals, asking("search", "calc", "search"), [calls, RepeatLimit(1)], store=store)
    await scene.play()
    assert (scene.ran, store.asked) == (["search", "calc"], 2)


async def test_waits_for_models_and_tools(signals: Signals, clock: Passing) -> None:
    """Where both wait, a tool call that another limit refuses is answered, and the others run."""
    quota = Quota(9, per="global", window="1h")
    limited: Any = {"quotas": [quota], "wait": 30}
    models, searches = ModelCallLimit(**limited), ToolCallLimit("search", **limited)
    limits: list[Limit] = [models, searches, ToolCallLimit("calc", run_limit=1)]
    script = asking("search", "calc", "calc")
    scene = await Scene(signals, script, limits, store=MemoryStore(clock=clock)).played()
    assert (scene.ran, scene.last_text()) == (["search", "calc"], "done")


async def test_who_does_not_wait(signals: Signals, clock: Passing) -> None:
    """A dry run; calls that another number refuses, or that are late for one wait; an outage."""
    limited: Any = {"quotas": [HOURLY], "wait": DAY}
    search, hasty = ToolCallLimit("search", **limited), ToolCallLimit(quotas=[HOURLY], wait=1)
    ending = ToolCallLimit("calc", thread_limit=1, exit_behavior="end")
    cases: Any = [
        (3, [ToolCallLimit("search", enforce=False, **limited)]),
        (1, [ToolCallLimit("search", thread_limit=1, **limited)]),
        *((1, [search, each]) for each in (ToolCallLimit(thread_limit=2), ending, hasty)),
        (1, [hasty, search]),
    ]
    for most, limits in cases:
        script = asking("search", "calc")
        scene = Scene(signals, script, limits, store=MemoryStore(clock=clock))
        for _ in range(3):
            await scene.play()
        assert scene.ran.count("search") <= most
        assert clock.now == NOON
    for action, ran in (("block", ["calc"]), ("allow", ["calc", "search"])):
        store = FickleStore(MemoryStore())
        store.down = True
        scene = await Scene(signals, script, [search], store=store, on_store_error=action).played()
        assert sorted(scene.ran) == ran


async def test_a_person_is_asked_after_the_wait(signals: Signals) -> None:
    """A limit that asks first waits; metrics say what has come of the call in the end."""
    quota = Quota(1, per="global", window="1h")
    limit = ToolCallLimit("search", quotas=[quota], wait=0.01, exit_behavior="ask")
    scene = await Scene(signals, asking("search"), [limit], store=MemoryStore()).played()
    assert "__interrupt__" in await scene.play()
    await scene.resume(APPROVE)
    waits = [signals.value(WAITS, decision=each, **SEARCH) for each in DECISIONS]
    assert (len(scene.ran), waits) == (2, [2, 0, 0, 0])


async def test_a_person_is_asked_beside_a_wait(signals: Signals, clock: Passing) -> None:
    """A call waits for room before a person is asked; what is approved starts when it has room."""
    pace = Quota(1, per="global", window="1s", smooth=True)
    options: Any = {"store": MemoryStore(clock=clock)}
    asks = ModelCallLimit(run_limit=1, exit_behavior="ask")
    paced = ModelCallLimit(quotas=[pace], wait=30, name="pace")
    scene = await Scene(signals, [["calc"], "done"], [asks, paced], **options).played()
    await scene.resume(APPROVE)
    assert len(scene.model.calls) == 2
    tools = ToolCallLimit("search", run_limit=1, exit_behavior="ask")
    slow = ToolCallLimit("search", quotas=[pace], wait=30, name="slow")
    scene = await Scene(signals, asking(*["search"] * 3), [tools, slow], **options).played()
    await scene.resume(APPROVE)
    assert scene.ran == ["search"] * 3
    asks = ModelCallLimit(quotas=[Quota(1, per="global", window="1h")], wait=1, exit_behavior="ask")
    tokens = TokenLimit(quotas=[Quota(90, per="global", window="1m")], reserve=9, wait=1)
    scene = Scene(signals, lambda _: paid(5), [asks, tokens], **options)
    await scene.play()
    assert "__interrupt__" in await scene.play()
    await scene.resume(APPROVE)
    assert len(scene.model.calls) == 2
