"""What a scrape shows of threads, users and other subjects, in which order, and for how long."""

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from langchain_quota import (
    ConcurrencyLimit,
    MemoryStore,
    Quota,
    QuotaWarning,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
    hmac_label,
)
from langchain_quota.limits import Limit
from tests.scene import Scene, searching, tool_limiter, waiting_tool
from tests.stores import Clock, FickleStore
from tests.telemetry import Signals, paid, telling

USED = "langchain_quota_thread_used"
LIMIT = "langchain_quota_thread_limit"
BLOCKED = "langchain_quota_thread_blocked_total"
TIMES = "langchain_quota_thread_timestamp_seconds"
SUBJECT_USED = "langchain_quota_subject_used"
SUBJECT_BLOCKED = "langchain_quota_subject_blocked_total"
HOUR = timedelta(hours=1)
PER_USER = ToolCallLimit("search", quotas=[Quota(10, per="user_id", window=HOUR)])


@pytest.fixture
def signals(clock: Clock) -> Signals:
    assert clock.now
    return telling()


class Searcher:
    """An agent that searches as often as it is told, at a time that the test sets."""

    def __init__(self, signals: Signals, *limits: Limit, **options: Any) -> None:
        options = {"name": "boss", **options}
        self.scene = Scene(signals, searching, limits, **options)

    async def search(self, thread: str, count: int, user: str = "ada") -> None:
        context = {"user_id": user, "tenant": user}
        await self.scene.play(str(count), thread_id=thread, context=context)


def of_limit(signals: Signals, name: str, **labels: str) -> dict[str, float]:
    """The values of a metric of one agent's limit, by thread, in their order."""
    found = signals.samples(name, agent="boss", limit="tool:search", **labels)
    return {thread: value for (thread, *_), value in found.items()}


def states(signals: Signals, limit: str = "tool:search", scope: str = "thread") -> dict[str, float]:
    """How many subjects are in which state, without those that nobody is in."""
    found = signals.samples("langchain_quota_subjects", agent="boss", limit=limit, scope=scope)
    return {state: value for (state, _), value in found.items() if value}


async def test_a_thread(signals: Signals, clock: Clock) -> None:
    """A thread has what it used of each limit, and when; and its refusals, at any scope."""
    assert signals.samples("langchain_quota_start_time_seconds") == {(): clock.now}
    every = ToolCallLimit(run_limit=12, thread_limit=50)
    agent = Searcher(signals, ToolCallLimit("search", thread_limit=10), every)
    clock.now += 10
    await agent.search("t1", 9)
    first = clock.now
    assert of_limit(signals, TIMES, event="refusal") == {}
    clock.now += 10
    await agent.search("t1", 3)
    assert signals.samples(USED, agent="boss") == {("tool:search", "t1"): 10, ("tool:*", "t1"): 10}
    assert signals.samples(LIMIT, limit="tool:search") == {("boss", "t1"): 10}
    assert signals.samples(BLOCKED) == {("boss", "tool:search", "t1", "thread"): 2}
    assert set(signals.samples(TIMES, event="decision").values()) == {first + 10}
    assert (states(signals), states(signals, "tool:*")) == ({"exhausted": 1}, {"ok": 1})
    assert signals.samples("langchain_quota_start_time_seconds") == {(): first - 10}
    clock.now += 10
    await agent.search("t1", 0)
    assert of_limit(signals, TIMES, event="refusal", scope="thread") == {"t1": first + 10}


@pytest.mark.parametrize("shown", [0, 3, 6])
async def test_the_order(shown: int, clock: Clock) -> None:
    """Those blocked now by last refusal, the near by share, then the others; the rest is hidden."""
    signals = telling(max_exported_threads=shown)
    limits = [ToolCallLimit(tool, thread_limit=10) for tool in ("search", "calc")]
    agent = Searcher(signals, *limits)
    for thread, count in (
        *(("refused last", 10), ("older", 1), ("near, most", 9), ("refused first", 11)),
        *(("near, least", 8), ("newer", 2), ("refused last", 1)),
    ):
        clock.now += 1
        await agent.search(thread, count)
    order = ["refused last", "refused first", "near, most", "near, least", "newer", "older"]
    assert [*of_limit(signals, TIMES, event="decision")] == order[:shown]
    seen = {"exhausted": min(2, shown), "near": min(2, max(0, shown - 2)), "ok": max(0, shown - 4)}
    assert signals.samples("langchain_quota_subjects", limit="tool:search", scope="thread") == {
        ("boss", state, is_shown): count if is_shown == "true" else 2 - count
        for state, count in seen.items()
        for is_shown in ("true", "false")
    }


