"""Charges budgets for all model runs of an agent's run that are not its own model calls.

Tools, sub-agents and other middlewares make them. Each run is charged when it ends:

- The next hook that writes the state adds it there, perhaps in the thread's next run.
- A store counts it before the agent's next model call is judged. If it ends after the last hook,
  the store is asked at once, or with the next request of this process.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.decision import Call
from langchain_quota.locks import fork_safe_lock
from langchain_quota.middleware._late_use import LateUse, added
from langchain_quota.middleware._model_calls import budget_counts, made
from langchain_quota.middleware._run_tree import enable_run_trees, run_tree
from langchain_quota.middleware._settlements import charge_by_key, joined, mirror_root_run
from langchain_quota.middleware._spending import record_run, record_standing
from langchain_quota.middleware._store import StoreClient
from langchain_quota.model_runs import ModelRun, ModelRunCollector
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import LEDGER, ledger
from langchain_quota.telemetry.recorder import Recorder

Amounts = Callable[[ModelRun, str | None], Mapping[str, int]]
"""Computes what a model run is charged, by the model's counter, from the run and the agent."""


class _Step(NamedTuple):
    """The newest step of a run of an agent.

    Attributes:
        state: Our part of the agent's state.
        limits: The limits on the agent's model calls.
        call: Names the agent and the thread.
        is_sync: Whether its hooks are sync: they may wait for the store.
    """

    state: Mapping[str, Any]
    limits: ResolvedLimits
    call: Call
    is_sync: bool


class _Charged(NamedTuple):
    """What model runs are charged between two hooks.

    Attributes:
        amounts: What each model run is charged, by the model's counter.
        sent: What a store is to be asked for each of them.
    """

    amounts: list[Mapping[str, int]]
    sent: list[AcquireRequest]


@dataclass(kw_only=True)
class _Common:
    """What all runs of an agent share; see `OtherRuns`."""

    amounts: Amounts
    late: LateUse
    store: StoreClient | None
    recorder: Recorder


class _AgentRun:
    """A run of an agent, which is charged the model runs below it.

    Args:
        common: What all runs of the agent share.
        step: Its step.
    """

    def __init__(self, common: _Common, step: _Step) -> None:
        self._step = step
        self._common = common
        self._own: list[ModelRunCollector] = []
        self._with_calls: set[str] = set()
        self._since_hook = _Charged([], [])
        self._ended = False
        self._lock = fork_safe_lock()

    def receive(self, run: ModelRun) -> None:
        """Charge a model run that has ended, unless it is one of the agent's own calls."""
        if run.id in self._with_calls or any(run.id in each for each in self._own):
            return
        common = self._common
        amounts = common.amounts(run, self._step.call.agent)
        with self._lock:
            state, limits, call, _ = self._step
            counts = budget_counts(state, common.late.of(state))
            # The state's newest use is only forgotten when the step has changed.
            common.late.keep(state, amounts)
        record_run(common.recorder, call, limits, run, amounts)
        sent = charge_by_key(limits, counts, run.id, amounts)
        with self._lock:
            if not self._ended:
                self._since_hook.amounts.append(amounts)
                self._since_hook.sent.append(sent)
                return
        self._send(sent)

    def learn_step(self, step: _Step) -> None:
        """Learn the run's newest step."""
        with self._lock:
            self._step = step

    def learn_state(self, state: Mapping[str, Any]) -> None:
        """Learn our part of the state after the call of that step."""
        with self._lock:
            self._step = self._step._replace(state=state)

    def close(self) -> None:
        """Have the store charge what no later hook will charge."""
        with self._lock:
            self._ended = True
        self._send(joined(self.take().sent))

    def take(self) -> _Charged:
        """What was charged since this was last called."""
        with self._lock:
            taken, self._since_hook = self._since_hook, _Charged([], [])
        return taken

    @contextmanager
    def leave_out(self, collector: ModelRunCollector) -> Iterator[None]:
        """Leave out the model runs of the agent's own call in the block, even if they end later."""
        self._own.append(collector)
        try:
            yield
        finally:
            # The call is charged an estimate for those that still run.
            self._with_calls |= {each.id for each in collector.runs() if each.status == "pending"}
            self._own.remove(collector)

    def _send(self, sent: AcquireRequest | None) -> None:
        """Have the store charge what ends after the last hook of the run."""
        if self._common.store is not None and sent is not None:
            may_wait = self._step.is_sync and not _in_event_loop()
            self._common.store.settle_soon(sent, may_wait=may_wait)


