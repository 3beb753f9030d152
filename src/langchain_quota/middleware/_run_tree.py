"""The tree of a root run: which model runs are below the run of an agent.

LangChain calls a callback handler for each run, with the run that has started it. So a model run is
found below everything that encloses it: a node of a graph, a tool, a sub-agent on a thread of its
own, a thread or a task with the context.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, cast
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.tracers.context import register_configure_hook

from langchain_quota.middleware._context import running_config
from langchain_quota.model_runs import DECISION, ModelRun, ModelRunCollector

MAX_ENDED = 10_000
"""The most ended runs that a tree keeps: runs that they have started may go on."""

MAX_RECENT = 1_000
"""The most ended model runs that a tree keeps, for agents whose first hook has not run yet."""


class Watcher(Protocol):
    """Receives the model runs below the run of one agent, when they have ended."""

    def receive(self, run: ModelRun) -> None:
        """A model run has ended."""

    def close(self) -> None:
        """The agent's run has ended; what it has started in the background may go on."""


class _Place(NamedTuple):
    """Where a run is in the tree.

    Attributes:
        parent: The run that has started it; `None` for the root run.
        task: The namespace of the task of a graph that it belongs to; `None` outside of graphs.
    """

    parent: UUID | None
    task: str | None


class RunTree(ModelRunCollector):
    """The runs below a root run, learned from callbacks.

    Parallel tools change it from several threads. Each change is a single operation of a dict or a
    deque.
    """

    ignore_agent = ignore_retriever = False

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[UUID, _Place] = {}
        self._ended: deque[UUID] = deque()
        # The asyncio tasks in which model runs have started; `None` for those in no task.
        self._tasks: dict[UUID, asyncio.Task[Any] | None] = {}
        # Model runs that have ended, each with the runs that enclose it.
        self._recent: deque[tuple[ModelRun, Sequence[UUID]]] = deque(maxlen=MAX_RECENT)
        self._watchers: dict[UUID, Watcher] = {}

    def graph_run(self, node: UUID | None) -> UUID | None:
        """The run of the graph that a node belongs to; `None` if it is not known.

        Args:
            node: The run of the node, or one inside.
        """
        run, place = node, self._places.get(cast("UUID", node))
        task = None if place is None else place.task
        if task is None:
            return None
        while place is not None and place.task == task:
            run = place.parent
            place = self._places.get(cast("UUID", run))
        return run

    def watcher(self, graph_run: UUID) -> Watcher | None:
        """Who receives the model runs below the run of a graph; `None` for nobody."""
        return self._watchers.get(graph_run)

    def watch(self, graph_run: UUID, watcher: Watcher) -> None:
        """Have a watcher receive the model runs below the run of a graph, earlier ones too."""
        self._watchers[graph_run] = watcher
        for run, enclosing in [*self._recent]:
            if graph_run in enclosing:
                watcher.receive(run)

    def end_cancelled(self, graph_run: UUID) -> None:
        """End the model runs below the run of a graph that were cancelled.

        LangChain does not say that they have ended, but the asyncio task that they began in has.
        """
        for run_id, task in [*self._tasks.items()]:
            if task is not None and task.done() and graph_run in self._enclosing(run_id):
                self._hand_over(run_id)

    def forget(self, run_id: UUID) -> None:
        """Forget a model run that was not made."""
        self.pop(run_id)
        self._tasks.pop(run_id, None)
        self._places.pop(run_id, None)

    def on_chain_start(
        self,
        *given: Any,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Learn where a run is in the tree."""
        task = None if metadata is None else metadata.get("langgraph_checkpoint_ns")
        self._places[run_id] = _Place(parent_run_id or self._unnamed_parent(), task)
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
            forgotten = self._ended.popleft()
            self._places.pop(forgotten, None)
            self._watchers.pop(forgotten, None)
        watcher = self._watchers.get(run_id)
        if watcher is not None:
            self.end_cancelled(run_id)
            watcher.close()

    on_tool_end = on_tool_error = on_retriever_end = on_retriever_error = on_chain_end

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: object) -> None:
        """Learn that a run has failed."""
        if run_id in self._runs:
            super().on_chain_error(error, run_id=run_id)
        else:
            self.on_chain_end(run_id=run_id)

    def _start(
        self,
        run_id: UUID,
        prompt: Sequence[BaseMessage],
        metadata: Mapping[str, Any] | None,
        more: Mapping[str, Any],
    ) -> None:
        parent = more.get("parent_run_id") or self._unnamed_parent()
        if parent is not None:
            self._places[run_id] = _Place(parent, None)
            self._tasks[run_id] = _running_task()
            super()._start(run_id, prompt, metadata, more)

    def _unnamed_parent(self) -> UUID | None:
        """The run that has started one without saying so: its callbacks were not passed on."""
        tree, running = run_tree()
        return running if tree is self else None

    def _end(self, run_id: UUID, **run: Any) -> None:
        super()._end(run_id, **run)
        self._hand_over(run_id)

    def _hand_over(self, run_id: UUID) -> None:
        """Hand a model run that has ended to all who watch, and forget it."""
        run, enclosing = self.pop(run_id), self._enclosing(run_id)
        self.forget(run_id)
        if run is not None:
            self._recent.append((run, enclosing))
            for each in enclosing:
                watcher = self._watchers.get(each)
                if watcher is not None:
                    watcher.receive(run)

    def _enclosing(self, run_id: UUID) -> list[UUID]:
        """The runs that enclose one, from the inside out."""
        found: list[UUID] = []
        place = self._places.get(run_id)
        while place is not None and place.parent is not None:
            found.append(place.parent)
            place = self._places.get(place.parent)
        return found


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class _NewRunTree:
    """Gives LangChain a tree for each run that has inherited none: a new one, if none encloses it.

    LangChain calls `get` of a context variable; this object replaces the variable.
    """

    def get(self) -> RunTree:
        return run_tree()[0] or RunTree()


_enabled = threading.Event()


def enable_run_trees() -> None:
    """Give a tree to every root run of the process that begins from now on."""
    if not _enabled.is_set():
        _enabled.set()
        variable = cast("ContextVar[Any]", _NewRunTree())
        register_configure_hook(variable, inheritable=True, handle_class=RunTree)


def run_tree() -> tuple[RunTree | None, UUID | None]:
    """The tree of the running node, and the run of that node; `None` where there is none."""
    if not _enabled.is_set():
        return None, None
    callbacks = running_config().get("callbacks")
    handlers = getattr(callbacks, "inheritable_handlers", ())
    tree = next((each for each in handlers if isinstance(each, RunTree)), None)
    return tree, getattr(callbacks, "parent_run_id", None)


def forget_refused(collector: ModelRunCollector) -> None:
    """Have the tree forget the model runs that a collector has refused: the tree saw them first."""
    tree, _ = run_tree() if collector.refused else (None, None)
    if tree is not None:
        for each in collector.refused:
            tree.forget(each)
