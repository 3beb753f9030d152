"""Charges budgets for all model runs of an agent's run that are not its own model calls.

Tools, sub-agents and other middlewares make them. One callback handler sees all runs of a root run,
each with the run that has started it: so it knows which agents a model run belongs to. An agent is
charged before its next model call is judged, and when its run ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.tracers.context import register_configure_hook

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.concurrency import Form, fork_safe_lock
from langchain_quota.decision import Call
from langchain_quota.features.budgets.late_use import LateUse, added
from langchain_quota.features.budgets.model_runs import ModelRun, ModelRunCollector
from langchain_quota.features.budgets.settlements import charge_by_key, joined, mirror_root_run
from langchain_quota.features.budgets.spending import record_run, record_standing
from langchain_quota.middleware.calls import budget_counts, model_call
from langchain_quota.middleware.context import DECISION, running_config
from langchain_quota.rule import ResolvedLimits
from langchain_quota.state import LEDGER, ledger
from langchain_quota.stores.client import StoreClient
from langchain_quota.telemetry.recorder import Recorder

MAX_ENDED = 10_000
"""The most ended runs that a root run keeps: what they have started may go on."""

MAX_RECENT = 1_000
"""The most ended model runs that a root run keeps for agents whose first hook has not run yet."""


class RootModels(ModelRunCollector):
    """The model runs of a root run, handed to the agents' runs that enclose them."""

    ignore_agent = ignore_retriever = False

    def __init__(self) -> None:
        super().__init__()
        self.agents: dict[UUID, _AgentRun] = {}
        # The run that has started each run, and the namespace of its task of a graph.
        self._places: dict[UUID, tuple[UUID | None, str | None]] = {}
        self._ended: deque[UUID] = deque()
        # The asyncio tasks in which model runs have started.
        self._tasks: dict[UUID, asyncio.Task[Any]] = {}
        self._recent: deque[tuple[ModelRun, Sequence[UUID]]] = deque(maxlen=MAX_RECENT)
        self._lock = fork_safe_lock()

    def graph_run(self, node: UUID | None) -> UUID | None:
        """The run of the graph that a node belongs to; `None` if it is not known."""
        run, (parent, task) = node, self._places.get(cast("UUID", node), (None, None))
        within = task
        while task is not None and within == task:
            run = parent
            parent, within = self._places.get(cast("UUID", run), (None, None))
        return None if task is None else run

    def watch(self, graph_run: UUID, agent: "_AgentRun") -> None:
        """Hand an agent's run the model runs below it, earlier ones too."""
        with self._lock:
            self.agents[graph_run] = agent
            earlier = [run for run, enclosing in self._recent if graph_run in enclosing]
        for run in earlier:
            agent.receive(run)

    def end_cancelled(self, graph_run: UUID) -> None:
        """End the model runs below a run whose asyncio task is over: LangChain tells nobody."""
        for run_id, task in [*self._tasks.items()]:
            if task.done() and graph_run in self._enclosing(run_id):
                self._hand_over(run_id)

    def forget(self, run_id: UUID) -> ModelRun | None:
        """Forget a model run, and return it."""
        self._tasks.pop(run_id, None)
        self._places.pop(run_id, None)
        return self.pop(run_id)

    def on_chain_start(
        self,
        *given: Any,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Learn which run has started this one."""
        task = (metadata or {}).get("langgraph_checkpoint_ns")
        self._places[run_id] = self._parent(parent_run_id), task
        if more.get("run_type") == DECISION:
            more |= {"parent_run_id": parent_run_id, "metadata": metadata}
            super().on_chain_start(*given, run_id=run_id, **more)

    on_tool_start = on_retriever_start = on_chain_start

    def on_chain_end(self, *given: Any, run_id: UUID, **__: object) -> None:
        """Learn that a run has ended; of too many, forget the one that ended first."""
        if run_id in self._runs:
            super().on_chain_end(*given, run_id=run_id)
            return
        self._ended.append(run_id)
        if len(self._ended) > MAX_ENDED:
            self._places.pop(self._ended.popleft(), None)
        agent = self.agents.get(run_id)
        if agent is not None:
            self.end_cancelled(run_id)
            with self._lock:
                del self.agents[run_id]
            agent.close()

    on_tool_end = on_tool_error = on_retriever_end = on_retriever_error = on_chain_end

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Learn that a run has failed."""
        ended = super().on_chain_error if run_id in self._runs else self.on_chain_end
        ended(error, run_id=run_id)

    def _start(
        self,
        run_id: UUID,
        prompt: Sequence[BaseMessage],
        metadata: Mapping[str, Any] | None,
        more: Mapping[str, Any],
    ) -> None:
        self._places[run_id] = self._parent(more.get("parent_run_id")), None
        with suppress(RuntimeError):
            task = asyncio.current_task()
            if task is not None:
                self._tasks[run_id] = task
        super()._start(run_id, prompt, metadata, more)

    def _parent(self, named: UUID | None) -> UUID | None:
        """The run that has started one: the running one, if its callbacks were not passed on."""
        models, running = (None, None) if named else root_models()
        return running if models is self else named

    def _end(self, run_id: UUID, **run: Any) -> None:
        super()._end(run_id, **run)
        self._hand_over(run_id)

    def _hand_over(self, run_id: UUID) -> None:
        enclosing, run = self._enclosing(run_id), self.forget(run_id)
        if run is not None:
            with self._lock:
                self._recent.append((run, enclosing))
                agents = [self.agents[each] for each in enclosing if each in self.agents]
            for agent in agents:
                agent.receive(run)

    def _enclosing(self, run_id: UUID) -> list[UUID]:
        found: list[UUID] = []
        parent, _ = self._places.get(run_id, (None, None))
        while parent is not None:
            found.append(parent)
            parent, _ = self._places.get(parent, (None, None))
        return found


class _NewRootModels:
    """Gives LangChain a handler for each run that has inherited none, as a context variable."""

    def get(self) -> RootModels:
        return root_models()[0] or RootModels()


@cache
def _watch_root_runs() -> None:
    """Watch every root run of the process that begins from now on."""
    variable = cast("ContextVar[Any]", _NewRootModels())
    register_configure_hook(variable, inheritable=True, handle_class=RootModels)


def root_models() -> tuple[RootModels | None, UUID | None]:
    """The handler of the running node, and the run of that node; `None` where there is none."""
    callbacks = running_config().get("callbacks")
    handlers = getattr(callbacks, "inheritable_handlers", ())
    found = next((each for each in handlers if isinstance(each, RootModels)), None)
    return found, getattr(callbacks, "parent_run_id", None)


def forget_refused(collector: ModelRunCollector) -> None:
    """Forget the model runs that a collector has refused: the handler of the root run saw them."""
    models, _ = root_models() if collector.refused else (None, None)
    for each in collector.refused if models is not None else ():
        cast("RootModels", models).forget(each)


class _Step(NamedTuple):
    """The newest hook of a run: our part of the state, the limits, and who is charged."""

    state: Mapping[str, Any]
    limits: ResolvedLimits
    call: Call


class _AgentRun:
    """A run of an agent, which is charged the model runs below it."""

    def __init__(self, others: "OtherRuns", step: _Step) -> None:
        self.own: list[ModelRunCollector] = []
        self._others = others
        self._step = step
        self._since_hook: list[tuple[Mapping[str, int], AcquireRequest]] = []
        self._lock = fork_safe_lock()

    def receive(self, run: ModelRun) -> None:
        """Charge a model run that has ended, unless it is one of the agent's own calls."""
        if any(run.id in each for each in self.own):
            return
        others = self._others
        amounts = others.amounts(run, self._step.call.agent)
        with self._lock:
            state, limits, call = self._step
            late = others.late.of(state)
            counts = budget_counts(state, late.amounts if late else {})
            # The state's newest use is only forgotten when the step has changed.
            others.late.keep(state, amounts)
            self._since_hook.append((amounts, charge_by_key(limits, counts, run.id, amounts)))
        record_run(others.recorder, call, limits, run, amounts)

    def learn(self, **step: Any) -> None:
        """Learn what has changed since the last hook."""
        with self._lock:
            self._step = self._step._replace(**step)

    def take(self) -> tuple[Mapping[str, int], AcquireRequest | None]:
        """What was charged since this was last called, and what a store is to be asked for it."""
        with self._lock:
            taken, self._since_hook = self._since_hook, []
        return added(amounts for amounts, _ in taken), joined([sent for _, sent in taken])

    def close(self) -> None:
        """Have the store charge what no later hook will charge."""
        _, sent = self.take()
        if self._others.store is not None and sent is not None:
            self._others.store.settle_soon(sent)


@dataclass(frozen=True, kw_only=True)
class OtherRuns:
    """Charges the model runs of an agent's run that its own model calls do not make."""

    amounts: Callable[[ModelRun, str | None], Mapping[str, int]]
    late: LateUse
    store: StoreClient | None
    recorder: Recorder

    def __post_init__(self) -> None:
        _watch_root_runs()

    async def settle(
        self, form: Form, state: Mapping[str, Any], runtime: Any, limits: ResolvedLimits
    ) -> None:
        """Charge what the run has used, before its next model call is judged."""
        step = _Step({LEDGER: ledger(state)}, limits, model_call(state, runtime))
        spent, sent = self._since_last_hook(step)
        if not spent:
            return
        answer: AcquireResult | None = None
        if self.store is not None and sent is not None:
            answer = await self.store.settle(form, sent)
        mirror_root_run(limits, answer)
        # With what was just charged.
        late = self.late.of(step.state)
        known = budget_counts(step.state, late.amounts if late else {})
        before = {name: n - spent.get(name.rpartition("/")[0], 0) for name, n in known.items()}
        record_standing(
            self.recorder,
            step.call,
            limits,
            before=before,
            spent=spent,
            answer=answer,
            is_call=False,
        )

    def learn_state(self, state: Mapping[str, Any]) -> None:
        """Learn the state after a model call."""
        agent = _running()
        if agent is not None:
            agent.learn(state={LEDGER: ledger(state)})

    @contextmanager
    def leave_out(self, collector: ModelRunCollector) -> Iterator[None]:
        """Leave out the model runs of the agent's own call in the block: the call charges them."""
        agent = _running()
        if agent is None:
            yield
            return
        agent.own.append(collector)
        try:
            yield
        finally:
            # The call is charged an estimate for those that still run: their ends are left out.
            if all(run.status != "pending" for run in collector.runs()):
                agent.own.remove(collector)

    def _since_last_hook(self, step: _Step) -> tuple[Mapping[str, int], AcquireRequest | None]:
        """What the run of a hook has used since its last one."""
        models, node = root_models()
        graph_run = None if models is None else models.graph_run(node)
        if models is None or graph_run is None:
            return {}, None
        agent = models.agents.get(graph_run)
        if agent is None:
            agent = _AgentRun(self, step)
            models.watch(graph_run, agent)
        else:
            agent.learn(**step._asdict())
        models.end_cancelled(graph_run)
        return agent.take()


def _running() -> _AgentRun | None:
    """The run of the agent that the running node belongs to; `None` if it is not known."""
    models, node = root_models()
    graph_run = None if models is None else models.graph_run(node)
    return None if models is None or graph_run is None else models.agents.get(graph_run)
