"""Subjects that operators have frozen: what is blocked, for which reason, and what is not."""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    TokenLimit,
    ToolCallLimit,
    stop_reason,
)
from langchain_quota.errors import ModelCallLimitExceededError, QuotaStoreError
from tests.scene import PATIENCE, Form, Scene, asking, both_forms, texts, until
from tests.stores import Clock
from tests.telemetry import Signals, attributes, telling
from tests.tokens import answer

ACME, BETA = {"tenant": "acme"}, {"tenant": "beta"}
PER_TENANT = [Quota(100, per="tenant", window="1d")]
SEARCH = ToolCallLimit("search", quotas=PER_TENANT)
STOPPED = "The call was not run: an operator has stopped calls like it until further notice."


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def frozen(signals: Signals) -> float | None:
    return signals.value("langchain_quota_frozen_subjects")


def who(signals: Signals) -> dict[tuple[str, ...], float]:
    return signals.samples("langchain_quota_frozen_timestamp_seconds")


class FreezeScene(Scene):
    """An agent that searches once in each run of Acme."""

    def __init__(self, signals: Signals, *limits: Any, script: Any = None, **options: Any) -> None:
        options = {"store": MemoryStore(), "context": ACME, **options}
        super().__init__(signals, script or asking("search"), limits, **options)

    async def reasons(self, **who: Any) -> list[Any]:
        """Run once; why the limits refuse the run's calls."""
        await self.play(**who)
        return [status.reason for decision in self.decisions for status in decision.limits]


