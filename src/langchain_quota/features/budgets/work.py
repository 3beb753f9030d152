"""The time that calls work: calls of a run that run at the same time count once."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage
from langgraph.types import Command

from langchain_quota.middleware.feature import ToolAnswer
from langchain_quota.middleware.state import State
from langchain_quota.runtime.sync_async import fork_safe_lock

WORKED = "quota_worked"
"""The mark on a tool's answer: its run, the name of the charge, and its working time.

It is not sent to models. The next step reads the time there, even in another process.
"""

Charged = dict[tuple[int, str], int]
"""The working time of calls inside of a call, by the id of a store and its key."""

_around: ContextVar[tuple[Charged, ...]] = ContextVar("langchain_quota_work", default=())
"""The time charged inside of each call around the running code, the outermost call first."""

_lock = fork_safe_lock()


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
    def measured(self, run: str) -> Iterator[Work]:
        """Measure the time since the last call of the same run ended; parallel calls count once."""
        work = Work()
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


def pass_on(store: object, amounts: Mapping[str, int]) -> None:
    """Pass a store's charges, by key, to the outer calls, which do not charge them again."""
    with _lock:
        for around in _around.get():
            for key, amount in amounts.items():
                around[id(store), key] = around.get((id(store), key), 0) + amount


def mark(answer: ToolAnswer, call_id: object, *worked: object) -> None:
    """Write the run, the name of the charge and the working time on the answer of a tool call."""
    answers: Any = [answer]
    if isinstance(answer, Command):
        update: Any = answer.update
        answers = update.get("messages") if isinstance(update, Mapping) else ()
    for message in answers if isinstance(answers, list | tuple) else ():
        if isinstance(message, ToolMessage) and message.tool_call_id == call_id:
            message.response_metadata = {**message.response_metadata, WORKED: [*worked]}


def marked(state: State, run: str) -> dict[str, int]:
    """Return the working time of the newest tool calls of a run, by the name of the charge."""
    times: dict[str, int] = {}
    for message in reversed(state.get("messages") or ()):
        if isinstance(message, AIMessage):
            break
        match getattr(message, "response_metadata", {}).get(WORKED):
            # A caller can write it, too.
            case [str(of), str(name), int(worked)] if of and of == run and worked >= 0:
                times[name] = worked
    return times
