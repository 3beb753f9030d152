"""Subjects that operators have frozen: what is blocked, for which reason, and what is not."""

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest

from langchain_quota import (
    Decision,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    TokenLimit,
    ToolCallLimit,
    stop_reason,
)
from langchain_quota.stores.grants import in_utc
from tests.scene import Form, Scene, asking, both_forms, texts
from tests.stores import Clock
from tests.telemetry import Signals, attributes, telling
from tests.tokens import answer

ACME, BETA = {"tenant": "acme"}, {"tenant": "beta"}
PER_TENANT = [Quota(100, per="tenant", window="1d")]
SEARCH = ToolCallLimit("search", quotas=PER_TENANT)
PATIENCE = 60


def frozen(signals: Signals) -> float | None:
    return signals.value("langchain_quota_frozen_subjects")


class FreezeScene(Scene):
    """An agent that searches once in each run of Acme, and what was decided about it."""

    def __init__(self, signals: Signals, *limits: Any, script: Any = None, **options: Any) -> None:
        self.decisions: list[Decision] = []
        options = {"store": MemoryStore(), "context": ACME, **options}
        script = script or asking("search")
        super().__init__(signals, script, limits, on_decision=self.decisions.append, **options)

    async def freeze(self, **options: Any) -> None:
        if self.form == "sync":
            self.quota.freeze(**options)
        else:
            await self.quota.afreeze(**options)

    async def thaw(self, **options: Any) -> bool:
        is_sync = self.form == "sync"
        return bool(self.quota.thaw(**options) if is_sync else await self.quota.athaw(**options))

    async def reasons(self, **who: Any) -> list[Any]:
        """Run once; why the limits refuse the run's calls."""
        self.decisions.clear()
        await self.play(**who)
        return [status.reason for decision in self.decisions for status in decision.limits]


@both_forms
async def test_a_tenant_is_frozen_and_thawed(form: Form, caplog: pytest.LogCaptureFixture) -> None:
    """Its next call is blocked and charged to nothing; every signal says why; others run on."""
    signals = telling(subject_label={"tenant": str})
    scene = FreezeScene(signals, SEARCH, form=form)
    caplog.set_level(logging.INFO, "langchain_quota")
    assert await scene.reasons() == [None]
    assert frozen(signals) == 0
    await scene.freeze(tenant="acme", reason="chargeback", by="ada")
    assert await scene.reasons() == ["frozen"]
    [status] = scene.decisions[-1].refused_by
    assert (status.refusal_scope, status.scope, status.resets_at) == ("frozen", "tenant", None)
    assert scene.ran == ["search"]
    assert scene.quota.left("tool:search", tenant="acme").used == 1
    answer = scene.state()["messages"][-2]
    assert "an operator has stopped calls like it" in answer.text
    reason = stop_reason(answer)
    assert reason is not None
    assert (reason["scope"], reason["subject"], reason["used"]) == ("frozen", "acme", None)
    told = attributes(signals.decision_spans()[-1])
    assert (told["decision"], told["scope"], told["subject"]) == ("blocked", "frozen", "acme")
    assert scene.metric("tool:search", "blocked", "frozen") == 1
    assert scene.metric("tool:search", "blocked", "tenant") == 0
    assert frozen(signals) == 1
    assert await scene.reasons(context=BETA, thread_id="2") == [None]
    assert await scene.thaw(tenant="acme", by="bo")
    assert not await scene.thaw(tenant="acme")
    assert await scene.reasons(context=ACME) == [None]
    assert frozen(signals) == 0
    audit = [vars(record) for record in caplog.records if hasattr(record, "quota_grant")]
    assert [
        [entry[f"quota_{name}"] for name in ("event", "key", "by", "reason")] for entry in audit
    ] == [
        ["frozen", ":tenant:acme", "ada", "chargeback"],
        ["thawed", ":tenant:acme", "bo", "chargeback"],
    ]


