"""The Prometheus metrics: names, labels, and what each decision adds to them."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from langchain_quota import (
    Answer,
    Call,
    Decision,
    Level,
    LimitStatus,
    ModelCallLimit,
    Outcome,
    Telemetry,
    ToolCallLimit,
    __version__,
)
from langchain_quota.decision import QuotaStatus, Refund, Unit
from langchain_quota.limits import Limit
from langchain_quota.quotas import Quota
from langchain_quota.resolved import Outage, ResolvedLimit, ResolvedQuota
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.metrics import STORE_BUCKETS, Metrics
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


DAILY = ResolvedQuota("user_id", 5, "ada@example.org", "user")


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


def test_every_metric_is_explained(signals: Signals) -> None:
    """Every family has a help text of its own."""
    texts = [family.documentation for family in signals.registry.collect()]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_build_info_names_the_version(signals: Signals) -> None:
    """A process that has decided nothing yet is seen to be up."""
    assert signals.value("langchain_quota_build_info", version=__version__) == 1


def test_gauges_can_be_merged_over_processes() -> None:
    """Gauges say how several processes of one server are merged."""
    registry = CollectorRegistry()
    Metrics(registry, near=0.8)
    modes = {
        each._name: each._multiprocess_mode
        for each in registry._collector_to_names
        if isinstance(each, Gauge)
    }
    assert modes == {
        "langchain_quota_limit": "mostrecent",
        "langchain_quota_limit_tokens": "mostrecent",
        "langchain_quota_limit_dollars": "mostrecent",
        "langchain_quota_limit_near_ratio": "mostrecent",
        "langchain_quota_limit_alert": "mostrecent",
        "langchain_quota_build_info": "max",
    }


def test_each_decision_of_a_call_is_there_from_the_first(signals: Signals) -> None:
    """When a tool is first seen, all its decisions exist: 1 for this one, 0 for the others."""
    signals.recorder.record(decide(ToolCallLimit(run_limit=0), 0, "search"), started=0)
    assert samples(signals.registry, CALLS) == {
        ("boss", "tool", "search", "allowed"): 0,
        ("boss", "tool", "search", "blocked"): 1,
        ("boss", "tool", "search", "skipped"): 0,
        ("boss", "tool", "search", "would_block"): 0,
    }


def test_all_series_of_a_limit_are_there_from_the_first(signals: Signals) -> None:
    """When a limit is first met, each decision and each configured scope exists at 0."""
    limit = ToolCallLimit("search", thread_limit=20, run_limit=10)
    signals.recorder.record(decide(limit, 0, "search"), started=0)
    assert samples(signals.registry, LIMIT_DECISIONS) == {
        ("boss", "tool:search", "none", "allowed"): 1,
        ("boss", "tool:search", "none", "refunded"): 0,
        ("boss", "tool:search", "thread", "blocked"): 0,
        ("boss", "tool:search", "thread", "would_block"): 0,
        ("boss", "tool:search", "run", "blocked"): 0,
        ("boss", "tool:search", "run", "would_block"): 0,
    }
    for name in ("langchain_quota_near_limit_total", "langchain_quota_exhausted_total"):
        assert samples(signals.registry, name) == {
            ("boss", "tool:search", "thread"): 0,
            ("boss", "tool:search", "run"): 0,
        }


def test_a_scope_without_a_limit_has_no_series(signals: Signals) -> None:
    """A limit for runs only has neither a thread's limit (never +Inf) nor its refusals."""
    signals.recorder.record(decide(ToolCallLimit(run_limit=3), 0, "search"), started=0)
    assert samples(signals.registry, "langchain_quota_limit") == {("boss", "tool:*", "run"): 3}
    assert {key[2] for key in samples(signals.registry, LIMIT_DECISIONS)} == {"none", "run"}


def test_the_limit_is_shown(signals: Signals) -> None:
    """The gauge is the configured limit of each scope, 0 included."""
    forbidden = ToolCallLimit("calc", run_limit=0)
    limit = ToolCallLimit("search", thread_limit=20, run_limit=3)
    signals.recorder.record(decide(limit, 0, "search"), started=0)
    signals.recorder.record(decide(forbidden, 0, "calc"), started=0)
    assert samples(signals.registry, "langchain_quota_limit") == {
        ("boss", "tool:search", "thread"): 20,
        ("boss", "tool:search", "run"): 3,
        ("boss", "tool:calc", "run"): 0,
    }


