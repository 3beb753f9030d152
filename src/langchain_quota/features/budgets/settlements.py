"""The requests with which a store charges what model runs have used of budgets."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter
from langchain_quota.decision import ROOT_RUN
from langchain_quota.features.budgets.model_runs import ModelRun
from langchain_quota.root_run import root_run
from langchain_quota.rule import ResolvedLimits

Used = tuple[ModelRun, Mapping[str, int]]
"""A model run, and what it is charged, by the model's counter."""


class Hold(NamedTuple):
    """What is held for a call."""

    # By the model's counter.
    amounts: Mapping[str, int] = {}
    # What a store was asked to hold it.
    request: str = ""


def settlements(
    limits: ResolvedLimits, counts: Mapping[str, int], used: Sequence[Used], hold: Hold
) -> AcquireRequest | None:
    """A request to charge model runs in place of what is held; `None` if no store counts them."""
    root = root_run()
    counts = {**counts, **(root.used if root is not None else {})}
    checks = [
        (check.key, check, each.limit.counter)
        for each in limits.budgets
        for check in each.checks
        if check.key is not None
    ]
    keys = {key: counter for key, _, counter in checks}
    starts = {key: counts.get(check.counter, 0) for key, check, _ in checks}
    most: dict[str, int] = {}
    for key, check, _ in checks:
        if check.most is not None:
            most[key] = min(check.most, most.get(key, check.most))
    made: list[Compensation] = []

    def add(name: str, amounts: Mapping[str, int], settles: str) -> None:
        begins = {key: starts[key] for key in amounts}
        shown = {key: most[key] for key in amounts if key in most}
        made.append(Compensation(name, amounts, starts=begins, settles=settles, limits=shown))

    # The first correction gives back what is held under all keys.
    held = hold.request
    if held and (not used or any(run.shared for run, _ in used)):
        add(uuid4().hex, dict.fromkeys(keys, 0), held)
        held = ""
    for run, amounts in used if keys else ():
        # A run holds nothing itself. But a store remembers settlements no longer than is needed.
        if not run.shared:
            add(run.id, {key: amounts[counter] for key, counter in keys.items()}, held or run.id)
            held = ""
            continue
        # Only the first agent that is charged for it makes the correction of a key.
        for key, counter in keys.items():
            if amounts[counter]:
                add(f"{run.id}/{key}", {key: amounts[counter]}, run.id)
    counters = {key: Counter(key, start) for key, start in starts.items()}
    return AcquireRequest("", "", counters, compensations=tuple(made)) if made else None


def mirror_root_run(limits: ResolvedLimits, answer: AcquireResult | None) -> None:
    """Keep what the store has counted of the root run, if a budget is per root run."""
    run = root_run()
    if run is not None and run.subject is not None and answer is not None:
        checks = (check for each in limits.budgets for check in each.checks)
        keys = {check.key for check in checks if check.per == ROOT_RUN}
        run.learn_used({key: n for key, n in answer.used.items() if key in keys})
