"""Charge model runs to budgets: once, in the state, in the store and in telemetry.

The graph keeps no update of a call that fails, or that another middleware makes again. So this
process keeps what was used, for the next hook of the run, or for the next run of the thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, CountRef
from langchain_quota.core.checks import ResolvedLimits
from langchain_quota.core.decide import status
from langchain_quota.features.budgets.model_runs import ModelRun
from langchain_quota.features.budgets.prices import Pricing
from langchain_quota.features.budgets.reports import charged_tokens
from langchain_quota.features.budgets.work import Work, marked, pass_on
from langchain_quota.limits.call import ROOT_RUN, RUN, THREAD, Call
from langchain_quota.limits.options import BUDGETS, MILLISECONDS, NANODOLLARS, TOKENS
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.log_lines import charge_line
from langchain_quota.middleware.root_run import root_run
from langchain_quota.middleware.state import Amounts, State, feature_ledger, ledger, spent
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock
from langchain_quota.telemetry.labels import NONE

OWN = "budgets"
"""The name of the budgets' data in the ledger."""

MAX_LATE = 10_000
"""The most runs whose unsaved usage this process keeps."""


class WorkTime(NamedTuple):
    """Time that a call has worked."""

    id: str
    shared: bool = False


Used = tuple[ModelRun | WorkTime, Mapping[str, int]]
"""A model run or working time, and its charges, by the model's counter."""


class ChargeContext(NamedTuple):
    """Who is charged: the state of a hook, the limits at that moment, and the call."""

    state: State
    limits: ResolvedLimits
    call: Call


class Reservation(NamedTuple):
    """The amounts that are reserved for a call."""

    # By the model's counter.
    amounts: Mapping[str, int] = {}
    # The idempotency key of the request by which a store reserved them.
    request: str = ""


class _NewestCounts(NamedTuple):
    """The newest counts of a run, and the names of the charges that lead to them, in order."""

    names: tuple[str, ...] = ()
    counts: Mapping[str, Any] = {}
    # The task of the newest call.
    task: str | None = None


class UnsavedUsage:
    """Keeps the newest counts of runs until the graph's state has them."""

    # A state names the newest charge that is in its counts. So a branch of the thread that begins
    # at another state gets none of these counts. Usage that is dropped from here before it is
    # written is missing in the state's counts, but a store has it.

    def __init__(self) -> None:
        self._newest: dict[str, _NewestCounts] = {}
        self._lock = fork_safe_lock()

    def of(self, state: State) -> Mapping[str, Any]:
        """Return the newest counts of the state's run; empty if the state has them."""
        unsaved, saved = self._newest_of(state)
        counts = unsaved.counts if saved in unsaved.names[:-1] else {}
        entries = counts or feature_ledger(state, OWN)
        # Tools of this step may have run in another process.
        times = marked(state, _run(state))
        charged = entries.get("tools", ())
        uncharged = {name: time for name, time in times.items() if name not in charged}
        if not uncharged:
            return counts
        return {**counts, **_plus(entries, {MILLISECONDS: sum(uncharged.values())}, uncharged)}

    def counts(self, state: State) -> dict[str, int]:
        """Return the budgets' use, by the name of the count."""
        return counts_of(state, self.of(state))

    def has_made(self, task: str | None, state: State) -> bool:
        """Return whether the newest call of the state's run was made in this task."""
        return task is not None and self._newest_of(state)[0].task == task

    def forget(self, state: State) -> None:
        """Forget the charges that a state of the graph has."""
        with self._lock:
            unsaved, saved = self._newest_of(state)
            if saved in unsaved.names:
                remaining = unsaved.names[unsaved.names.index(saved) :]
                self._newest[_run(state)] = unsaved._replace(names=remaining)
                if len(remaining) == 1:
                    del self._newest[_run(state)]

    def keep(
        self,
        state: State,
        amounts: Mapping[str, int],
        task: str | None,
        *,
        is_tool: bool = False,
    ) -> Mapping[str, Any]:
        """Keep a charge until the state has it; return the counts to write."""
        with self._lock:
            unsaved, saved = self._newest_of(state)
            # The state's counts may be newer than these.
            if saved not in unsaved.names[:-1]:
                unsaved = _NewestCounts((saved,), feature_ledger(state, OWN))
            name = uuid4().hex
            counts = _plus(unsaved.counts, amounts, [name] if is_tool else ())
            counts["spent_by"] = name
            self._newest.pop(_run(state), None)
            if _run(state):
                self._newest[_run(state)] = _NewestCounts(
                    (*unsaved.names, name), counts, task or unsaved.task
                )
            if len(self._newest) > MAX_LATE:
                del self._newest[next(iter(self._newest))]
            return counts

    def _newest_of(self, state: State) -> tuple[_NewestCounts, str]:
        """Return the newest counts of the state's run, and the newest charge that the state has."""
        saved = feature_ledger(state, OWN).get("spent_by") or ""
        return self._newest.get(_run(state), _NewestCounts()), saved