def test_a_refund_of_an_untouched_limit_has_its_siblings(signals: Signals) -> None:
    """After a restart a refund can come first: what was charged is there, at 0, to subtract it."""
    call = Call("tool", "search", "a", agent="boss", thread_id="t1")
    signals.recorder.record_refunds([Refund(call, "tool:search")])
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert found["boss", "tool:search", "none", "refunded"] == 1
    assert found.get(("boss", "tool:search", "none", "allowed")) == 0


def test_charged_refused_and_refunded(signals: Signals) -> None:
    """A limit counts what was charged to it, what it refused by scope, and what was taken back."""
    limit = ToolCallLimit("search", thread_limit=20, run_limit=3)
    decisions = decide(limit, 1, "search", "search", "search")
    signals.recorder.record(decisions, started=0)
    signals.recorder.record(decide(limit, 20, "search"), started=0)
    signals.recorder.record_refunds([Refund(decisions[0].call, limit.name)])
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2:]: value for key, value in found.items() if value} == {
        ("none", "allowed"): 2,
        ("run", "blocked"): 1,
        ("thread", "blocked"): 1,
        ("none", "refunded"): 1,
    }


def test_a_call_refused_by_one_limit_is_counted_by_no_other(signals: Signals) -> None:
    """A limit that would have admitted the call counts neither a charge nor a refusal."""
    limits = [ToolCallLimit("search", run_limit=0), ToolCallLimit(run_limit=9)]
    judged = judge(limits, {}, [Call("tool", "search", "a", agent="boss")])
    signals.recorder.record(judged.decisions, started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key: value for key, value in found.items() if value} == {
        ("boss", "tool:search", "run", "blocked"): 1
    }
    assert found["boss", "tool:*", "none", "allowed"] == 0


def test_skipped_calls_are_counted_as_skipped_only(signals: Signals) -> None:
    """Calls of a stopped batch are judged calls, and charged to and refused by no limit."""
    limit = ToolCallLimit("search", run_limit=1, exit_behavior="end")
    signals.recorder.record(decide(limit, 0, "search", "search", "calc"), started=0)
    calls = samples(signals.registry, CALLS)
    assert {key[2:]: value for key, value in calls.items() if value} == {
        ("search", "skipped"): 1,
        ("search", "blocked"): 1,
        ("calc", "skipped"): 1,
    }
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2:]: value for key, value in found.items() if value} == {("run", "blocked"): 1}


def test_a_call_without_a_limit_is_counted(signals: Signals) -> None:
    """A call that no limit matches is allowed, and no limit knows of it."""
    decision = Decision(Call("tool", "calc", "a", agent="boss"), Outcome.ALLOWED)
    signals.recorder.record([decision], started=0)
    value = signals.value(CALLS, agent="boss", kind="tool", tool="calc", decision="allowed")
    assert value == 1
    assert samples(signals.registry, LIMIT_DECISIONS) == {}


def test_a_call_that_would_be_blocked(signals: Signals) -> None:
    """A limit on trial counts its refusal apart, and is charged nothing for it."""
    limit = ToolCallLimit("search", run_limit=0, enforce=False)
    signals.recorder.record(decide(limit, 0, "search"), started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2:]: value for key, value in found.items() if value} == {("run", "would_block"): 1}
    calls = samples(signals.registry, CALLS)
    assert {key[3]: value for key, value in calls.items() if value} == {"would_block": 1}


