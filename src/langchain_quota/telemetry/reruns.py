"""Tasks that run again: LangGraph runs a failed node anew when the run is resumed."""

from collections.abc import Mapping

from langchain_quota.locks import fork_safe_lock

_Task = tuple[object, Mapping[str, str] | None]
"""What was last recorded for a task, and the trace that the task began, if it began one."""


class RecentTasks:
    """The newest tasks by id, to recognize a task that runs again, with the traces they began."""

    # At least `LEAST` ids are remembered, and at most twice as many. The older half of them is
    # forgotten in one step.

    LEAST = 10_000

    def __init__(self) -> None:
        self._newer: dict[str, _Task] = {}
        self._older: dict[str, _Task] = {}
        self._lock = fork_safe_lock()

    def seen(self, task_id: str | None, what: object = None) -> bool:
        """Whether the id was last given with the same `what`; it is remembered."""
        if task_id is None:
            return False
        task = (what, None)
        # One of several threads that ask at the same time sets it.
        known = self._known(task_id) or self._newer.setdefault(task_id, task)
        if known is not task and not self._changed(task_id, what):
            return True
        if len(self._newer) >= self.LEAST:
            with self._lock:
                # Another thread may have done it.
                if len(self._newer) >= self.LEAST:
                    self._older, self._newer = self._newer, {}
        return False

    def begin(self, task_id: str | None, trace: Mapping[str, str]) -> None:
        """Remember the trace that a task began: if it runs again, its state does not have it."""
        with self._lock:
            known = self._known(task_id)
            if task_id is not None and known is not None:
                self._newer[task_id] = (known[0], trace)

    def begun(self, task_id: str | None) -> Mapping[str, str] | None:
        """The trace that a task began when it ran before."""
        known = self._known(task_id)
        return None if known is None else known[1]

    def _known(self, task_id: str | None) -> _Task | None:
        if task_id is None:
            return None
        return self._newer.get(task_id) or self._older.get(task_id)

    def _changed(self, task_id: str, what: object) -> bool:
        """Whether a known task was last given with something else; it is remembered."""
        with self._lock:
            before, trace = self._known(task_id) or (what, None)
            if before == what:
                return False
            self._newer[task_id] = (what, trace)
            return True