async def test_series_stay_for_a_while(clock: Clock) -> None:
    """For 15 minutes; an hour of new threads makes few of them, and who is blocked finds room."""
    signals, seen = telling(max_exported_threads=10), list[set[str]]()
    agent = Searcher(signals, ToolCallLimit("search", thread_limit=10))
    for minutes in range(0, 60, 2):
        clock.now += 120
        for number in range(4):
            await agent.search(f"{minutes}/{number}", 1)
        seen.append({*of_limit(signals, USED)})
    for n in range(1, 30):
        assert all(seen[n] - seen[n - 1] <= each for each in seen[n : n + 8])
    blocked = {"x", "y"}
    for thread in blocked:
        await agent.search(thread, 11)
    seen.append({*of_limit(signals, USED)})
    assert blocked <= seen[-1]
    assert max(map(len, seen)) <= 10
    assert 20 <= len(set.union(*seen)) <= 30
    # No scrape is much larger than the last one.
    signals = telling(max_exported_threads=60)
    agent = Searcher(signals, ToolCallLimit("search", thread_limit=10))
    for number in range(60):
        await agent.search(str(number), 1)
    assert [len(of_limit(signals, USED)) for _ in range(3)] == [50, 60, 60]


@pytest.mark.parametrize("window", [HOUR, "hour"], ids=str)
async def test_the_highest_share_is_shown(window: Any, signals: Signals, clock: Clock) -> None:
    """Of a thread limit and quotas per thread; a window's end is shown, and behind it a 0."""
    quotas = [Quota(5, per="thread", window=window, name="hourly")]
    limit = ToolCallLimit("search", thread_limit=10, quotas=quotas)
    agent = Searcher(signals, limit, store=MemoryStore(clock=clock))
    await agent.search("t1", 4)
    assert (of_limit(signals, USED), of_limit(signals, LIMIT)) == ({"t1": 4}, {"t1": 5})
    assert of_limit(signals, TIMES, event="reset") == {"t1": 3_603_600}
    assert states(signals) == {"near": 1}
    clock.now += 3600
    assert (of_limit(signals, USED), of_limit(signals, LIMIT)) == ({"t1": 4}, {"t1": 10})
    assert (of_limit(signals, TIMES, event="reset"), states(signals)) == ({}, {"ok": 1})
    await agent.search("t1", 4)
    assert (of_limit(signals, USED), of_limit(signals, LIMIT)) == ({"t1": 8}, {"t1": 10})


async def test_what_all_share(signals: Signals, clock: Clock) -> None:
    """What an agent, or all, have used of a quota has series, until the window ends."""
    quotas = [Quota(10, per="global", window=HOUR, name="company"), Quota(5, per="agent")]
    limit = ToolCallLimit("search", quotas=quotas)
    await Searcher(signals, limit, store=MemoryStore(clock=clock)).search("t1", 3)
    company, agent = ("company", ""), ("agent", "")
    shown = {
        name: signals.samples(f"langchain_quota_subject_{name}", agent="boss", limit="tool:search")
        for name in ("used", "limit", "timestamp_seconds")
    }
    assert shown == {
        "used": {company: 3, agent: 3},
        "limit": {company: 10, agent: 5},
        "timestamp_seconds": {
            (*company, "reset"): 3_603_600,
            (*company, "decision"): clock.now,
            (*agent, "decision"): clock.now,
        },
    }
    clock.now += 3599
    assert len(signals.samples(SUBJECT_USED, agent="boss", limit="tool:search")) == 2
    clock.now += 1
    assert signals.samples(SUBJECT_USED, agent="boss", limit="tool:search") == {agent: 3}