@both_forms
@pytest.mark.parametrize("most", [100, None])
async def test_a_tenant_is_frozen(form: Form, most: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its next call is blocked, even without a limit; every signal says why; others run on."""
    signals, quota = telling(subject_label={"tenant": str}), Quota(lambda *_: most, per="tenant")
    scene = FreezeScene(signals, ToolCallLimit("search", quotas=[quota]), form=form)
    caplog.set_level(logging.INFO, "langchain_quota")
    assert (await scene.reasons(), frozen(signals)) == ([None], 0)
    await scene.call("freeze", tenant="acme", reason="chargeback", by="ada")
    assert await scene.reasons() == ["frozen"]
    [status] = scene.decisions[-1].refused_by
    assert (status.refusal_scope, status.scope, status.resets_at) == ("frozen", "tenant", None)
    assert scene.ran == ["search"]
    assert [(use.used, use.limit) for use in scene.quota.kernel.store.store.usages()] == [(1, most)]
    assert scene.result["messages"][-2].text == STOPPED
    reason: Any = stop_reason(scene.result["messages"][-2])
    assert (reason["scope"], reason["subject"], reason["used"]) == ("frozen", "acme", None)
    span = attributes(signals.decision_spans()[-1])
    assert (span["decision"], span["scope"], span["subject"]) == ("blocked", "frozen", "acme")
    assert (status.quotas[0].limit, span.get("tenant.limit")) == (most, most)
    blocked = [scene.metric("tool:search", "blocked", each) for each in ("frozen", "tenant")]
    assert blocked == [1, 0]
    known = {"agent": "unnamed", "limit": "tool:search", "scope": "frozen"}
    assert signals.samples("langchain_quota_thread_blocked_total", **known) == {("thread-1",): 1}
    assert signals.samples("langchain_quota_subject_blocked_total", **known) == {("acme",): 1}
    assert frozen(signals) == 1
    since = scene.quota.kernel.store.store.grants()[0].given_at.timestamp()
    assert who(signals) == {("tenant", "acme", "ada", "since"): pytest.approx(since, abs=0.01)}
    assert await scene.reasons(context=BETA, thread_id="2") == [None]
    assert await scene.call("thaw", tenant="acme", by="bo")
    assert not await scene.call("thaw", tenant="acme")
    assert await scene.reasons(context=ACME) == [None]
    assert (frozen(signals), who(signals)) == (0, {})
    audit = [vars(record) for record in caplog.records if hasattr(record, "quota_grant")]
    for event, by, entry in zip(("frozen", "thawed"), ("ada", "bo"), audit, strict=True):
        told = [entry[f"quota_{name}"] for name in ("event", "key", "by", "reason")]
        assert told == [event, ":tenant:acme", by, "chargeback"]


@pytest.mark.parametrize("between_checks", [False, True])
@pytest.mark.parametrize("exit_behavior", ["end", "finalize", "error"])
async def test_a_model_call_of_a_frozen_subject(
    signals: Signals, exit_behavior: Any, *, between_checks: bool
) -> None:
    """The model is not called, not even for a last answer; the run ends as the limit says."""

    def reserve(_: object) -> int:
        scene.quota.freeze(tenant="acme")
        return 5

    kept: Any = {"keep": 5} if exit_behavior == "finalize" else {}
    limit = TokenLimit(
        quotas=PER_TENANT, reserve=reserve, exit_behavior=exit_behavior, name="t", **kept
    )
    scene = FreezeScene(signals, limit, ModelCallLimit(run_limit=9), script=lambda _: "done")
    if not between_checks:
        scene.quota.freeze()
    if exit_behavior == "error":
        with pytest.raises(ModelCallLimitExceededError, match=STOPPED):
            await scene.play()
    else:
        reason: Any = stop_reason(await scene.play())
        assert STOPPED in scene.last_text()
        assert (reason["scope"], reason["limit"]) == ("frozen", "t")
    assert len(scene.model.calls) == 0
    assert scene.quota.left("t", tenant="acme").used == 0


async def test_a_freeze_ends_by_itself(signals: Signals) -> None:
    """It ends by the store's clock, and a later freeze takes its place; a thread needs no limit."""
    clock, limit = Clock(), ToolCallLimit("search", thread_limit=lambda *_: None)
    scene = FreezeScene(signals, limit, store=MemoryStore(clock=clock))
    for minutes in (1, 2):
        scene.quota.freeze(until=at(clock.now + 60 * minutes))
    clock.now += 119
    assert await scene.reasons() == ["frozen"]
    times = {("all", "", "", "since"): clock.now - 119, ("all", "", "", "until"): clock.now + 1}
    assert who(signals) == times
    clock.now += 1
    assert await scene.reasons() == [None]
    assert frozen(signals) == 0


async def test_a_thaw_is_seen_without_a_list(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is shown as frozen when nobody is, though the list cannot be read."""
    scene = FreezeScene(signals, SEARCH)
    scene.quota.freeze(tenant="acme")
    assert await scene.reasons() == ["frozen"]
    scene.quota.thaw(tenant="acme")
    unread = Mock(side_effect=QuotaStoreError("the list cannot be read"))
    monkeypatch.setattr(MemoryStore, "freezes", unread)
    assert await scene.reasons() == [None]
    assert frozen(signals) == 0


async def test_a_dry_run_and_other_subjects(signals: Signals) -> None:
    """A limit in a dry run would block; a thread that is exhausted, too, is frozen first."""
    trial = ToolCallLimit("search", name="trial", quotas=PER_TENANT, enforce=False)
    calc = ToolCallLimit("calc", thread_limit=0, quotas=PER_TENANT)
    scene = FreezeScene(signals, trial, calc, script=asking("search", "calc"))
    assert await scene.reasons() == [None, "exhausted"]
    scene.quota.freeze(tenant="acme")
    assert await scene.reasons() == ["frozen", "frozen"]
    assert [str(decision.outcome) for decision in scene.decisions] == ["would_block", "blocked"]
    assert scene.ran == ["search"] * 2


async def test_a_dry_run_beside_a_reserve(signals: Signals) -> None:
    """A model call that is checked twice is shown with the reason of the first check."""
    limits = [
        ModelCallLimit(quotas=PER_TENANT, enforce=False),
        TokenLimit(thread_limit=9, reserve=5),
    ]
    store = MemoryStore()
    FreezeScene(signals, SEARCH, store=store).quota.freeze(tenant="acme")
    scene = FreezeScene(signals, *limits, store=store, script=[answer(5)])
    assert await scene.reasons() == ["frozen", None]


async def test_nobody_is_asked(signals: Signals) -> None:
    """A limit that asks a person does not ask for what an operator has stopped."""
    limit = ToolCallLimit("search", quotas=[Quota(1, per="tenant")], exit_behavior="ask")
    scene = await FreezeScene(signals, limit).played()
    scene.quota.freeze(tenant="acme")
    assert "__interrupt__" not in await scene.play()
    assert scene.decisions[-1].refused_by[0].reason == "frozen"
    scene.quota.thaw(tenant="acme")
    assert "__interrupt__" in await scene.play()


@pytest.mark.parametrize("smooth", [False, True])
async def test_waiting_calls_are_blocked(signals: Signals, *, smooth: bool) -> None:
    """Calls that wait for room, and behind each other, do not wait for a thaw."""
    hourly = Quota(1, per="tenant", window="1h", smooth=smooth)
    quotas = [hourly, Quota(lambda *_: None, per="global")]
    limit = ToolCallLimit("search", quotas=quotas, wait=10**5)
    scene = await FreezeScene(signals, limit).played()
    runs: list[Any] = []
    for thread in range(3):
        given: Any = {"messages": [("user", "hi")]}, {"configurable": {"thread_id": str(thread)}}
        runs.append(asyncio.create_task(scene.agent.ainvoke(*given, context=ACME)))
    gauge = {"agent": "unnamed", "limit": "tool:search"}
    await until(lambda: signals.value("langchain_quota_waiting_calls", **gauge) == len(runs))
    scene.quota.freeze(tenant="acme")
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*runs)
    assert all(STOPPED in text for result in results for text in texts(result))
    assert scene.ran == ["search"]


def test_what_cannot_be_frozen(signals: Signals) -> None:
    """What no enforced limit counts in a store is an error, which says what can be frozen."""
    store = MemoryStore()
    with pytest.raises(TypeError, match="need a store"):
        FreezeScene(signals, ToolCallLimit(run_limit=1), store=None).quota.freeze()
    trial = ToolCallLimit(quotas=PER_TENANT, enforce=False)
    with pytest.raises(ValueError, match="needs an enforced limit that counts in"):
        FreezeScene(signals, trial, store=store).quota.freeze()
    limit = ToolCallLimit(thread_limit=1, quotas=[*PER_TENANT, Quota(1, per="global")])
    quota = FreezeScene(signals, limit, store=store).quota
    named = "needs tenant=… or thread=… or no subject; given: .'tenent': 'acme'"
    both: Any = {"tenant": "acme", "thread": "7"}
    for change, given, error in (
        (quota.freeze, {"tenent": "acme"}, named),
        (quota.thaw, {"tenent": "acme"}, named),
        (quota.freeze, both, r"given: .'tenant': 'acme', 'thread': '7'"),
        (quota.freeze, {"tenant": ""}, "must not be empty"),
        (quota.freeze, {"until": at(0)}, "until must be later than now"),
        (quota.freeze, {"until": at(1e10).replace(tzinfo=None)}, "until must have a time zone"),
    ):
        with pytest.raises(ValueError, match=error):
            change(**given)
    assert store.grants() == []
