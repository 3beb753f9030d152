"""Charge what calls use to budgets: once, in the state, in the store and in telemetry.

The graph keeps no update of a call that fails, or that another middleware makes again, nor one of a
tool call. So this process keeps what was used, for the next hook of the run, or for the next run of
the thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple
from uuid import uuid4

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, CountRef
from langchain_quota.core.decide import Verdict
from langchain_quota.core.plans import LimitSet, Places, Plan
from langchain_quota.features.budgets.model_run import ModelRun
from langchain_quota.features.budgets.prices import Pricing
from langchain_quota.features.budgets.reports import charged_tokens
from langchain_quota.limits.call import ROOT_RUN, RUN, THREAD, Call
from langchain_quota.limits.options import BUDGETS, MILLISECONDS, NANODOLLARS
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.root_run import root_run, used_by
from langchain_quota.middleware.state import Amounts, Entries, State, feature_ledger, ledger, spent
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock
from langchain_quota.telemetry.labels import NONE

OWN = "budgets"
"""The name of the budgets' data in the ledger."""

MAX_LATE = 10_000
"""The most runs whose unsaved usage this process keeps, and the most tasks that it remembers."""

TaskMemory = Callable[[str], Entries]
"""Returns what this process remembers of one of the newest tasks, or of a refusal's message."""

Charged = dict[tuple[int, str], int]
"""The working time of calls inside of a call, by the id of a store and its key."""

_around: ContextVar[tuple[Charged, ...]] = ContextVar("langchain_quota_work", default=())
"""The time charged inside of each call around the running code, the outermost call first."""

_lock = fork_safe_lock()


class ChargeContext(NamedTuple):
    """Who is charged for a call: the state of a hook, the limits at that moment, and the call."""

    state: State
    limits: LimitSet
    places: Places
    call: Call
    # What is reserved for the call, by the model's counter.
    reserved: Mapping[str, int] = {}
    # The idempotency key of the request by which a store reserved it.
    request: str = ""
    # The task that has an answer, if no hook learns whether the graph writes it.
    answered_by: str = ""


@dataclass
class Work:
    """The working time of a call, and the part that calls inside of it have charged."""

    amount: int = 0
    inside: Charged = field(default_factory=dict)


class Stopwatch:
    """Measures the calls of runs, in milliseconds."""

    def __init__(self) -> None:
        # By run: the number of running calls, and the moment up to which their time is measured.
        self._running: dict[str, tuple[int, int]] = {}

    @contextmanager
    def measured(self, state: State) -> Iterator[Work]:
        """Measure the time since the last call of the same run ended; parallel calls count once."""
        work, run = Work(), _run(state) or uuid4().hex
        with _lock:
            number, since = self._running.get(run, (0, _now()))
            self._running[run] = number + 1, since
        token = _around.set((*_around.get(), work.inside))
        try:
            yield work
        finally:
            with _lock:
                number, since = self._running.pop(run)
                now = _now()
                if number > 1:
                    self._running[run] = number - 1, now
            work.amount = now - since
            # A coroutine that outlives its event loop is closed in another context.
            with suppress(ValueError):
                _around.reset(token)


def _now() -> int:
    return time.monotonic_ns() // 10**6


class UnsavedUsage:
    """Keeps the newest counts of runs until the graph's state has them."""

    # A state names the newest charge that is in its counts. So a branch of the thread that begins
    # at another state gets none of these counts. Usage that is dropped from here before it is
    # written is missing in the state's counts, but a store has it.

    def __init__(self) -> None:
        # By run: its newest counts, and the names of the charges that lead to them, in order.
        self._newest: dict[str, tuple[Entries, tuple[str, ...]]] = {}
        self._lock = fork_safe_lock()

    def of(self, state: State) -> Entries:
        """Return the newest counts of the state's run; empty if the state has them."""
        counts, names, saved = self._newest_of(state)
        return counts if saved in names[:-1] else {}

    def counts(self, state: State) -> dict[str, int]:
        """Return the budgets' use, by the name of the count."""
        of_thread, of_run = spent(state, self.of(state))
        return {
            f"{counter}/{scope}": amounts.get(counter, 0)
            for counter in BUDGETS
            for scope, amounts in ((THREAD, of_thread), (RUN, of_run))
        }

    def forget(self, state: State, task: str = "") -> None:
        """Forget the charges that a state of the graph has, and all of a branch that it left."""
        with self._lock:
            counts, names, saved = self._newest_of(state)
            if saved in names:
                names = names[names.index(saved) :]
                # The graph has another task's answer, so a state without it is in another branch.
                answers = {name.partition("/")[2] for name in names[1:]}
                if names == (saved,) or (task and answers - {"", task}):
                    del self._newest[_run(state)]
                else:
                    self._newest[_run(state)] = counts, names

    def keep(self, state: State, amounts: Mapping[str, int], answered_by: str = "") -> Entries:
        """Keep a charge until the state has it; return the counts to write."""
        with self._lock:
            counts, names, saved = self._newest_of(state)
            # The state's counts may be newer than these.
            if saved not in names[:-1]:
                counts = feature_ledger(state, OWN)
                # The model's step may have counts that the graph drops if the call fails.
                names = names if saved in names else (saved,)
            name, run = f"{uuid4().hex}/{answered_by}", _run(state)
            counts = {
                "thread_spent": added([counts.get("thread_spent") or {}, amounts]),
                "run_spent": added([counts.get("run_spent") or {}, amounts]),
                "spent_by": name,
            }
            self._newest.pop(run, None)
            if run:
                self._newest[run] = counts, (*names, name)
            if len(self._newest) > MAX_LATE:
                del self._newest[next(iter(self._newest))]
            return counts

    def _newest_of(self, state: State) -> tuple[Entries, tuple[str, ...], str]:
        """Return the newest counts of the state's run with their charges, and the state's own."""
        saved = feature_ledger(state, OWN).get("spent_by") or ""
        return *self._newest.get(_run(state), ({}, ())), saved


