"""What `on_decision` and `on_near` name: functions that are called with decisions and events."""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from logging import Handler, LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from os import SEEK_END, PathLike
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Self
from weakref import WeakSet

from langchain_quota.core.decision import Decision
from langchain_quota.limits.call import RUN, THREAD
from langchain_quota.runtime.arguments import (
    is_async,
    validate_function,
    validate_sync_function,
    validate_type,
)
from langchain_quota.runtime.process_end import call_at_end
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock
from langchain_quota.runtime.units import in_base_unit
from langchain_quota.telemetry.recent_tasks import TaskRecord
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.telemetry.stream import QuotaEvent

Observer = Callable[[Decision], Awaitable[None] | None]
NearFunction = Callable[[QuotaEvent], Awaitable[None] | None]

MOST_WAITING = 100
"""How many events wait for `on_near`; further ones are dropped, and counted."""

_LAST_WAIT = 5.0
"""How long the end of the process waits for `on_near`, in seconds."""


class DecisionLog:
    """A log of decisions, as JSON lines; see `log_decisions`."""

    def __init__(self, handler: Handler, subject_label: Callable[[str], str]) -> None:
        self._handler, self._label = handler, subject_label

    def __call__(self, decision: Decision) -> None:
        """Write the line of a decision."""
        call = decision.call
        subjects = {"agent": call.agent, THREAD: call.thread_id}
        counts: dict[str, dict[str, object]] = {}
        for status in decision.limits:
            subjects |= {quota.per: quota.subject for quota in status.quotas}
            counts[status.limit] = {
                count.scope: [
                    in_base_unit(count.used, status.unit),
                    count.limit and in_base_unit(count.limit, status.unit),
                ]
                for count in status.counts
                # With a store, a thread's count that no limit needs may be that of the run.
                if count.limit is not None or count.scope == RUN
            }
        line = {
            "time": round(time.time(), 6),
            "decision": decision.outcome,
            "tool": call.tool,
            "id": call.id,
            "refused_by": {status.limit: status.refusal_scope for status in decision.refused_by},
            "subjects": {
                per: self._label(str(of)) for per, of in subjects.items() if of not in (None, "")
            },
            "counts": counts,
        }
        text = json.dumps({key: of for key, of in line.items() if of}, separators=(",", ":"))
        self._handler.handle(makeLogRecord({"msg": text}))

    def close(self) -> None:
        """Close the file or handler, after the last run."""
        self._handler.close()


def log_decisions(
    to: str | PathLike[str] | Handler, *, subject_label: Callable[[str], str] = str
) -> DecisionLog:
    """Return an observer that logs every decision as a line of JSON.

    Give it to `on_decision`. Each process needs a file of its own. A line is written before the
    agent goes on, in less than 0.1 ms. An error is counted and logged, and the run goes on.

    A line has the `time` in seconds since the Unix epoch, the `decision`, and for a tool call its
    `tool` and `id`. `refused_by` maps each limit that refuses the call to the scope that is
    exhausted, or to `frozen` or `store`. `subjects` has the agent, the thread, and whom quotas
    count, and `counts` the use after the call and the maximum, for each scope of each limit: calls,
    tokens, dollars or seconds. What is empty is left out.

    Args:
        to: The file. At 100 MB it is renamed, and nine older ones are kept. Or a handler of the
            standard library, such as a `TimedRotatingFileHandler`, or a `QueueHandler`, which
            leaves the writing to a thread.
        subject_label: Returns what is written for an agent, thread, user or other subject, such as
            `hmac_label(key)`; by default the subject itself.

    Raises:
        OSError: The file cannot be opened.
        TypeError: An argument has the wrong type.

    Examples:
        >>> from langchain_quota import QuotaMiddleware, ToolCallLimit, log_decisions
        >>> limits = [ToolCallLimit("search", run_limit=3, enforce=False)]
        >>> log = log_decisions("/tmp/decisions.jsonl")
        >>> quota = QuotaMiddleware(limits, on_decision=log)
        >>> log.close()
    """
    validate_type("to", to, str | PathLike | Handler, "a path or a logging.Handler")
    validate_type("subject_label", subject_label, Callable, "a function of the subject")
    validate_sync_function("subject_label", subject_label, "subject")
    return DecisionLog(to if isinstance(to, Handler) else _File(to), subject_label)