class OtherRuns:
    """Charges the model runs of an agent's run that its own model calls do not make.

    Args:
        amounts: Computes what a model run is charged.
        late: Keeps the amounts until the state has them.
        store: The store; `None` without one.
        recorder: Makes visible what is charged.
    """

    def __init__(
        self, amounts: Amounts, *, late: LateUse, store: StoreClient | None, recorder: Recorder
    ) -> None:
        enable_run_trees()
        self._common = _Common(amounts=amounts, late=late, store=store, recorder=recorder)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware charges the same counts."""
        return self

    def settle(self, state: Mapping[str, Any], runtime: Any, limits: ResolvedLimits) -> None:
        """Have the store charge what the run has used, before its next model call is judged.

        Args:
            state: The agent's state.
            runtime: The hook's runtime.
            limits: The limits on model calls.
        """
        step = _Step({LEDGER: ledger(state)}, limits, made(state, runtime), is_sync=True)
        charged = self._since_last_hook(step)
        if charged is not None:
            sent, store = joined(charged.sent), self._common.store
            answer = None if store is None or sent is None else store.settle(sent)
            self._settled(step, charged, answer)

    async def asettle(self, state: Mapping[str, Any], runtime: Any, limits: ResolvedLimits) -> None:
        """Have the store charge what the run has used, before its next model call is judged.

        Args:
            state: The agent's state.
            runtime: The hook's runtime.
            limits: The limits on model calls.
        """
        step = _Step({LEDGER: ledger(state)}, limits, made(state, runtime), is_sync=False)
        charged = self._since_last_hook(step)
        if charged is not None:
            sent, store = joined(charged.sent), self._common.store
            answer = None if store is None or sent is None else await store.asettle(sent)
            self._settled(step, charged, answer)

    def learn_state(self, state: Mapping[str, Any]) -> None:
        """Learn the state after a model call.

        Args:
            state: The agent's state.
        """
        found = self._running()
        if found is not None:
            found.learn_state({LEDGER: ledger(state)})

    @contextmanager
    def leave_out(self, collector: ModelRunCollector) -> Iterator[None]:
        """Leave out the model runs of the agent's own call in the block: the call charges them.

        Args:
            collector: Collects these model runs.
        """
        found = self._running()
        if found is None:
            yield
        else:
            with found.leave_out(collector):
                yield

    @staticmethod
    def _running() -> _AgentRun | None:
        """The run of the agent that the running node belongs to; `None` if it is not known."""
        tree, node = run_tree()
        graph_run = None if tree is None else tree.graph_run(node)
        found = None if tree is None or graph_run is None else tree.watcher(graph_run)
        return found if isinstance(found, _AgentRun) else None

    def _since_last_hook(self, step: _Step) -> _Charged | None:
        """What the run of a hook was charged since its last one; `None` for nothing."""
        tree, node = run_tree()
        graph_run = None if tree is None else tree.graph_run(node)
        if tree is None or graph_run is None:
            return None
        found = tree.watcher(graph_run)
        if isinstance(found, _AgentRun):
            found.learn_step(step)
        else:
            found = _AgentRun(self._common, step)
            tree.watch(graph_run, found)
        tree.end_cancelled(graph_run)
        charged = found.take()
        return charged if charged.amounts else None

    def _settled(self, step: _Step, charged: _Charged, answer: AcquireResult | None) -> None:
        """Learn the use of budgets and make it visible, with the store's counts if it answered."""
        mirror_root_run(step.limits, answer)
        spent = added(charged.amounts)
        late = self._common.late.of(step.state)
        # With what was just charged.
        known = budget_counts(step.state, late)
        before = {name: n - spent.get(name.rpartition("/")[0], 0) for name, n in known.items()}
        record_standing(
            self._common.recorder,
            step.call,
            step.limits,
            before=before,
            spent=spent,
            answer=answer,
            is_call=False,
        )


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
