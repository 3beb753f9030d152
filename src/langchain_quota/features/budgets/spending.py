"""Makes visible what model runs have used of budgets."""

from collections.abc import Mapping

from langchain_quota.admission import AcquireResult
from langchain_quota.decide import status
from langchain_quota.decision import Call
from langchain_quota.features.budgets.model_runs import ModelRun
from langchain_quota.rule import ResolvedLimits
from langchain_quota.telemetry.recorder import Recorder


def record_run(
    recorder: Recorder,
    call: Call,
    limits: ResolvedLimits,
    run: ModelRun,
    amounts: Mapping[str, int],
) -> None:
    """Count what a model run has spent."""
    spent = [
        (each.limit.name, each.limit.unit, amounts[each.limit.counter]) for each in limits.budgets
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
    """Make visible what is used of budgets after a charge, and what a store has newly granted."""
    counts: Mapping[str, int] = {}
    if answer is not None:
        counts = answer.used
        recorder.record_granted(call.agent, limits.newly_raised(answer.newly_granted))
        limits = limits.raised(answer.granted)
    for each in limits.budgets:
        amount = spent.get(each.limit.counter, 0)
        known = {**before}
        for check in each.checks:
            after = counts.get(check.key or "")
            if after is not None:
                known[check.counter] = max(0, after - amount)
            known.setdefault(check.counter, 0)
        recorder.record_charge(call, status(each, known, 1, spent=amount), is_call=is_call)
