"""The requests with which a store charges what finished model calls have used of budgets."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from uuid import uuid4

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter
from langchain_quota.decision import ROOT_RUN
from langchain_quota.middleware.root_run import root_run
from langchain_quota.rule import ResolvedLimits


def settlements(  # noqa: PLR0913 - keyword-only, with defaults
    limits: ResolvedLimits,
    counts: Mapping[str, int],
    used: Sequence[tuple[str, Mapping[str, int]]],
    *,
    held: str = "",
    held_keys: Mapping[str, str] = MappingProxyType({}),
    seen_by_others: bool = False,
) -> AcquireRequest | None:
    """A request that charges what model runs have used; `None` where a store counts none of it."""
    keys, starts = _kept(limits, counts)
    # What is held is settled where it is, also in a window that has ended meanwhile.
    keys = {**(held_keys or keys)}
    if not keys:
        return None
    starts = {key: start for key, start in starts.items() if key in keys}
    if seen_by_others:
        made = [each for run in used for each in _by_key(*run, keys, starts)]
    else:
        # A run holds nothing itself. But a store remembers settlements no longer than is needed.
        made = [
            Compensation(
                run, {key: amounts[each] for key, each in keys.items()}, starts=starts, settles=run
            )
            for run, amounts in used
        ]
    if held and (seen_by_others or not made):
        made.insert(0, Compensation(uuid4().hex, dict.fromkeys(keys, 0), starts=starts))
    if not made:
        return None
    if held:
        # The first one gives back what was held.
        made[0] = replace(made[0], settles=held)
    counters = {key: Counter(key, starts.get(key, 0)) for key in keys}
    shown = [replace(each, limits=_shown(limits, each.amounts)) for each in made]
    return AcquireRequest("", "", counters, compensations=tuple(shown))


def _shown(limits: ResolvedLimits, keys: Collection[str]) -> dict[str, int]:
    """The least limit under each key."""
    found: dict[str, int] = {}
    for check in (check for each in limits.budgets for check in each.checks):
        if check.key is not None and check.key in keys and check.most is not None:
            found[check.key] = min(check.most, found.get(check.key, check.most))
    return found


def charge_by_key(
    limits: ResolvedLimits, counts: Mapping[str, int], run: str, amounts: Mapping[str, int]
) -> AcquireRequest:
    """A request that charges a model run to each key, unless another agent has charged it there."""
    keys, starts = _kept(limits, counts)
    counters = {key: Counter(key, starts[key]) for key in keys}
    made = tuple(_by_key(run, amounts, keys, starts))
    return AcquireRequest("", "", counters, compensations=made)


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
