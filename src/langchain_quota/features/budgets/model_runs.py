"""Model runs: their use, and the agent that is charged for it.

One callback handler sees all runs of a root run, or of a call, each with the run that has started
it. So it knows in which agent's call a model run is made, and which graphs it is below.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Event
from typing import Any, NamedTuple, cast
from uuid import UUID
from weakref import WeakValueDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook
from langgraph.errors import GraphInterrupt
from langgraph.types import Command

from langchain_quota.features.budgets.model_run import ModelRun, Runs
from langchain_quota.features.budgets.reports import is_paid
from langchain_quota.features.budgets.usage import asked_in
from langchain_quota.limits.call import ModelUsage
from langchain_quota.middleware.context import running_config
from langchain_quota.middleware.root_run import DECISION, HandlerVar, register_root_runs
from langchain_quota.runtime import compat
from langchain_quota.telemetry.receipts import OpenReceipt, open_receipts

MAX_ENDED = 10_000
"""The most ended runs that a root run keeps: what they have started may go on."""

MAX_EARLY = 1_000
"""The most model runs that a graph's run keeps for an agent whose first hook has not run yet."""


@dataclass(eq=False)
class GraphRun:
    """A run of a graph, and the model runs below it that its agent is not charged for yet."""

    runs: Runs = field(default_factory=dict)
    # What the newest hook of its agent knows, and what charges the rest when the run ends.
    step: Any = None
    charge: Callable[[Any, Sequence[ModelRun]], object] | None = None

    def take(self) -> list[ModelRun]:
        """Return the model runs that have ended since the last call."""
        # LangChain tells nobody of the end of a run that is cancelled.
        ended = [
            run_id
            for run_id, run in [*self.runs.items()]
            if run.has_ended or (run.task is not None and run.task.done())
        ]
        return [self.runs.pop(run_id).now() for run_id in ended]


@dataclass(eq=False)
class QuotaCallback(BaseCallbackHandler):
    """The model call of an agent, and the model runs that are made in it, at any depth."""

    # An exception where a model run starts ends the call before it is made.
    run_inline = raise_error = True
    ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

    # Raises an exception if a model may not be called.
    admit: Callable[[ModelUsage], None]
    graph: GraphRun | None
    kept: Runs = field(default_factory=dict)
    is_open: bool = True

    def runs(self) -> list[ModelRun]:
        """Return the model runs so far, in the order in which they have started."""
        return [run.now() for run in [*self.kept.values()]]

    def on_chat_model_start(self, *_: Any, run_id: UUID, **__: object) -> None:
        """Raise an exception if the model may not be called, and forget the run."""
        run = self.kept.get(run_id) if self.is_open else None
        if run is not None:
            try:
                self.admit(run.usage)
            except Exception:
                for runs in run.kept_in:
                    runs.pop(run_id, None)
                raise

    on_llm_start = on_chain_start = on_chat_model_start


class _Place(NamedTuple):
    """Where a run is: in which task, in which graphs, the innermost first, and in which calls."""

    task: str | None = None
    graphs: tuple[GraphRun, ...] = ()
    calls: tuple[QuotaCallback, ...] = ()