class Charging:
    """Charges model runs."""

    def __init__(self, kernel: Kernel, counters: set[str], pricing: Pricing) -> None:
        self.late = UnsavedUsage()
        self._counters = [counter for counter in BUDGETS if counter in counters]
        self._pricing = pricing
        self._store = kernel.store
        self._recorder = kernel.recorder
        self._observers = kernel.observers

    async def charge(  # noqa: PLR0913 - what a call has used
        self,
        mode: Mode | None,
        step: ChargeContext,
        runs: Sequence[ModelRun],
        hold: Reservation | None = None,
        *,
        task: str | None = None,
        work: Work | None = None,
        is_tool: bool = False,
    ) -> Mapping[str, Any]:
        """Charge model runs and working time, and return the entries to write to the ledger.

        The runs of the agent's own call replace its reservation. Time that calls inside of this one
        have charged already is left out. Without a `mode` the store is charged in the background.
        """
        (state, limits, call), held = step, hold or Reservation()
        worked = work.amount if work is not None and MILLISECONDS in self._counters else 0
        charged = [(run, *self._amounts(run, held.amounts, call.agent)) for run in runs]
        used: list[Used] = [(run, amounts) for run, amounts, _ in charged]
        if worked:
            nothing = dict.fromkeys(self._counters, 0)
            used.append((WorkTime(uuid4().hex), {**nothing, MILLISECONDS: worked}))
        total = added(amounts for _, amounts in used)
        before = self.late.counts(state)
        # The charge is kept first: what follows may fail or be cancelled.
        written = self.late.keep(state, total, task, is_tool=is_tool)
        if self._observers.logs and used:
            tokens = ({of: charged_tokens(run.usage, of) for of in TOKENS} for run in runs)
            self._observers.log(charge_line, state, {**added(tokens), **total})
        less = self._worked_inside(limits, worked, work.inside if work else {})
        answer = await self.settle(mode, settlements(limits, before, used, held, less))
        of_time = [
            budget.limit for budget in limits.budgets if budget.limit.counter == MILLISECONDS
        ]
        if worked:
            times = [(limit.name, limit.unit, worked) for limit in of_time]
            self._recorder.record_spend(call, times, model=NONE, price="")
        for run, amounts, price in charged:
            self._recorder.record_spend(
                call,
                [
                    (budget.limit.name, budget.limit.unit, amounts[budget.limit.counter])
                    for budget in limits.budgets
                    if budget.limit not in of_time
                ],
                model=next(iter(run.usage.models), ""),
                estimated=run.usage.estimated,
                price=price,
            )
        if hold is not None:
            # After this call, the answers of earlier tools are not read again.
            times_by_name = marked(state, _run(state))
            tools = [name for name in written["tools"] if name in times_by_name]
            written = {**written, "tools": tools}
        elif mode is None:
            # The next hook records it.
            return written
        self.record(step, answer, before, total, is_call=hold is not None)
        return written

    def record(
        self,
        step: ChargeContext,
        answer: AcquireResult | None,
        before: Mapping[str, int],
        total: Mapping[str, int],
        *,
        is_call: bool,
    ) -> None:
        """Record the charges of budgets."""
        _, limits, call = step
        counts: Mapping[str, int] = {}
        if answer is not None:
            counts = answer.used
            _mirror_root_run(limits, counts)
            self._recorder.record_grants(call.agent, limits.newly_raised(answer.newly_granted))
            limits = limits.raised(answer.granted)
        elif self._store is not None:
            # The counts of quotas are not known.
            limits = limits.without_store("allow")
        for budget in limits.budgets:
            amount = total.get(budget.limit.counter, 0)
            before_call = {check.counter: before.get(check.counter, 0) for check in budget.checks}
            for check in budget.checks:
                after = counts.get(check.key or "")
                if after is not None:
                    before_call[check.counter] = max(0, after - amount)
            shown = status(budget, before_call, 1, spent=amount)
            self._recorder.record_charge(call, shown, is_call=is_call)

    async def settle(self, mode: Mode | None, sent: AcquireRequest | None) -> AcquireResult | None:
        """Make corrections in the store; return its result by key, or `None` without one."""
        if sent is None or self._store is None:
            return None
        if mode is not None:
            return await self._store.settle(mode, sent)
        self._store.settle_soon(sent)
        return None

    def _worked_inside(
        self, limits: ResolvedLimits, worked: int, inside: Mapping[tuple[int, str], int]
    ) -> dict[str, int]:
        """Return the time charged inside of a call, by key; pass the rest on to outer calls."""
        if self._store is None or not worked:
            return {}
        store = self._store.store
        less = {
            check.key: min(worked, inside.get((id(store), check.key), 0))
            for budget in limits.budgets
            for check in budget.checks
            if check.key is not None and budget.limit.counter == MILLISECONDS
        }
        pass_on(store, {key: worked - amount for key, amount in less.items()})
        return less

    def _amounts(
        self, run: ModelRun, held: Mapping[str, int], agent: str | None
    ) -> tuple[dict[str, int], str]:
        """Return the charge of a run by counter, and whether its price is known."""
        # A run that was cut off is charged at least its reservation, because its usage is only an
        # estimate from the part that had arrived.
        usage, price = run.usage, "none"
        least = held if usage.estimated and not run.succeeded else {}
        amounts = {}
        for counter in self._counters:
            if counter == MILLISECONDS:
                amount = 0
            elif counter == NANODOLLARS:
                amount, price = self._pricing.cost(usage, agent, held.get(counter, 0))
            else:
                amount = charged_tokens(usage, counter)
            amounts[counter] = max(least.get(counter, 0), amount)
        return amounts, price


