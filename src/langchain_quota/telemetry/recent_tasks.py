"""Which tasks of graphs have recorded what, so that a re-run is not recorded again."""

from collections import OrderedDict
from dataclasses import dataclass

from langchain_quota.runtime.sync_async import fork_safe_lock


@dataclass(slots=True)
class TaskRecord:
    """The newest event that was recorded for a task."""

    event: object = None
    notified: int = 0
    """Number of times that an observer was called with a decision."""
    is_new: bool = True
    """False once the same event is recorded again."""


class RecentTasks:
    """The records of the newest tasks, as LangGraph runs a failed task again in a resumed run."""

    MAX_TASKS = 10_000

    def __init__(self) -> None:
        self._records: OrderedDict[str, TaskRecord] = OrderedDict()
        self._lock = fork_safe_lock()

    def add(self, task_id: str | None, event: object = None) -> TaskRecord:
        """Return a new record of the event, or the task's record if its last event was the same."""
        if task_id is None:
            return TaskRecord(event)
        with self._lock:
            last = self._records.get(task_id)
            if last is not None and last.event == event:
                last.is_new = False
                return last
            record = self._records[task_id] = TaskRecord(event)
            if last is not None:
                self._records.move_to_end(task_id)
            if len(self._records) > self.MAX_TASKS:
                self._records.popitem(last=False)
        return record