async def test_no_subject_is_ahead(signals: Signals) -> None:
    """A scrape has no refusal of a subject that the limit's counter in it does not have."""
    limit = ToolCallLimit("search", quotas=[Quota(0, per="agent")])
    agent, refused = Searcher(signals, limit, store=MemoryStore()), Counter[str]()
    await agent.search("t1", 1)
    for family in signals.registry.collect():
        for sample in family.samples:
            refused[sample.name] += int(sample.value) * (sample.labels.get("scope") == "agent")
        await agent.search("t1", 1)
    assert 1 <= refused[SUBJECT_BLOCKED] <= refused["langchain_quota_limit_decisions_total"]


async def test_users_with_labels(clock: Clock) -> None:
    """The near come first, then the exhausted; two users with one label have one series."""
    for uses, used, refused in (
        ({"ok": 1, "near": 8, "full": 10, "next": 9, "nearby": 8}, {"nex": 9, "nea": 8}, {}),
        ({"hidden": 13, "ada": 11, "adam": 12, "bob": 11}, None, {"ada": 3, "bob": 1}),
    ):
        signals = telling(subject_label={"user_id": lambda user: user[:3]}, max_exported_subjects=3)
        agent = Searcher(signals, PER_USER, store=MemoryStore(clock=clock))
        for user, count in uses.items():
            clock.now += 1
            await agent.search(f"of {user}", count, user)
        of: Any = {"agent": "boss", "limit": "tool:search", "scope": "user_id"}
        if used is not None:
            assert signals.samples(SUBJECT_USED, **of) == {(user,): n for user, n in used.items()}
        by = {key[-2:] for key in signals.samples(TIMES, event="refusal")}
        assert by == {("user_id", user[:3]) for user, count in uses.items() if count > 10}
        assert signals.samples(SUBJECT_BLOCKED, **of) == {(user,): n for user, n in refused.items()}
        decisions = signals.samples("langchain_quota_limit_decisions_total", decision="blocked")
        every = sum(max(0, count - 10) for count in uses.values())
        assert decisions.get(("boss", "tool:search", "user_id"), 0) == every


async def test_what_a_thread_has_spent_begins_at_0(signals: Signals) -> None:
    """The series is there when the first call is checked, so `increase()` sees what it costs."""
    seen = []

    def script(_: object) -> Any:
        seen.append(signals.samples("langchain_quota_thread_spent_tokens_total"))
        return paid(300)

    await Scene(signals, script, [TokenLimit(thread_limit=900)]).play()
    assert seen == [{("unnamed", "tokens", "thread-1"): 0}]
    used = signals.samples("langchain_quota_thread_used_tokens")
    assert used == {("unnamed", "tokens", "thread-1"): 300}


async def test_a_budget_in_an_outage(clock: Clock) -> None:
    """While the store is lost, what was known of a customer's budget is shown, and not 0."""
    signals, store = telling(subject_label={"tenant": str}), FickleStore(MemoryStore(clock=clock))
    limit = TokenLimit(run_limit=900, quotas=[Quota(1000, per="tenant")])
    options: Any = {"store": store, "on_store_error": "allow", "context": {"tenant": "acme"}}
    scene = Scene(signals, [paid(300), paid(20)], [limit], **options)
    for store.down in (False, True):
        await scene.play()
        assert [*signals.samples("langchain_quota_subject_used_tokens").values()] == [300]


@pytest.mark.parametrize("given", [{"thread_limit": 9}, {"run_limit": 9}, {}], ids=str)
async def test_a_thread_in_an_outage(given: Any, signals: Signals, clock: Clock) -> None:
    """While the store is lost, what was known of a thread is shown, and not 0."""
    store = FickleStore(MemoryStore(clock=clock))
    quotas = [Quota(10, per="thread", window=HOUR, name="hourly")]
    for outage in ("allow", "block"):
        options: Any = {"store": store, "on_store_error": outage}
        agent = Searcher(signals, ToolCallLimit("search", quotas=quotas, **given), **options)
        store.down = False
        await agent.search(outage, 4)
        store.down = True
        await agent.search(outage, 1)
        # With "allow", the state counts what runs in the thread.
        ran = 5 if "thread_limit" in given and outage == "allow" else 4
        assert of_limit(signals, USED)[outage] == ran


async def test_a_refund(signals: Signals) -> None:
    """What a thread is given back, for a call that did not run, is shown as not used."""
    limits: list[Limit] = [ToolCallLimit("search", thread_limit=9)]
    limits.append(ConcurrencyLimit("search", max_concurrency=1, wait=0))
    tool, busy, gone = waiting_tool()
    agent = Searcher(signals, *limits, tools=[tool], store=MemoryStore())
    running = asyncio.create_task(agent.search("t1", 1))
    await busy.wait()
    await agent.search("t2", 2)
    assert of_limit(signals, USED) == {"t1": 1, "t2": 0}
    gone.set()
    await running