def settlements(
    limits: ResolvedLimits,
    counts: Mapping[str, int],
    used: Sequence[Used],
    hold: Reservation,
    less: Mapping[str, int] | None = None,
) -> AcquireRequest | None:
    """Return a request that charges model runs in place of a reserve; `None` without a store."""
    less = less or {}
    root = root_run()
    counts = {**counts, **(root.used if root is not None else {})}
    checks = [
        (check.key, check, budget.limit.counter)
        for budget in limits.budgets
        for check in budget.checks
        if check.key is not None
    ]
    keys = {key: counter for key, _, counter in checks}
    starts = {key: counts.get(check.counter, 0) for key, check, _ in checks}
    limits_by_key: Amounts = {}
    for key, check, _ in checks:
        if check.maximum is not None:
            limits_by_key[key] = min(check.maximum, limits_by_key.get(key, check.maximum))
    corrections: list[Correction] = []

    def add(name: str, amounts: Amounts, settles: str) -> None:
        begins = {key: starts[key] for key in amounts}
        shown = {key: limits_by_key[key] for key in amounts if key in limits_by_key}
        corrections.append(Correction(name, amounts, starts=begins, settles=settles, limits=shown))

    for run, amounts in ((run, amounts) for run, amounts in used if run.shared and keys):
        # Only the first agent that is charged for it makes the correction of a key.
        for key, counter in keys.items():
            if amounts[counter]:
                name = f"{run.id}/{key}"
                add(name, {key: amounts[counter]}, hold.request or run.id)
    # The last correction releases what is still reserved, and charges the use of all attempts.
    own = [(run.id, amounts) for run, amounts in used if not run.shared]
    if hold.request or (own and keys):
        total = added(amounts for _, amounts in own)
        charged = {
            key: max(0, total.get(counter, 0) - less.get(key, 0)) for key, counter in keys.items()
        }
        name = own[0][0] if own else uuid4().hex
        # A store forgets settlements sooner than other corrections.
        add(name, charged, hold.request or name)
    counters = {key: CountRef(key, start) for key, start in starts.items()}
    return AcquireRequest("", "", counters, corrections=tuple(corrections)) if corrections else None


def counts_of(state: State, entries: Mapping[str, Any] = MappingProxyType({})) -> dict[str, int]:
    """Return the budgets' use by the name of the count; `entries` may have newer counts."""
    of_thread, of_run = spent(state, entries)
    return {
        f"{counter}/{scope}": spent.get(counter, 0)
        for counter in BUDGETS
        for scope, spent in ((THREAD, of_thread), (RUN, of_run))
    }


def _plus(
    counts: Mapping[str, Any], amounts: Mapping[str, int], tools: Iterable[str]
) -> dict[str, Any]:
    """Return the counts after a charge, with the tool calls that the newest answers may name."""
    return {
        "thread_spent": added([counts.get("thread_spent") or {}, amounts]),
        "run_spent": added([counts.get("run_spent") or {}, amounts]),
        "tools": [*counts.get("tools", ()), *tools],
    }


def added(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of several amounts, by counter."""
    total: dict[str, int] = {}
    for amounts in several:
        for counter, amount in amounts.items():
            total[counter] = total.get(counter, 0) + amount
    return total


def _mirror_root_run(limits: ResolvedLimits, counts: Mapping[str, int]) -> None:
    """Keep the store's counts of the root run, if a budget is per root run."""
    run = root_run()
    if run is not None and run.subject is not None:
        checks = (check for budget in limits.budgets for check in budget.checks)
        keys = {check.key for check in checks if check.per == ROOT_RUN}
        run.learn_used({key: n for key, n in counts.items() if key in keys})


def _run(state: State) -> str:
    return ledger(state).get("run") or ""