class Charging:
    """Charges calls to budgets."""

    def __init__(self, kernel: Kernel, counters: set[str], pricing: Pricing) -> None:
        self.late = UnsavedUsage()
        self._counters = [counter for counter in BUDGETS if counter in counters]
        self._pricing = pricing
        self._store = kernel.store
        self._recorder, self._near = kernel.recorder, kernel.near

    async def charge(
        self,
        mode: Mode | None,
        context: ChargeContext,
        runs: Sequence[ModelRun] = (),
        work: Work | None = None,
        *,
        is_call: bool = False,
    ) -> Entries:
        """Charge model runs and working time, and return the entries to write to the ledger.

        The runs of the agent's own call replace its reservation. Time that calls inside of this one
        have charged already is left out. Without a `mode` the store is charged in the background.
        """
        state, limits, call = context.state, context.limits, context.call
        worked = work.amount if work is not None and MILLISECONDS in self._counters else 0
        charged = [(run, *self._amounts(run, context.reserved, call.agent)) for run in runs]
        time_spent = {MILLISECONDS: worked} if worked else {}
        total = added([*(amounts for _, amounts, _ in charged), time_spent])
        before = self.late.counts(state)
        # The charge is kept first: what follows may fail or be cancelled.
        written = self.late.keep(state, total, context.answered_by)
        less = self._worked_inside(context, worked, work.inside if work else {})
        used = [(run, amounts) for run, amounts, _ in charged]
        answer = await self.settle(mode, settlements(context, before, used, time_spent, less))
        of_time = [each for each in limits.budgets if each.limit.counter == MILLISECONDS]
        if worked:
            times = [(budget.limit.name, budget.limit.unit, worked) for budget in of_time]
            self._recorder.record_spend(call, times, model=NONE, price="")
        for run, amounts, price in charged:
            self._recorder.record_spend(
                call,
                [
                    (budget.limit.name, budget.limit.unit, amounts[budget.limit.counter])
                    for budget in limits.budgets
                    if budget not in of_time
                ],
                model=next(iter(run.usage.models), ""),
                estimated=run.usage.estimated,
                price=price,
            )
        if is_call or mode is not None:
            # Otherwise, the next hook records it.
            charges = self._record(context, answer, before, total, is_call=is_call)
            # While the store is unavailable, so are its marks. The state only adds to budgets.
            if self._near.present and mode is not None and (answer or self._store is None):
                await self._near.tell(charges, {})
        return written

    def _record(
        self,
        context: ChargeContext,
        answer: AcquireResult | None,
        before: Mapping[str, int],
        total: Mapping[str, int],
        *,
        is_call: bool,
    ) -> list[Verdict]:
        """Record the charges of budgets, and return them."""
        limits, places, call = context.limits, context.places, context.call
        counts: Mapping[str, int] = {}
        if answer is not None:
            counts, run = answer.used, root_run()
            if run is not None and run.subject is not None:
                meters = (meter for budget in limits.budgets for meter in budget.meters)
                of_root = {meter.counter for meter in meters if meter.per == ROOT_RUN}
                run.learn_used({places[name].key: counts[name] for name in of_root & counts.keys()})
            self._recorder.record_grants(call.agent, limits.newly_raised(answer.newly_granted))
            limits = limits.raised(answer.granted)
        elif self._store is not None:
            # The counts of quotas are not known.
            limits = limits.without_store("allow")
        charges = []
        for budget in limits.budgets:
            amount = total.get(budget.limit.counter, 0)
            before_call = {
                name: max(0, counts[name] - amount) if name in counts else before.get(name, 0)
                for name in (meter.counter for meter in budget.meters)
            }
            charge = Verdict.of_charge(call, Plan.of([budget]), before_call, amount, places)
            self._recorder.record_charge(charge, is_call=is_call)
            charges.append(charge)
        return charges

    async def settle(self, mode: Mode | None, sent: AcquireRequest | None) -> AcquireResult | None:
        """Make corrections in the store, and return its result, or `None` without one."""
        if sent is None or self._store is None:
            return None
        if mode is not None:
            return await self._store.settle(mode, sent)
        self._store.settle_soon(sent)
        return None

    def _worked_inside(self, context: ChargeContext, worked: int, inside: Charged) -> Amounts:
        """Return the time charged inside of a call, by key; pass the rest on to outer calls."""
        if self._store is None or not worked:
            return {}
        store, less = id(self._store.store), {}
        for budget in context.limits.budgets:
            for meter in budget.meters if budget.limit.counter == MILLISECONDS else ():
                if (place := context.places.get(meter.counter)) is not None:
                    less[place.key] = min(worked, inside.get((store, place.key), 0))
        with _lock:
            for around in _around.get():
                for key, amount in less.items():
                    around[store, key] = around.get((store, key), 0) + worked - amount
        return less

    def _amounts(
        self, run: ModelRun, reserved: Mapping[str, int], agent: str | None
    ) -> tuple[dict[str, int], str]:
        """Return the charge of a run by counter, and whether its price is known."""
        # A run that was cut off is charged at least its reservation, because its usage is only an
        # estimate from the part that had arrived.
        usage, price = run.usage, "none"
        least = reserved if usage.estimated and not run.succeeded else {}
        amounts = {}
        for counter in self._counters:
            if counter == MILLISECONDS:
                amount = 0
            elif counter == NANODOLLARS:
                amount, price = self._pricing.cost(
                    usage, agent, reserved.get(counter, 0), cut_off=not run.succeeded
                )
            else:
                amount = charged_tokens(usage, counter)
            amounts[counter] = max(least.get(counter, 0), amount)
        return amounts, price


