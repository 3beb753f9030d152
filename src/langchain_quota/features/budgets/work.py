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
"""The mark on a tool's answer: its run, the name of its time, and how long it has worked.

It is not sent to models. From it the next step learns the time, also in another process.
"""

Charged = dict[tuple[int, str], int]
"""How long calls inside of a call have worked, by the id of a store and its key."""

_around: ContextVar[tuple[Charged, ...]] = ContextVar("langchain_quota_work", default=())
"""What is charged inside of each call that the running code is in, the outermost first."""

_lock = fork_safe_lock()


@dataclass
class Work:
    """How long a call has worked, and what calls inside of it have charged of that."""

    amount: int = 0
    inside: Charged = field(default_factory=dict)


class Stopwatch:
    """Measures the calls of runs, in milliseconds."""

    def __init__(self) -> None:
        # By run: how many calls run, and up to when their time is taken.
        self._running: dict[str, tuple[int, int]] = {}

    @contextmanager
    def measured(self, run: str) -> Iterator[Work]:
        """Measure a call: how long calls of its run have worked since the last one ended."""
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
    """Tell the calls around what a store is charged, by key: they do not charge it again."""
    with _lock:
        for around in _around.get():
            for key, amount in amounts.items():
                around[id(store), key] = around.get((id(store), key), 0) + amount


def mark(answer: ToolAnswer, call_id: object, *worked: object) -> None:
    """Write on the answer of a call the run, the name of the time, and how long it has worked."""
    answers: Any = [answer]
    if isinstance(answer, Command):
        update: Any = answer.update
        answers = update.get("messages") if isinstance(update, Mapping) else ()
    for message in answers if isinstance(answers, list | tuple) else ():
        if isinstance(message, ToolMessage) and message.tool_call_id == call_id:
            message.response_metadata = {**message.response_metadata, WORKED: [*worked]}


def marked(state: State, run: str) -> dict[str, int]:
    """Return how long the newest tool calls of a run have worked, by the name of the time."""
    times: dict[str, int] = {}
    for message in reversed(state.get("messages") or ()):
        if isinstance(message, AIMessage):
            break
        match getattr(message, "response_metadata", {}).get(WORKED):
            # A caller can write it, too.
            case [str(of), str(name), int(worked)] if of and of == run and worked >= 0:
                times[name] = worked
    return times
