"""Tasks that run again: LangGraph runs a failed node anew when the run is resumed."""

from collections import OrderedDict
from collections.abc import Mapping

from langchain_quota.locks import fork_safe_lock


class RecentTasks:
    """The newest ids of tasks, to recognize a task that runs again, with the traces they began."""

    MOST = 10_000

    def __init__(self) -> None:
        self._ids: OrderedDict[str, object] = OrderedDict()
        self._traces: dict[str, Mapping[str, str]] = {}
        self._lock = fork_safe_lock()

    def seen(self, task_id: str | None, what: object = None) -> bool:
        """Whether the id was last given with the same `what`; it is remembered."""
        if task_id is None:
            return False
        with self._lock:
            if task_id in self._ids and self._ids[task_id] == what:
                return True
            self._ids[task_id] = what
            if len(self._ids) > self.MOST:
                oldest, _ = self._ids.popitem(last=False)
                self._traces.pop(oldest, None)
            return False

    def begin(self, task_id: str | None, trace: Mapping[str, str]) -> None:
        """Remember the trace that a task began: if it runs again, its state does not have it."""
        with self._lock:
            if task_id is not None and task_id in self._ids:
                self._traces[task_id] = trace

    def begun(self, task_id: str | None) -> Mapping[str, str] | None:
        """The trace that a task began when it ran before."""
        return None if task_id is None else self._traces.get(task_id)