def test_a_limit_on_trial_is_charged_what_it_admits(signals: Signals) -> None:
    """Its charges and would-be refusals are counted like an enforced limit's, by scope."""
    limit = ToolCallLimit("search", thread_limit=20, run_limit=2, enforce=False)
    signals.recorder.record(decide(limit, 0, *["search"] * 5), started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2:]: value for key, value in found.items() if value} == {
        ("none", "allowed"): 2,
        ("run", "would_block"): 3,
    }
    calls = samples(signals.registry, CALLS)
    assert {key[3]: value for key, value in calls.items() if value} == {
        "allowed": 2,
        "would_block": 3,
    }
    assert samples(signals.registry, "langchain_quota_limit") == {
        ("boss", "tool:search", "thread"): 20,
        ("boss", "tool:search", "run"): 2,
    }


def test_a_limit_on_trial_crosses_nothing(signals: Signals) -> None:
    """What is only tried out alarms nobody: it is never near and never exhausted."""
    limit = ToolCallLimit("search", thread_limit=10, run_limit=10, enforce=False)
    signals.recorder.record(decide(limit, 0, *["search"] * 12), started=0)
    assert threshold_events(signals) == (0, 0)


def test_a_call_that_an_enforced_limit_blocks_beside_a_trial(signals: Signals) -> None:
    """The call is blocked; the limit on trial tells that it would have refused it, too."""
    limits = [
        ToolCallLimit("search", run_limit=0),
        ToolCallLimit(run_limit=0, enforce=False, name="trial"),
    ]
    judged = judge(limits, {}, [Call("tool", "search", "a", agent="boss")])
    signals.recorder.record(judged.decisions, started=0)
    calls = samples(signals.registry, CALLS)
    assert {key[3]: value for key, value in calls.items() if value} == {"blocked": 1}
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[1:]: value for key, value in found.items() if value} == {
        ("tool:search", "run", "blocked"): 1,
        ("trial", "run", "would_block"): 1,
    }


def computed(run_limit: int | None) -> ResolvedLimit:
    limit = ToolCallLimit("search", thread_limit=20, run_limit=lambda *_: 0)
    return ResolvedLimit.of(limit, run_limit=run_limit)


def test_a_computed_limit_has_no_gauge(signals: Signals) -> None:
    """What differs from call to call is no configuration; the fixed scope beside it is shown."""
    signals.recorder.record(decide(computed(3), 0, "search"), started=0)
    assert samples(signals.registry, "langchain_quota_limit") == {
        ("boss", "tool:search", "thread"): 20
    }


def test_a_computed_limit_is_counted_like_any_other(signals: Signals) -> None:
    """Refusals and crossed thresholds of a computed scope go to one series, whatever the number."""
    for number in (1, 2):
        decisions = decide(computed(number), 0, *["search"] * (number + 1))
        signals.recorder.record(decisions, started=0)
    labels = {"agent": "boss", "limit": "tool:search", "scope": "run"}
    name = "langchain_quota_limit_decisions_total"
    assert signals.value(name, **labels, decision="blocked") == 2
    assert signals.value("langchain_quota_exhausted_total", **labels) == 2


def test_a_computed_limit_takes_no_memory_for_each_number() -> None:
    """A function that gives another number at each call leaves one set of series behind."""
    metrics = Metrics(CollectorRegistry(), near=0.8)
    for number in range(50):
        for decision in decide(computed(number), 0, "search"):
            metrics.record(decision, "boss", "search", None)
    assert len(metrics._limits) == 1


def test_a_computed_scope_without_a_number_has_no_series(signals: Signals) -> None:
    """Where the function gives no limit the scope is as if there were none, until it gives one."""
    signals.recorder.record(decide(computed(None), 0, "search"), started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2] for key in found} == {"none", "thread"}
    signals.recorder.record(decide(computed(3), 0, "search"), started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2] for key in found} == {"none", "thread", "run"}
    assert found["boss", "tool:search", "none", "allowed"] == 2


def test_a_limits_own_near_is_counted(signals: Signals) -> None:
    """A limit with a near share of its own crosses there, once."""
    limit = ToolCallLimit("search", run_limit=10, near=0.5)
    seen = []
    for used in range(9):
        signals.recorder.record(decide(limit, used, "search"), started=0)
        seen.append(threshold_events(signals))
    assert seen == [*[(0, 0)] * 4, *[(1, 0)] * 5]


