"""The Prometheus metrics: names, labels, and what each decision adds to them."""

from datetime import UTC, datetime, timedelta

from prometheus_client import CollectorRegistry

from langchain_quota import (
    Answer,
    Call,
    Decision,
    LimitStatus,
    Outcome,
    Telemetry,
    ToolCallLimit,
)
from langchain_quota.decision import QuotaStatus, Refund, Unit
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedQuota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.names import METRICS
from tests.judged import Used, judge
from tests.signals import Signals

CALLS = "langchain_quota_calls_total"
LIMIT_DECISIONS = "langchain_quota_limit_decisions_total"


def decide(limit: Limit | ResolvedLimit, used: int, *tools: str) -> tuple[Decision, ...]:
    """What the judge decides about calls of a thread and run that have used so much."""
    counter = limit.limit.counter if isinstance(limit, ResolvedLimit) else limit.counter
    batch = [
        Call("tool", tool, str(index), agent="boss", thread_id="t1")
        for index, tool in enumerate(tools)
    ]
    return judge([limit], {counter: Used(used, used)}, batch).decisions


def stored(
    *quotas: ResolvedQuota, used: int = 0, calls: int = 1, outage: Outage | None = None
) -> tuple[Decision, ...]:
    """What is decided about calls whose quotas a store has counted up to so much."""
    limit = ToolCallLimit("email", quotas=[Quota(each.limit, per=each.scope) for each in quotas])
    batch = [
        Call("tool", "email", str(index), agent="boss", thread_id="t1") for index in range(calls)
    ]
    thread = used if any(each.is_threads for each in quotas) else 0
    counted = {"email": Used(thread, quotas=(used,) * len(quotas))}
    resolved = ResolvedLimit.of(limit, quotas=quotas)
    return judge([resolved], counted, batch, outage=outage).decisions


def budget(unit: Unit, used: int = 4_000_000, limit: int = 5_000_000) -> Decision:
    """A model call that a budget of a thread, and of all, lets through."""
    status = LimitStatus(
        limit=f"{unit} of models",
        exit_behavior="end",
        thread_before=used - 1,
        thread_used=used,
        thread_limit=limit,
        run_before=0,
        run_used=1,
        run_limit=None,
        charged=True,
        quotas=(QuotaStatus("global", "", used - 1, used, 2 * limit, per="global"),),
        unit=unit,
    )
    return Decision(Call("model", agent="boss", thread_id="t1"), Outcome.ALLOWED, (status,))


def samples(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one name by the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_names_types_and_labels(signals: Signals) -> None:
    """After one of everything, the metrics are those of the list, with exactly their labels."""
    limit = ToolCallLimit("search", thread_limit=1, run_limit=1)
    decisions = decide(limit, 0, "search", "search")
    signals.recorder.record(decisions, started=0, after_refusal=True)
    signals.recorder.record_run("boss", None)
    counting = recorder_of(Telemetry(registry=signals.registry, count_unjudged_calls=True))
    assert counting.unjudged is not None
    counting.unjudged.record("boss", "tool", 1)
    signals.recorder.record_lost_root_run("boss", "thread")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    for per in ("global", "thread"):
        quota = ResolvedQuota(per, 5, "t1", per, tomorrow, per)
        signals.recorder.record(stored(quota), started=0)
    units: tuple[Unit, ...] = ("tokens", "microdollars")
    for unit in units:
        signals.recorder.record([budget(unit)], started=0)
        spent = [(f"{unit} of models", unit, 7)]
        signals.recorder.record_spent("boss", "t1", spent, model="gpt-5")
    granted: tuple[Unit, ...] = ("calls", "tokens", "microdollars")
    signals.recorder.record_granted("boss", [("of boss", "thread", unit, 5) for unit in granted])
    signals.recorder.record_unknown_price("boss", "gpt-9")
    signals.recorder.record_question("boss", [limit.name])
    signals.recorder.record_answer("boss", [limit.name], Answer("reject"), None)
    signals.recorder.record_refunds([Refund(decisions[0].call, limit.name)])
    signals.recorder.record_error("metrics", OSError("disk full"))
    signals.recorder.observe_store("acquire", "ok", 0.001)
    signals.recorder.record_fallback("boss", "deny", 1)
    signals.recorder.record_wait("boss", limit.name, "cancelled", 0.001)
    store = MemoryStore()
    signals.recorder.watch_store(store)
    found = {
        family.name: (
            family.type,
            {
                frozenset(sample.labels) - {"le"}
                for sample in family.samples
                if not sample.name.endswith("_created")
            },
        )
        for family in signals.registry.collect()
    }
    assert found == {
        metric.name.removesuffix("_total"): (metric.kind, {frozenset(metric.labels)})
        for metric in METRICS
    }


def test_a_refund_of_an_untouched_limit_has_its_siblings(signals: Signals) -> None:
    """After a restart a refund can come first: what was charged is there, at 0, to subtract it."""
    call = Call("tool", "search", "a", agent="boss", thread_id="t1")
    signals.recorder.record_refunds([Refund(call, "tool:search")])
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert found["boss", "tool:search", "none", "refunded"] == 1
    assert found.get(("boss", "tool:search", "none", "allowed")) == 0


def test_amounts_are_charged(signals: Signals) -> None:
    """A call that costs 3 is one judged call and 3 charged."""
    limit = ToolCallLimit(run_limit=9)
    call = Call("tool", "search", "a", amount=3, agent="boss")
    signals.recorder.record(judge([limit], {}, [call]).decisions, started=0)
    signals.recorder.record_refunds([Refund(call, limit.name)])
    assert sum(samples(signals.registry, CALLS).values()) == 1
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert found["boss", "tool:*", "none", "allowed"] == 3
    assert found["boss", "tool:*", "none", "refunded"] == 3
