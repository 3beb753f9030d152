"""The requests with which a store charges what finished model calls have used of budgets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter
from langchain_quota.decision import ROOT_RUN
from langchain_quota.features.root_run.run import root_run
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import Held, ledger


def settlements(
    state: Mapping[str, Any],
    limits: ResolvedLimits,
    counts: Mapping[str, int],
    used: Sequence[tuple[str, Mapping[str, int]]],
    *,
    seen_by_others: bool = False,
) -> AcquireRequest | None:
    """A request that charges what model runs have used; `None` where a store counts none of it."""
    keys, starts = _kept(limits, counts)
    held = ledger(state).get("held")
    if held is not None and not held["keys"]:
        held = None
    if held is not None:
        # Also in a window that has ended meanwhile.
        keys = held["keys"]
    if not keys:
        return None
    starts = {key: start for key, start in starts.items() if key in keys}
    nothing = Compensation(uuid4().hex, dict.fromkeys(keys, 0), starts=starts)
    if seen_by_others:
        made = [nothing, *(each for run in used for each in _by_key(*run, keys, starts))]
    else:
        made = [
            Compensation(run, {key: amounts[each] for key, each in keys.items()}, starts=starts)
            for run, amounts in used
        ] or [nothing]
    if held is not None:
        # The first one gives back what was held.
        made[0] = replace(made[0], settles=held["request"])
    counters = {key: Counter(key, starts.get(key, 0)) for key in keys}
    return AcquireRequest("", "", counters, compensations=tuple(made))


def charge_by_key(
    limits: ResolvedLimits, counts: Mapping[str, int], run: str, amounts: Mapping[str, int]
) -> AcquireRequest:
    """A request that charges a model run to each key, unless another agent has charged it there."""
    keys, starts = _kept(limits, counts)
    counters = {key: Counter(key, starts[key]) for key in keys}
    made = tuple(_by_key(run, amounts, keys, starts))
    return AcquireRequest("", "", counters, compensations=made)


def given_back(several: Sequence[Held]) -> AcquireRequest | None:
    """A request that gives back what is held for calls that are not made; `None` for nothing."""
    made = tuple(
        Compensation(uuid4().hex, dict.fromkeys(held["keys"], 0), settles=held["request"])
        for held in several
        if held["keys"]
    )
    return AcquireRequest("", "", compensations=made) if made else None


def joined(several: Sequence[AcquireRequest]) -> AcquireRequest | None:
    """One request for the corrections of several; `None` if there is none."""
    made = tuple(each for sent in several for each in sent.compensations)
    counters = {key: counter for sent in several for key, counter in sent.counters.items()}
    return AcquireRequest("", "", counters, compensations=made) if made else None


def _kept(
    limits: ResolvedLimits, counts: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, int]]:
    """The model's counter of each of the store's keys, and the count from which the key starts."""
    checks = [
        (each.limit.counter, check.key, check.counter)
        for each in limits.budgets
        for check in each.checks
        if check.key is not None
    ]
    run = root_run()
    if run is not None:
        counts = {**counts, **run.used}
    keys = {key: counter for counter, key, _ in checks}
    return keys, {key: counts.get(count, 0) for _, key, count in checks}


def _by_key(
    run: str, amounts: Mapping[str, int], keys: Mapping[str, str], starts: Mapping[str, int]
) -> Iterator[Compensation]:
    """Corrections that charge a model run: one per key, which only the first agent makes."""
    # They settle a request that holds nothing, so a store remembers them as long as settlements.
    for key, counter in keys.items():
        if amounts[counter]:
            start = {key: starts[key]} if key in starts else {}
            yield Compensation(f"{run}/{key}", {key: amounts[counter]}, starts=start, settles=run)


def mirror_root_run(limits: ResolvedLimits, answer: AcquireResult | None) -> None:
    """Keep what the store has counted of the root run, if a budget is per root run."""
    run = root_run()
    if run is None or run.subject is None or answer is None:
        return
    counts = answer.used
    checks = (check for each in limits.budgets for check in each.checks)
    keys = {check.key for check in checks if check.per == ROOT_RUN}
    run.learn_used({key: counts[key] for key in counts.keys() & keys})