@pytest.mark.parametrize(
    ("options", "near", "alert"),
    [
        ({}, 0.8, 1),
        ({"near": 0.95}, 0.95, 1),
        ({"alert": False}, 0.8, 0),
        ({"enforce": False}, None, 0),
    ],
)
def test_what_dashboards_and_alerts_go_by(
    options: Mapping[str, Any], near: float | None, alert: float, signals: Signals
) -> None:
    """The share from which a limit is near, and whether its refusals are worth an alert."""
    limit = ToolCallLimit("search", run_limit=3, **options)
    signals.recorder.record(decide(limit, 0, "search"), started=0)
    labels = {"agent": "boss", "limit": "tool:search"}
    assert signals.value("langchain_quota_limit_near_ratio", **labels) == near
    assert signals.value("langchain_quota_limit_alert", **labels) == alert


def test_the_share_follows_its_configuration(signals: Signals) -> None:
    """A limit that is met again with other options is shown with them."""
    for near, alert in ((0.5, True), (0.9, False)):
        limit = ToolCallLimit("search", run_limit=3, near=near, alert=alert)
        signals.recorder.record(decide(limit, 0, "search"), started=0)
    labels = {"agent": "boss", "limit": "tool:search"}
    assert signals.value("langchain_quota_limit_near_ratio", **labels) == 0.9
    assert signals.value("langchain_quota_limit_alert", **labels) == 0


def test_runs_that_a_limit_ends(signals: Signals) -> None:
    """A run is ended by a refusal that does not let the agent go on: once, by the first limit."""
    goes_on = ToolCallLimit("search", run_limit=1)
    ends = ToolCallLimit(run_limit=1, exit_behavior="end", name="all")
    signals.recorder.record_run("boss", "task")
    signals.recorder.record_run("boss", "task")
    for limits in ([goes_on], [goes_on, ends], [ends]):
        used = {each.counter: Used(1, 1) for each in limits}
        batch = [Call("tool", "search", str(index), agent="boss") for index in range(2)]
        signals.recorder.record(judge(limits, used, batch).decisions, started=0)
    assert samples(signals.registry, "langchain_quota_runs_total") == {("boss",): 1}
    assert samples(signals.registry, "langchain_quota_runs_ended_total") == {
        ("boss", "tool:search"): 0,
        ("boss", "all"): 2,
    }


def test_calls_after_a_refusal(signals: Signals) -> None:
    """Calls of a run that was refused one before are counted once more, by their decision."""
    limit = ToolCallLimit("search", run_limit=2)
    for refused_before in (False, True):
        signals.recorder.record(
            decide(limit, 1, "search", "search"), started=0, after_refusal=refused_before
        )
    found = samples(signals.registry, "langchain_quota_calls_after_refusal_total")
    assert len(found) == 8
    assert {labels: count for labels, count in found.items() if count} == {
        ("boss", "tool", "allowed"): 1,
        ("boss", "tool", "blocked"): 1,
    }


def test_judging_is_timed(signals: Signals) -> None:
    """Judging a step's calls is timed, by where the counts are; a clock set back gives 0."""
    now = time.time_ns()
    by_state = decide(ToolCallLimit("search", run_limit=9), 0, "search", "search")
    signals.recorder.record(by_state, started=now - 10**9)
    signals.recorder.record(stored(DAILY), started=now + 10**12)
    name = "langchain_quota_decision_seconds"
    assert samples(signals.registry, f"{name}_count") == {
        ("tool", "state"): 1,
        ("tool", "store"): 1,
    }
    took = samples(signals.registry, f"{name}_sum")
    assert took["tool", "state"] >= 1
    assert took["tool", "store"] == 0


def test_model_calls_have_no_tool(signals: Signals) -> None:
    """A model call of an agent without a name is labelled `none` and `unnamed`, never empty."""
    limit = ModelCallLimit(run_limit=5)
    signals.recorder.record(judge([limit], {}, [Call("model")]).decisions, started=0)
    labels = {"agent": "unnamed", "kind": "model", "tool": "none", "decision": "allowed"}
    assert signals.value(CALLS, **labels) == 1
    labels = {"agent": "unnamed", "limit": "model", "scope": "none", "decision": "allowed"}
    assert signals.value(LIMIT_DECISIONS, **labels) == 1


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