class _File(RotatingFileHandler):
    """A file whose errors are raised, so that telemetry counts them."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path, maxBytes=100 * 10**6, backupCount=9, encoding="utf-8")
        file = Path(path)
        if file.is_file() and file.stat().st_size:
            with file.open("rb") as written:
                written.seek(-1, SEEK_END)
                if written.read() != b"\n" and self.stream is not None:
                    # A process that was killed has left a part of a line.
                    self.stream.write("\n")

    def handleError(self, record: LogRecord) -> None:  # noqa: ARG002, N802 - of the standard library
        raise  # noqa: PLE0704 - the error that is being handled


class Observers:
    """The functions of `on_decision`; their exceptions are counted and logged."""

    def __init__(self, on_decision: Observer | Sequence[Observer], recorder: Recorder) -> None:
        observers = (on_decision,) if callable(on_decision) else on_decision
        if not isinstance(observers, Sequence) or not all(map(callable, observers)):
            raise TypeError(f"on_decision must be a function or several, not {on_decision!r}")
        for observer in observers:
            validate_function("on_decision", observer, "decision")
        self._observers: tuple[Observer, ...] = tuple(observers)
        self.present = bool(self._observers)
        self._recorder = recorder

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Return itself, so that a copy of the middleware notifies the same observers."""
        return self

    def check(self, mode: Mode) -> None:
        """Raise in a sync run if an observer is async, because the run cannot wait for it."""
        for observer in self._observers if not mode else ():
            if is_async(observer):
                raise _async_error(observer)

    async def notify(self, mode: Mode, decisions: Sequence[Decision], record: TaskRecord) -> None:
        """Call each observer with each decision, and wait for those that are async."""
        pairs = [(decision, observer) for decision in decisions for observer in self._observers]
        for decision, observer in pairs[record.notified :]:
            result: object = None
            try:
                result = observer(decision)
                if mode and inspect.isawaitable(result):
                    await result
            except Exception as error:
                self._recorder.record_error("observer", error)
            record.notified += 1
            if mode:
                continue
            if inspect.iscoroutine(result):
                result.close()
            if inspect.isawaitable(result):
                raise _async_error(observer)


class NearObserver:
    """Calls `on_near` in a thread of its own: one that hangs holds up no agent."""

    def __init__(self, on_near: NearFunction, recorder: Recorder) -> None:
        validate_type("on_near", on_near, Callable, "a function or None")
        validate_function("on_near", on_near, "event")
        self._function, self._recorder, self._lock = on_near, recorder, fork_safe_lock()
        self._worker: Thread | None = None
        _observers.add(self)

    def __call__(self, event: QuotaEvent) -> None:
        """Have the function called with an event; raise `Full` if too many wait."""
        with self._lock:
            if not self._is_at_work():
                self._waiting = Queue[QuotaEvent](MOST_WAITING)
                self._worker = Thread(target=self._work, args=(self._waiting,), daemon=True)
                self._worker.start()
            self._waiting.put_nowait(event)

    def _work(self, waiting: Queue[QuotaEvent]) -> None:
        while True:
            try:
                result = self._function(waiting.get())
                if inspect.iscoroutine(result):
                    asyncio.run(result)
            except Exception as error:
                self._recorder.record_error("observer", error)
            waiting.task_done()

    def end(self) -> None:
        """Wait for what was told before the process ends, but not for one that hangs."""
        until = time.monotonic() + _LAST_WAIT
        while self._is_at_work() and self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def _is_at_work(self) -> bool:
        # A forked child has no thread, and its parent tells what has waited.
        return self._worker is not None and self._worker.is_alive()


_observers: WeakSet[NearObserver] = WeakSet()


def _at_end() -> None:
    for observer in list(_observers):
        observer.end()


call_at_end(_at_end)


def _async_error(observer: Observer) -> RuntimeError:
    return RuntimeError(
        f"on_decision={observer!r} is async: call the agent with ainvoke or astream, "
        "and override its async hooks where you override a hook"
    )