class ModelRuns(BaseCallbackHandler):
    """Keeps model runs for all who are charged for them, from callbacks of any thread."""

    run_inline = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        # Those that somebody keeps.
        self._started: WeakValueDictionary[UUID, ModelRun] = WeakValueDictionary()
        self.places: dict[UUID | None, _Place] = {}
        self._graphs: dict[UUID | None, GraphRun] = {}
        self._ended: deque[UUID] = deque()
        self.receipts: Sequence[OpenReceipt] = open_receipts()

    def on_chat_model_start(self, *given: Any, **more: Any) -> None:
        """Keep what was asked."""
        self._start([message for each in given[1] for message in each], **more)

    def on_llm_start(self, *given: Any, **more: Any) -> None:
        """Keep what was asked of a completion model."""
        self._start([*map(HumanMessage, given[1])], **more)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, chunk: Any = None, **_: object) -> None:
        """Keep what has arrived."""
        started = self._started.get(run_id)
        if started is not None:
            message = getattr(chunk, "message", None)
            if not isinstance(message, AIMessageChunk):
                message = AIMessageChunk(content=token or "")
            started.chunks.append(message)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: object) -> None:
        """Note what has been used."""
        started = self._started.pop(run_id, None)
        if started is not None:
            answer: Any = next((each for few in response.generations[:1] for each in few[:1]), None)
            message = getattr(answer, "message", None) or AIMessage(answer.text if answer else "")
            started.end(started.used(response, [message]), succeeded=True)
        self._end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Note what may have been used."""
        started = self._started.pop(run_id, None)
        if started is not None:
            paid = started.chunks or is_paid(error)
            started.end(started.used_so_far() if paid else started.usage)
        self._end(run_id)

    def on_chain_start(
        self, *given: Any, run_id: UUID, run_type: str | None = None, **more: Any
    ) -> None:
        """Learn where a run is; for callbacks, a decision model is a chain, too."""
        if run_type == DECISION:
            self._start([HumanMessage(str(given[1]))], run_id=run_id, **more)
        else:
            if more.get("parent_run_id") is None and _running()[1] is None:
                thread, asked = (more.get("metadata") or {}).get("thread_id"), given[1]
                resumes = isinstance(asked, Command) or asked is None
                for receipt in open_receipts(self):
                    receipt.begin_run(thread, resumes=resumes and thread is not None)
            self._learn(run_id, **more)

    on_retriever_start = on_chain_start

    def on_tool_start(self, *given: Any, run_id: UUID, **more: Any) -> None:
        """Learn where a tool runs."""
        self._learn(run_id, **more)
        agent = compat.agent_name(more.get("metadata")) or ""
        for receipt in open_receipts(self):
            receipt.start_tool(run_id, agent, str(given[0].get("name")))

    def on_chain_end(self, *given: Any, run_id: UUID, **_: object) -> None:
        """Note that a run has ended, and what a decision model has used."""
        if run_id in self._started:
            outputs = given[0]
            message = AIMessage(
                str(getattr(outputs, "answers", "")),
                usage_metadata=getattr(outputs, "usage", None),
                response_metadata={"model_name": getattr(outputs, "model", "")},
            )
            generation = ChatGeneration(message=message)
            self.on_llm_end(LLMResult(generations=[[generation]]), run_id=run_id)
            return
        graph = self._graphs.pop(run_id, None)
        if graph is not None and graph.charge is not None:
            # No later hook will charge what is left.
            runs = graph.take()
            if runs:
                graph.charge(graph.step, runs)
        self._end(run_id)

    on_tool_end = on_retriever_end = on_retriever_error = on_chain_end

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Note that a tool has failed, or waits for a person: then it will run again."""
        self._end(run_id, interrupted=isinstance(error, GraphInterrupt))

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Note that a run has failed, and what a decision model may have used."""
        if run_id in self._started:
            self.on_llm_error(error, run_id=run_id)
        else:
            self.on_chain_end(error, run_id=run_id)

    def _start(self, prompt: Sequence[BaseMessage], *, run_id: UUID, **more: Any) -> None:
        params = more.get("invocation_params") or {}
        usage = asked_in(more.get("metadata"), speed=str(params.get("speed") or ""))
        place = self._learn(run_id, **more)
        # What a call leaves running may start more model runs.
        calls = [call for call in place.calls if call.is_open]
        # A decision model that asks another model is not charged beside that one.
        asking = self._started.get(cast("UUID", more.get("parent_run_id")))
        if asking is not None:
            for runs in asking.kept_in:
                runs.pop(UUID(asking.id), None)
        # The agent's own call is charged for what is made in it.
        own_graphs = [call.graph for call in calls]
        graphs = [graph for graph in place.graphs if graph not in own_graphs]
        task = None
        with suppress(RuntimeError):
            task = asyncio.current_task()
        started = ModelRun(
            id=str(run_id),
            agent=compat.agent_name(more.get("metadata")) or "",
            usage=usage,
            prompt=prompt,
            params=params,
            shared=bool(place.graphs) or len(calls) > 1,
            task=task,
            kept_in=[
                *(call.kept for call in calls),
                *(graph.runs for graph in graphs if graph.charge or len(graph.runs) < MAX_EARLY),
                *(receipt.running for receipt in open_receipts(self)),
            ],
        )
        for runs in started.kept_in:
            runs[run_id] = self._started[run_id] = started

    def _learn(
        self,
        run_id: UUID,
        *,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **_: object,
    ) -> _Place:
        """Learn where a run is: where the one is that has started it, or in another task."""
        if parent_run_id is None:
            # Its callbacks may not have been passed on.
            runs, running = _running()
            parent_run_id = running if runs is self else None
        around = self.places.get(parent_run_id, _Place())
        task = compat.task_namespace(metadata) or around.task
        graphs = around.graphs
        is_charged = _for_all.is_set() or bool(around.calls)
        if task != around.task and parent_run_id in self.places and is_charged:
            # It is a node of the graph that has started it.
            graphs = (self._graphs.setdefault(parent_run_id, GraphRun()), *graphs)
        place = self.places[run_id] = _Place(task, graphs, _calls.get() or around.calls)
        return place

    def _end(self, run_id: UUID, *, interrupted: bool = False) -> None:
        """Tell receipts that a run has ended; forget the one that ended first of too many."""
        for receipt in open_receipts(self):
            receipt.end(run_id, interrupted=interrupted)
        self._ended.append(run_id)
        if len(self._ended) > MAX_ENDED:
            self.places.pop(self._ended.popleft(), None)


_calls: ContextVar[tuple[QuotaCallback, ...]] = ContextVar(
    "langchain_quota_model_calls", default=()
)
"""The model calls of agents that the running code is in, the outermost first."""

_for_all = Event()


@cache
def watch_runs() -> None:
    """Have LangChain look for handlers where it looks for context variables."""

    def of_root_run() -> ModelRuns | None:
        watched = _for_all.is_set() or _calls.get() or open_receipts()
        return (_running()[0] or ModelRuns()) if watched else None

    def of_call() -> QuotaCallback | None:
        return next(reversed(_calls.get()), None)

    # The last one refuses models: handlers behind it are told nothing.
    register_root_runs()
    for find, kind in ((of_root_run, ModelRuns), (of_call, None)):
        var: Any = HandlerVar(f"langchain_quota_{find.__name__}", find)
        register_configure_hook(var, True, kind)


def watch_all_models() -> None:
    """Watch every root run of the process that begins from now on."""
    watch_runs()
    _for_all.set()


@contextmanager
def own_call(
    admit: Callable[[ModelUsage], None], graph: GraphRun | None
) -> Iterator[QuotaCallback]:
    """Collect the model runs that the block starts, also those in sub-agents, tools and threads."""
    watch_runs()
    call = QuotaCallback(admit, graph)
    token = _calls.set((*_calls.get(), call))
    try:
        yield call
    finally:
        call.is_open = False
        # A coroutine that outlives its event loop is closed in another context.
        with suppress(ValueError):
            _calls.reset(token)


def running_graph() -> GraphRun | None:
    """Return the graph run that the running node belongs to; `None` if it is not known."""
    runs, node = _running()
    place = None if runs is None else runs.places.get(node)
    return next(iter(place.graphs), None) if place else None


def _running() -> tuple[ModelRuns | None, UUID | None]:
    """Return the handler and the run of the running node; `None` where there is none."""
    callbacks = running_config().get("callbacks")
    handlers = getattr(callbacks, "inheritable_handlers", ())
    model_runs = next((handler for handler in handlers if isinstance(handler, ModelRuns)), None)
    return model_runs, getattr(callbacks, "parent_run_id", None)