def threshold_events(signals: Signals) -> tuple[float, float]:
    return (
        sum(samples(signals.registry, "langchain_quota_near_limit_total").values()),
        sum(samples(signals.registry, "langchain_quota_exhausted_total").values()),
    )


def test_thresholds_are_counted_when_crossed(signals: Signals) -> None:
    """Of ten calls at a limit of 10, the eighth is near and the tenth exhausts; refusals do not."""
    limit = ToolCallLimit("search", run_limit=10)
    seen = []
    for used in range(12):
        signals.recorder.record(decide(limit, min(used, 10), "search"), started=0)
        seen.append(threshold_events(signals))
    assert seen == [*[(0, 0)] * 7, *[(1, 0)] * 2, *[(1, 1)] * 3]


def test_near_is_counted_only_below_the_limit(signals: Signals) -> None:
    """A call that goes past near to the limit itself is exhausted, not near."""
    signals.recorder.record(decide(ToolCallLimit("search", run_limit=1), 0, "search"), started=0)
    assert threshold_events(signals) == (0, 1)


def test_crossings_are_counted_by_scope(signals: Signals) -> None:
    """A run at its limit in a thread that is near counts for each of them."""
    limit = ToolCallLimit("search", thread_limit=10, run_limit=1)
    batch = [Call("tool", "search", "a", agent="boss")]
    judged = judge([limit], {"search": Used(7, 0)}, batch)
    signals.recorder.record(judged.decisions, started=0)
    labels = {"agent": "boss", "limit": "tool:search"}
    assert signals.value("langchain_quota_near_limit_total", **labels, scope="thread") == 1
    assert signals.value("langchain_quota_exhausted_total", **labels, scope="run") == 1
    assert threshold_events(signals) == (1, 1)


def test_series_are_made_once() -> None:
    """A limit met again adds to its series; the same name with another threshold shows that."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, near=0.8)
    for limit in (ToolCallLimit("search", run_limit=3), ToolCallLimit("search", run_limit=4)):
        for decision in decide(limit, 0, "search"):
            metrics.record(decision, "boss", "search", None)
    found = samples(registry, LIMIT_DECISIONS)
    assert found["boss", "tool:search", "none", "allowed"] == 2
    assert samples(registry, "langchain_quota_limit") == {("boss", "tool:search", "run"): 4}


def exemplars(registry: CollectorRegistry) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.exemplar:
                found.setdefault(sample.name, []).append(dict(sample.exemplar.labels))
    return found


def test_exemplars_are_on_the_first_two_counters() -> None:
    """A call and what its limit did are linked to the trace; crossings and gauges are not."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, near=0.8)
    link = {"trace_id": "1" * 32, "span_id": "2" * 16}
    allowed, blocked = decide(ToolCallLimit("search", run_limit=1), 0, "search", "search")
    for decision in (allowed, blocked):
        metrics.record(decision, "boss", "search", link)
    metrics.crossed("boss", allowed.limits[0].limit, "run", Level.EXHAUSTED)
    assert exemplars(registry) == {CALLS: [link, link], LIMIT_DECISIONS: [link, link]}