def settlements(
    context: ChargeContext,
    counts: Mapping[str, int],
    used: Sequence[tuple[ModelRun, Mapping[str, int]]] = (),
    time_spent: Mapping[str, int] = MappingProxyType({}),
    less: Mapping[str, int] = MappingProxyType({}),
) -> AcquireRequest | None:
    """Return a request that charges a call in place of its reserve; `None` without a store."""
    # The counts are those before the call. `less` is time that was charged already, by key.
    root, places = root_run(), context.places
    counts = {**counts, **(used_by(root, places) if root is not None else {})}
    meters = [
        (places[meter.counter].key, meter, budget.limit)
        for budget in context.limits.budgets
        for meter in budget.meters
        if meter.counter in places
    ]
    keys = {key: limit.counter for key, _, limit in meters}
    starts = {key: counts.get(meter.counter, 0) for key, meter, _ in meters}
    mirrored = {key for key, meter, _ in meters if places[meter.counter].mirrored}
    limits_by_key: Amounts = {}
    for key, meter, limit in meters:
        if meter.maximum is not None and limit.enforce:
            limits_by_key[key] = min(meter.maximum, limits_by_key.get(key, meter.maximum))
    corrections: list[Correction] = []

    def add(name: str, amounts: Amounts, settles: str) -> None:
        begins = {key: starts[key] for key in amounts}
        shown = {key: limits_by_key[key] for key in amounts if key in limits_by_key}
        kept = mirrored & amounts.keys()
        corrections.append(
            Correction(name, amounts, starts=begins, settles=settles, limits=shown, mirrored=kept)
        )

    for run, amounts in used if keys else ():
        # Only the first agent that is charged for it makes the correction of a key.
        for key, counter in keys.items() if run.shared else ():
            if amounts[counter]:
                add(f"{run.id}/{key}", {key: amounts[counter]}, context.request or run.id)
    # The last correction releases what is still reserved, and charges the use of all attempts.
    own = [(run.id, amounts) for run, amounts in used if not run.shared]
    if context.request or ((own or time_spent) and keys):
        total = added([*(amounts for _, amounts in own), time_spent])
        charged = {
            key: max(0, total.get(counter, 0) - less.get(key, 0)) for key, counter in keys.items()
        }
        name = own[0][0] if own else uuid4().hex
        # A store forgets settlements sooner than other corrections.
        add(name, charged, context.request or name)
    counters = {meter.counter: CountRef(key, starts[key]) for key, meter, _ in meters}
    return AcquireRequest("", "", counters, corrections=tuple(corrections)) if corrections else None


def added(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of several amounts, by counter."""
    total: dict[str, int] = {}
    for amounts in several:
        for counter, amount in amounts.items():
            total[counter] = total.get(counter, 0) + amount
    return total


def _run(state: State) -> str:
    return ledger(state).get("run") or ""
