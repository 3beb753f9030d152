"""The root run: a run that no other run encloses, with everything that it starts.

LangChain passes the callback handlers of a run on to everything that the run starts: sub-agents in
tools, sub-graphs, `Send`, tasks of the functional API. Every root run gets a handler of its own, so
calls with the same handler belong together. A child may have a `thread_id` of its own.
"""

import threading
from collections.abc import Mapping
from contextvars import ContextVar, copy_context
from functools import cache
from types import MappingProxyType
from typing import Any, cast
from uuid import uuid4
from weakref import WeakSet

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook
from langgraph.types import Command

from langchain_quota.locks import fork_safe_lock
from langchain_quota.middleware._context import running_config
from langchain_quota.state import Ledger
from langchain_quota.telemetry.logs import logger


class RootRun(BaseCallbackHandler):
    """A root run, as everything that it starts finds it.

    Attributes:
        key: Names it; empty until it has begun.
        thread_id: The thread that it runs on; `None` without one.
        resumes: Whether it resumes a run of its thread that was interrupted or that failed.
        subject: Whose calls a store counts together; `None` until a limiter has asked.
        used: What a store has counted of it, by key: a store that is full may drop it.
        in_tools: Whether the newest decision let a tool call run.
    """

    run_inline = True
    ignore_llm = ignore_chat_model = ignore_agent = ignore_retriever = True
    ignore_retry = ignore_custom_event = True

    # LangChain makes one for each run, and drops it where another one is inherited.
    key = ""
    thread_id: object = None
    resumes = False
    subject: str | None = None
    used: Mapping[str, int] = MappingProxyType({})
    in_tools = False
    _lacks_context = False

    @property
    def ignore_chain(self) -> bool:
        """Whether it has begun: later chains do not matter."""
        return bool(self.key)

    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,  # noqa: ARG002 - LangChain gives it by position
        inputs: object,
        *,
        metadata: Mapping[str, Any] | None = None,
        **_: object,
    ) -> None:
        """Learn how the root run begins."""
        self.key = uuid4().hex
        self.thread_id = (metadata or {}).get("thread_id")
        self.resumes = isinstance(inputs, Command) or (
            inputs is None and self.thread_id is not None
        )
        self._lacks_context = (
            not copy_context() and threading.current_thread() is not threading.main_thread()
        )

    def learn_used(self, counts: Mapping[str, int]) -> None:
        """Learn what a store has counted; the highest count, since answers may arrive late."""
        known = self.used
        self.used = {**known, **{key: max(n, known.get(key, 0)) for key, n in counts.items()}}

    def unsaved(self, known: Ledger) -> Ledger:
        """What the state has to keep, so that a resumed run goes on with the same counts.

        Args:
            known: What it keeps now.
        """
        found = Ledger()
        if self.subject != known.get("root_run"):
            found["root_run"] = self.subject
        if self.used != (known.get("root_used") or {}):
            found["root_used"] = {**self.used}
        return found

    def count_as(self, subject: str) -> str:
        """Settle whose calls a store counts together, and return it."""
        with _lock:
            if self._lacks_context and any(each.in_tools for each in _counted):
                _log_lost_context()
            _counted.add(self)
        self._lacks_context = False
        self.subject = subject
        return subject


_counted: WeakSet[RootRun] = WeakSet()
"""The root runs with quotas, until they are collected."""

_lock = fork_safe_lock()


@cache
def _log_lost_context() -> None:
    """Log once that the context is lost: no error, since a server may use such threads."""
    logger.warning(
        "a run with a quota per 'root_run' began in a thread without LangChain's context, while a "
        "tool of another such run was running: if that tool started it, pass it the context, as "
        "in executor.submit(contextvars.copy_context().run, function)"
    )


class _NewRootRun:
    """Gives LangChain a handler for a run that has inherited none."""

    kind = RootRun

    def get(self) -> RootRun:
        return self.kind()


_watching = threading.Event()


def watch_root_runs(kind: type[RootRun] | None = None) -> None:
    """Give every root run that begins from now on a handler of its own.

    Args:
        kind: Its class from now on; `None` to leave it.
    """
    if kind is not None:
        _NewRootRun.kind = kind
    if not _watching.is_set():
        _watching.set()
        variable = cast("ContextVar[Any]", _NewRootRun())
        register_configure_hook(variable, inheritable=True, handle_class=RootRun)


def root_run() -> RootRun | None:
    """The root run that the running node belongs to; `None` outside of a graph."""
    if not _watching.is_set():
        return None
    handlers = getattr(running_config().get("callbacks"), "inheritable_handlers", ())
    return next((each for each in handlers if isinstance(each, RootRun)), None)