def test_without_a_trace_there_is_no_exemplar() -> None:
    """A decision outside of a sampled trace is counted all the same."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, near=0.8)
    for decision in decide(ToolCallLimit("search", run_limit=1), 0, "search"):
        metrics.record(decision, "boss", "search", None)
    assert exemplars(registry) == {}
    assert sum(samples(registry, CALLS).values()) == 1


def test_all_metrics_are_of_one_registry() -> None:
    """Two registries do not share counts."""
    first, second = CollectorRegistry(), CollectorRegistry()
    metrics = Metrics(first, near=0.8)
    Metrics(second, near=0.8)
    for decision in decide(ToolCallLimit("search", run_limit=1), 0, "search"):
        metrics.record(decision, "boss", "search", None)
    assert sum(samples(first, CALLS).values()) == 1
    assert samples(second, CALLS) == {}
    assert all(isinstance(each, Counter) for each in (metrics.calls, metrics.errors))


def test_the_limit_follows_its_configuration(signals: Signals) -> None:
    """The gauge shows the limit that was judged by last, also after going back and forth."""
    found = []
    for number in (3, 5, 3, 5, 5, 3):
        limit = ToolCallLimit("search", run_limit=number)
        signals.recorder.record(decide(limit, 0, "search"), started=0)
        found.append(samples(signals.registry, "langchain_quota_limit"))
    key = ("boss", "tool:search", "run")
    assert found == [{key: 3}, {key: 5}, {key: 3}, {key: 5}, {key: 5}, {key: 3}]
    assert samples(signals.registry, LIMIT_DECISIONS)["boss", "tool:search", "none", "allowed"] == 6


def test_a_changing_limit_takes_no_memory_for_each_number() -> None:
    """A configuration that is reloaded again and again leaves one set of series behind."""
    metrics = Metrics(CollectorRegistry(), near=0.8)
    for number in range(1, 50):
        for decision in decide(ToolCallLimit("search", run_limit=number), 0, "search"):
            metrics.record(decision, "boss", "search", None)
    assert len(metrics._limits) == 1


def test_all_series_of_a_quota_are_there_from_the_first(signals: Signals) -> None:
    """Each quota, and the store itself, has its refusals at 0 when the limit is first met."""
    tenant = ResolvedQuota("tenant", 50, "acme", "tenant")
    signals.recorder.record(stored(DAILY, tenant), started=0)
    assert samples(signals.registry, LIMIT_DECISIONS) == {
        ("boss", "tool:email", "none", "allowed"): 1,
        ("boss", "tool:email", "none", "refunded"): 0,
        ("boss", "tool:email", "user_id", "blocked"): 0,
        ("boss", "tool:email", "user_id", "would_block"): 0,
        ("boss", "tool:email", "tenant", "blocked"): 0,
        ("boss", "tool:email", "tenant", "would_block"): 0,
        ("boss", "tool:email", "store", "blocked"): 0,
        ("boss", "tool:email", "store", "would_block"): 0,
    }
    for name in ("langchain_quota_near_limit_total", "langchain_quota_exhausted_total"):
        assert samples(signals.registry, name) == {
            ("boss", "tool:email", "user_id"): 0,
            ("boss", "tool:email", "tenant"): 0,
        }


def test_a_quota_is_counted_by_its_scope(signals: Signals) -> None:
    """Charges, threshold_events and refusals of a quota go to its name; whose it is, is nowhere."""
    signals.recorder.record(stored(DAILY, used=3, calls=4), started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2:]: value for key, value in found.items() if value} == {
        ("none", "allowed"): 2,
        ("user_id", "blocked"): 2,
    }
    key = ("boss", "tool:email", "user_id")
    assert samples(signals.registry, "langchain_quota_near_limit_total") == {key: 1}
    assert samples(signals.registry, "langchain_quota_exhausted_total") == {key: 1}
    values = {
        value
        for family in signals.registry.collect()
        for sample in family.samples
        for value in sample.labels.values()
    }
    assert not any("ada" in value for value in values)
    assert "ada" not in str(signals.recorder._metrics._limits)


def test_the_number_of_a_quota_is_shown_unless_it_is_computed(signals: Signals) -> None:
    """What a user's plan gives is no configuration; a fixed quota is, by its scope."""
    plan_of_user = ResolvedQuota("plan", 20, "ada", "plan", computed=True)
    limit = ToolCallLimit("email", quotas=[Quota(lambda *_: 20, per="plan")])
    batch = [Call("tool", "email", "a", agent="boss")]
    judged = judge([ResolvedLimit.of(limit, quotas=(DAILY, plan_of_user))], {}, batch)
    signals.recorder.record(judged.decisions, started=0)
    assert samples(signals.registry, "langchain_quota_limit") == {
        ("boss", "tool:email", "user_id"): 5
    }
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert found["boss", "tool:email", "plan", "blocked"] == 0


