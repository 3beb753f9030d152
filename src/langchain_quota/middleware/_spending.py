"""Makes visible what model runs have used of budgets."""

from collections.abc import Mapping

from langchain_quota.admission import AcquireResult
from langchain_quota.decide import status
from langchain_quota.decision import Call
from langchain_quota.model_runs import ModelRun
from langchain_quota.raised import newly_raised, raised
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.telemetry.recorder import Recorder


def record_run(
    recorder: Recorder,
    call: Call,
    limits: ResolvedLimits,
    run: ModelRun,
    amounts: Mapping[str, int],
) -> None:
    """Count what a model run has spent.

    Args:
        recorder: Counts it.
        call: Names the agent and the thread that are charged.
        limits: The limits on model calls.
        run: The run.
        amounts: What it is charged, by the model's counter.
    """
    spent = [
        (each.limit.name, each.limit.unit, amounts[each.limit.counter])
        for each in limits.limits
        if each.is_budget
    ]
    recorder.record_spent(
        call.agent,
        call.thread_id,
        spent,
        model=next(iter(run.usage.models), ""),
        estimated=run.usage.estimated,
    )


def record_standing(  # noqa: PLR0913 - all of one charge
    recorder: Recorder,
    call: Call,
    limits: ResolvedLimits,
    *,
    before: Mapping[str, int],
    spent: Mapping[str, int],
    answer: AcquireResult | None,
    is_call: bool = True,
) -> None:
    """Make visible what is used of budgets after a charge, and what a store has newly granted.

    Args:
        recorder: Makes it visible.
        call: What is charged.
        limits: The limits on model calls.
        before: The state's counts before it, by name.
        spent: What is charged, by the model's counter.
        answer: The store's answer after it, by key; `None` without one.
        is_call: Whether the call itself is charged, and not what was used beside it.
    """
    counts: Mapping[str, int] = {}
    if answer is not None:
        counts = answer.used
        recorder.record_granted(call.agent, newly_raised(limits, answer.newly_granted))
        limits = raised(limits, answer.granted)
    for each in limits.limits:
        if each.is_budget:
            amount = spent.get(each.limit.counter, 0)
            rows = limits.rows(each)
            known = {**before}
            for row in rows:
                after = counts.get(row.key or "")
                if after is not None:
                    known[row.counter] = max(0, after - amount)
                known.setdefault(row.counter, 0)
            charged = status(each, rows, known, 1, spent=amount)
            recorder.record_charge(call, charged, is_call=is_call)