@pytest.mark.parametrize("between_checks", [False, True])
@pytest.mark.parametrize("exit_behavior", ["end", "finalize", "error"])
async def test_a_model_call_of_a_frozen_subject(
    signals: Signals,
    exit_behavior: Any,
    between_checks: bool,  # noqa: FBT001
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
        await scene.freeze()
    if exit_behavior == "error":
        with pytest.raises(ModelCallLimitExceededError, match="an operator has stopped"):
            await scene.play()
    else:
        reason = stop_reason(await scene.play())
        assert "an operator has stopped calls like it" in scene.last_text()
        assert reason is not None
        assert (reason["scope"], reason["limit"]) == ("frozen", "t")
    assert len(scene.model.calls) == 0
    assert scene.quota.left("t", tenant="acme").used == 0


async def test_a_freeze_ends_by_itself(signals: Signals) -> None:
    """It ends by the store's clock, and a later freeze takes its place."""
    clock = Clock()
    scene = FreezeScene(signals, SEARCH, store=MemoryStore(clock=clock))
    for minutes in (1, 2):
        await scene.freeze(until=in_utc(clock.now) + timedelta(minutes=minutes))
    clock.now += 119
    assert await scene.reasons() == ["frozen"]
    clock.now += 1
    assert await scene.reasons() == [None]
    assert frozen(signals) == 0


async def test_a_dry_run_and_other_subjects(signals: Signals) -> None:
    """A limit in a dry run would block; a thread that is exhausted, too, is frozen first."""
    trial = ToolCallLimit("search", name="trial", quotas=PER_TENANT, enforce=False)
    calc = ToolCallLimit("calc", thread_limit=0, quotas=PER_TENANT)
    scene = FreezeScene(signals, trial, calc, script=asking("search", "calc"))
    assert await scene.reasons() == [None, "exhausted"]
    await scene.freeze(tenant="acme")
    assert await scene.reasons() == ["frozen", "frozen"]
    assert [str(decision.outcome) for decision in scene.decisions] == ["would_block", "blocked"]
    assert scene.ran == ["search"] * 2


async def test_a_dry_run_beside_a_reserve(signals: Signals) -> None:
    """A model call that is checked twice is shown with the reason of the first check."""
    trial = ModelCallLimit(quotas=PER_TENANT, enforce=False)
    budget = TokenLimit(thread_limit=100, reserve=5)
    store, script = MemoryStore(), [answer(10)] * 2
    await FreezeScene(signals, SEARCH, store=store).freeze(tenant="acme")
    scene = FreezeScene(signals, trial, budget, store=store, script=script)
    assert await scene.reasons() == ["frozen", None]


async def test_nobody_is_asked(signals: Signals) -> None:
    """A limit that asks a person does not ask for what an operator has stopped."""
    limit = ToolCallLimit("search", quotas=[Quota(1, per="tenant")], exit_behavior="ask")
    scene = FreezeScene(signals, limit)
    await scene.play()
    await scene.freeze(tenant="acme")
    assert "__interrupt__" not in await scene.play()
    assert scene.decisions[-1].refused_by[0].reason == "frozen"
    await scene.thaw(tenant="acme")
    assert "__interrupt__" in await scene.play()


@pytest.mark.parametrize("smooth", [False, True])
async def test_waiting_calls_are_blocked(signals: Signals, smooth: bool) -> None:  # noqa: FBT001
    """Calls that wait for room, and behind each other, do not wait for a thaw."""
    hourly = Quota(1, per="tenant", window="1h", smooth=smooth)
    scene = FreezeScene(signals, ToolCallLimit("search", quotas=[hourly], wait=10**5))
    await scene.play()
    runs: list[Any] = []
    for thread in range(3):
        given: Any = {"messages": [("user", "hi")]}, {"configurable": {"thread_id": str(thread)}}
        runs.append(asyncio.create_task(scene.agent.ainvoke(*given, context=ACME)))
    async with asyncio.timeout(PATIENCE):
        gauge = {"agent": "unnamed", "limit": "tool:search"}
        while signals.value("langchain_quota_waiting_calls", **gauge) != len(runs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await scene.freeze(tenant="acme")
        results = await asyncio.gather(*runs)
    assert all("an operator has stopped" in text for result in results for text in texts(result))
    assert scene.ran == ["search"]


def test_what_cannot_be_frozen(signals: Signals) -> None:
    """What no enforced limit counts in a store is an error, which says what can be frozen."""

    def quota(*limits: Any, **options: Any) -> Any:
        return Scene(signals, [], limits, **options).quota

    store = MemoryStore()
    with pytest.raises(TypeError, match="need a store"):
        quota(ToolCallLimit(run_limit=1)).freeze()
    trial = quota(ToolCallLimit(quotas=PER_TENANT, enforce=False), store=store)
    with pytest.raises(ValueError, match="needs an enforced limit that counts in"):
        trial.freeze()
    kept = quota(
        ToolCallLimit(thread_limit=1, quotas=[*PER_TENANT, Quota(1, per="global")]), store=store
    )
    expected = "needs tenant=… or thread=… or no subject; given: .'tenent': 'acme'"
    for change in (kept.freeze, kept.thaw):
        with pytest.raises(ValueError, match=expected):
            change(tenent="acme")
    with pytest.raises(ValueError, match=r"given: .'tenant': 'acme', 'thread': '7'"):
        kept.freeze(tenant="acme", thread="7")
    with pytest.raises(ValueError, match="must not be empty"):
        kept.freeze(tenant="")
    with pytest.raises(ValueError, match="until must be later than now"):
        kept.freeze(until=in_utc(0))
    with pytest.raises(ValueError, match="until must have a time zone"):
        kept.freeze(until=in_utc(10**10).replace(tzinfo=None))
    assert store.grants() == []