def test_an_outage_is_no_exhausted_quota(signals: Signals) -> None:
    """What is refused because the store cannot be asked has the scope `store`, and no other."""
    for outage in (None, "deny", None):
        signals.recorder.record(stored(DAILY, outage=outage), started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert {key[2:]: value for key, value in found.items() if value} == {
        ("none", "allowed"): 2,
        ("store", "blocked"): 1,
    }
    assert threshold_events(signals) == (0, 0)
    assert samples(signals.registry, "langchain_quota_limit") == {
        ("boss", "tool:email", "user_id"): 5
    }


def test_a_limit_whose_counts_a_store_keeps_since_a_restart(signals: Signals) -> None:
    """A limit that was counted in the state, and is now in a store, has the store's refusals."""
    limit = ToolCallLimit("search", thread_limit=20)
    batch = [Call("tool", "search", "a", agent="boss")]
    signals.recorder.record(judge([limit], {}, batch).decisions, started=0)
    assert {key[2] for key in samples(signals.registry, LIMIT_DECISIONS)} == {"none", "thread"}
    denied = judge([ResolvedLimit.of(limit, thread_key="t1")], {}, batch, outage="deny")
    signals.recorder.record(denied.decisions, started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert found["boss", "tool:search", "store", "blocked"] == 1
    assert found["boss", "tool:search", "none", "allowed"] == 1


def test_the_store_is_timed(signals: Signals) -> None:
    """Each request is in its bucket, by operation and outcome; other outcomes are there at 0."""
    for seconds in (0.0004, 0.3, 9):
        signals.recorder.observe_store("acquire", "ok", seconds)
    signals.recorder.observe_store("acquire", "timeout", 1.0)
    counts = samples(signals.registry, "langchain_quota_store_seconds_count")
    assert counts == {("acquire", "ok"): 3, ("acquire", "error"): 0, ("acquire", "timeout"): 1}
    sums = samples(signals.registry, "langchain_quota_store_seconds_sum")
    assert sums["acquire", "ok"] == pytest.approx(9.3004)
    buckets = {
        labels[2]: value
        for labels, value in samples(
            signals.registry, "langchain_quota_store_seconds_bucket"
        ).items()
        if labels[:2] == ("acquire", "ok")
    }
    bounds = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]
    assert buckets == {
        **{str(bound): 2 if bound >= 0.5 else 1 for bound in bounds},
        "+Inf": 3,
    }
    assert list(STORE_BUCKETS) == bounds


def test_decisions_without_the_store_are_counted(signals: Signals) -> None:
    """Calls are counted by agent and by what was done; what was not done is there at 0."""
    signals.recorder.record_fallback("boss", "allow", 3)
    signals.recorder.record_fallback("boss", "allow", 2)
    signals.recorder.record_fallback(None, "deny", 1)
    assert samples(signals.registry, "langchain_quota_store_fallbacks_total") == {
        ("boss", "deny"): 0,
        ("boss", "allow"): 5,
        ("unnamed", "deny"): 1,
        ("unnamed", "allow"): 0,
    }


@pytest.mark.parametrize(
    ("unit", "ending", "used", "most"),
    [("tokens", "tokens", 4_000_000, 5_000_000), ("microdollars", "dollars", 4.0, 5.0)],
)
def test_each_unit_has_metrics_of_its_own(
    signals: Signals, unit: Unit, ending: str, used: float, most: float
) -> None:
    """Tokens and dollars have names of their own, in base units; series of calls have neither."""
    signals.recorder.record([budget(unit)], started=0)
    limit = f"{unit} of models"
    shared = ("boss", limit, "global", "")
    expected = {
        "limit": {("boss", limit, "thread"): most, ("boss", limit, "global"): 2 * most},
        "thread_used": {("boss", limit, "t1"): used},
        "thread_limit": {("boss", limit, "t1"): most},
        "subject_used": {shared: used},
        "subject_limit": {shared: 2 * most},
    }
    for name, found in expected.items():
        assert samples(signals.registry, f"langchain_quota_{name}_{ending}") == found
        assert samples(signals.registry, f"langchain_quota_{name}") == {}


def test_a_decision_about_a_budget_counts_one_call(signals: Signals) -> None:
    """What a limit did is counted in calls, whatever the limit counts."""
    signals.recorder.record([budget("microdollars")], started=0)
    found = samples(signals.registry, LIMIT_DECISIONS)
    assert found["boss", "microdollars of models", "none", "allowed"] == 1


def test_what_model_runs_spend_is_counted(signals: Signals) -> None:
    """Amounts are counted by agent, limit and model, each unit under a name of its own."""
    spent: list[tuple[str, Unit, int]] = [("model", "tokens", 1200), ("cost", "microdollars", 4251)]
    for _ in range(2):
        signals.recorder.record_spent("boss", "t1", spent, model="gpt-5")
    signals.recorder.record_spent(None, None, [("model", "tokens", 0)], model=None)
    assert samples(signals.registry, "langchain_quota_spent_tokens_total") == {
        ("boss", "model", "gpt-5"): 2400,
        ("unnamed", "model", "unnamed"): 0,
    }
    dollars = samples(signals.registry, "langchain_quota_spent_dollars_total")
    assert dollars == {("boss", "cost", "gpt-5"): pytest.approx(0.008502, abs=1e-12)}
    assert samples(signals.registry, "langchain_quota_thread_spent_tokens_total") == {
        ("boss", "model", "t1"): 2400
    }
    assert samples(signals.registry, "langchain_quota_thread_spent_dollars_total") == {
        ("boss", "cost", "t1"): 0.008502
    }


def test_estimated_usage_is_counted(signals: Signals) -> None:
    """Runs are counted by where their usage is from."""
    for estimated in (False, True, True):
        spent: list[tuple[str, Unit, int]] = [("model", "tokens", 5), ("cost", "microdollars", 5)]
        signals.recorder.record_spent("boss", "t1", spent, model="gpt-5", estimated=estimated)
    assert samples(signals.registry, "langchain_quota_model_runs_total") == {
        ("boss", "gpt-5", "reported"): 1,
        ("boss", "gpt-5", "estimated"): 2,
    }


def test_unknown_prices_are_counted_and_logged_once(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call without a price counts; the first of a model says what to do."""
    for model in ("gpt-9", "gpt-9", "my deployment"):
        signals.recorder.record_unknown_price("boss", model)
    assert samples(signals.registry, "langchain_quota_unknown_prices_total") == {
        ("boss", "gpt-9"): 2,
        ("boss", "my deployment"): 1,
    }
    first, second = (record.getMessage() for record in caplog.records)
    assert "'gpt-9' in agent 'boss'" in first
    assert "'my deployment' in agent 'boss'" in second
    assert "model=" in first
    assert "prices=" in first


def test_names_of_models_are_bounded(signals: Signals) -> None:
    """A gateway may pass on what callers invent: after a hundred names the others are one."""
    for number in range(103):
        spent: list[tuple[str, Unit, int]] = [("model", "tokens", 1)]
        signals.recorder.record_spent("boss", None, spent, model=f"m/{number}\n" + "x" * number)
    found = samples(signals.registry, "langchain_quota_spent_tokens_total")
    assert len(found) == 101
    assert found["boss", "model", "_other"] == 3
    assert all(len(model) <= 64 and model.isprintable() for _, _, model in found)


def test_a_settled_budget_is_seen_at_once(
    signals: Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """What is charged after the call crosses thresholds, and says how much is used."""
    (after,) = budget("microdollars", used=5_000_010).limits
    settled = replace(after, thread_before=1)
    call = Call("model", agent="boss", thread_id="t1")
    signals.recorder.record_charge(call, settled)
    key = ("boss", after.limit, "thread")
    assert samples(signals.registry, "langchain_quota_exhausted_total")[key] == 1
    used = samples(signals.registry, "langchain_quota_thread_used_dollars")
    assert used == {("boss", after.limit, "t1"): 5.00001}
    (record,) = caplog.records
    assert record.getMessage() == (
        "limit 'microdollars of models' exhausted: agent 'boss', thread 't1', "
        "$5.00001 of $5.00 (thread_limit)"
    )
    fields = {key: getattr(record, f"quota_{key}") for key in ("used", "threshold", "unit")}
    assert fields == {"used": 5.00001, "threshold": 5.0, "unit": "dollars"}