async def test_a_refund_in_the_next_run(signals: Signals) -> None:
    """What was charged for a call that an error stopped is then shown as not used."""
    stops = tool_limiter(signals, run_limit=0, exit_behavior="error", limit_name="stops")
    limiters = [stops, tool_limiter(signals, "search", thread_limit=1)]
    scene = Scene(signals, [["search"], "done"], limiters, name="boss")
    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    assert states(signals) == {"exhausted": 1}
    await scene.play()
    assert states(signals) == {"ok": 1}


async def test_two_scrapes_at_once(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is counted once, in a scrape during which it has a call, and another scrape."""
    agent, pauses = Searcher(signals, ToolCallLimit("search", thread_limit=9)), iter("123!")
    for thread in ("older", "newer"):
        await agent.search(thread, 1)

    def pause(_: float) -> None:
        # Both threads have been read, and one is rated.
        if next(pauses, "") == "!":
            asyncio.run(agent.search("newer", 8))
            signals.samples("langchain_quota_subjects")

    monkeypatch.setattr("langchain_quota.telemetry.workers.SLICE", 1)
    monkeypatch.setattr("langchain_quota.telemetry.workers.time.sleep", pause)
    counts = await asyncio.to_thread(signals.samples, "langchain_quota_subjects")
    assert (sum(counts.values()), min(counts.values()), next(pauses, "")) == (2, 0, "")


async def test_the_idle_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time to live; the counts of their limits stay, at 0, and refusals begin anew.

    Of too many threads, those without a call for longest are. A label of no quota is a warning.
    """
    signals = telling(thread_ttl=HOUR * 2, subject_label={"tenat": str, "user_id": str})
    limits = [ToolCallLimit("search", thread_limit=10, quotas=[Quota(10, per="user_id")])]
    agent = Searcher(signals, *limits, store=MemoryStore(clock=clock))
    with pytest.warns(QuotaWarning, match="'tenat', and no quota has this name.* 'user_id'"):
        await agent.search("idle", 11, "ada")
    clock.now += 3600
    await agent.search("busy", 9, "bob")
    clock.now += 3600
    assert [*of_limit(signals, TIMES, event="decision")] == ["busy", "idle"]
    clock.now += 1
    assert [*of_limit(signals, TIMES, event="decision")] == ["busy"]
    assert states(signals) == states(signals, scope="user_id") == {"near": 1}
    clock.now += 7200
    assert [*signals.samples("langchain_quota_subjects").values()] == [0] * 12
    await agent.search("busy", 1, "bob")
    assert of_limit(signals, BLOCKED) == {}
    assert [key[-1] for key in signals.samples(SUBJECT_USED)] == ["bob"]
    monkeypatch.setattr("langchain_quota.telemetry.usage.MAX_TRACKED", 3)
    agent = Searcher(signals, ToolCallLimit("search", thread_limit=10))
    for thread in ("t1", "t2", "t3", "t1", "t4", "t5", "t5"):
        await agent.search(thread, 1)
    assert {*of_limit(signals, USED)} == {"t1", "t4", "t5"}


async def test_a_reset(clock: Clock) -> None:
    """The thread has used nothing from now on; its refusals stay counted, others as they are."""
    label = hmac_label("0123456789abcdef")
    signals = telling(thread_label=label)
    agent = Searcher(signals, ToolCallLimit("search", thread_limit=10))
    for thread in ("t1", "t2"):
        await agent.search(thread, 11)
    clock.now += 1
    agent.scene.thread_id = "t1"
    for _ in range(2):
        await agent.scene.reset()
    assert of_limit(signals, USED) == {label("t2"): 10, label("t1"): 0}
    assert of_limit(signals, TIMES, event="decision")[label("t1")] == clock.now
    assert of_limit(signals, BLOCKED) == {label("t1"): 1, label("t2"): 1}
    assert states(signals) == {"ok": 1, "exhausted": 1}
    await agent.search("t1", 1)
    assert of_limit(signals, USED)[label("t1")] == 1
