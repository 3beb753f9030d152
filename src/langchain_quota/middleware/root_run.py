"""The root run: a run that no other run encloses, with everything that it starts.

LangChain passes the callback handlers of a run on to everything that the run starts: sub-agents in
tools, sub-graphs, `Send`, tasks of the functional API. Every root run gets a handler of its own, so
calls with the same handler belong together. A child may have a `thread_id` of its own.

A child may also be called without these handlers. Then it finds the root run in LangChain's context
variable, which is set around each tool and node; or, in a thread without context, in the metadata
of the tool's config.
"""

import time
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakValueDictionary

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook
from langgraph.types import Command

from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand
from langchain_quota.core.plans import Places
from langchain_quota.limits.call import ROOT_RUN
from langchain_quota.middleware.context import CallContext, running_config, running_runtime
from langchain_quota.middleware.resolver import prefix_now
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime import compat
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode
from langchain_quota.stores.keys import CountKey

_METADATA = "__langchain_quota_root_run"
"""The key of the metadata that name the root run; checkpoints leave out keys that begin so."""

DECISION = "llm"
"""The type by which callbacks tell a decision model of LangChain 1.5 from other chains."""


class RootRun(BaseCallbackHandler):
    """A root run, as everything that it starts finds it."""

    run_inline = True
    ignore_llm = ignore_chat_model = ignore_agent = ignore_retriever = True
    ignore_retry = ignore_custom_event = True

    # LangChain makes one for each run, and drops it where another one is inherited.
    key = ""
    thread_id: object = None
    resumes = False
    # The subject under which a store counts the run.
    subject: str | None = None
    used: Mapping[str, int] = MappingProxyType({})
    joined: "RootRun | None" = None
    # Whether it began inside another run, which it cannot find.
    is_lost = False

    @property
    def ignore_chain(self) -> bool:
        """Whether the run has begun: later chains do not matter."""
        return bool(self.key)

    def on_chain_start(
        self,
        serialized: Mapping[str, object] | None,  # noqa: ARG002 - LangChain gives it by position
        inputs: object,
        *,
        run_id: UUID,  # noqa: ARG002 - subclasses need it
        metadata: compat.Metadata = None,
        **_: object,
    ) -> None:
        """Learn how the root run begins, or to which one it belongs."""
        own_metadata, around = metadata or {}, running_config()
        # Up to LangGraph 1.1, an agent's own metadata replace those around it.
        nested = {**(around.get("metadata") or {}), **own_metadata}
        named = _named.get(str(nested.get(_METADATA)))
        if named is not None:
            self.joined, self.key = named, named.key
            return
        self.key = uuid4().hex
        self.thread_id = own_metadata.get("thread_id")
        has_thread = self.thread_id is not None
        self.resumes = isinstance(inputs, Command) or (inputs is None and has_thread)
        has_parent = getattr(around.get("callbacks"), "parent_run_id", None) is not None
        self.is_lost = compat.is_in_node(nested) or (has_parent and root_run() is None)

    def learn_used(self, counts: Mapping[str, int]) -> None:
        """Learn what a store has counted; the highest count, since answers may arrive late."""
        used = self.used
        self.used = {**used, **{key: max(n, used.get(key, 0)) for key, n in counts.items()}}


_named: WeakValueDictionary[str, RootRun] = WeakValueDictionary()
"""The root runs that the metadata of a tool's config name, by key, until they are collected."""


class HandlerVar:
    """A handler as LangChain finds it in a `ContextVar`, which nobody can make a subclass of."""

    def __init__(self, name: str, find: Callable[[], BaseCallbackHandler | None]) -> None:
        self.name, self._find = name, find

    def get(self, default: BaseCallbackHandler | None = None) -> BaseCallbackHandler | None:
        """Return the handler that `find` returns, or the default."""
        return self._find() or default


_kinds: list[type[RootRun]] = []
"""The kind of new handlers; empty as long as no limit needs them."""


@cache
def register_root_runs() -> None:
    """Make LangChain request a handler for every run that has inherited none."""
    # LangChain asks in the context of the caller. So a run that was started without the handlers
    # around it gets the handler of its root run.
    var: Any = HandlerVar(
        "langchain_quota_root_run", lambda: root_run() or (_kinds[0]() if _kinds else None)
    )
    register_configure_hook(var, inheritable=True, handle_class=RootRun)


def watch_root_runs(kind: type[RootRun] | None = None) -> None:
    """Give every root run that begins from now on a handler of its own."""
    register_root_runs()
    if kind or not _kinds:
        _kinds[:] = [kind or RootRun]


def root_run() -> RootRun | None:
    """Return the root run of the running node, or `None` outside of a graph."""
    if not _kinds:
        return None
    handlers = getattr(running_config().get("callbacks"), "inheritable_handlers", ())
    root = next((handler for handler in handlers if isinstance(handler, RootRun)), None)
    return root and (root.joined or root)


def used_by(run: RootRun, places: Places) -> dict[str, int]:
    """Return what a store has counted of a root run, by the name of the count."""
    return {name: run.used[place.key] for name, place in places.items() if place.key in run.used}


def name_in_tool(request: ToolCallRequest) -> None:
    """Name the root run in the config of a running tool, which it may pass on."""
    root, config = root_run(), getattr(request.runtime, "config", None)
    if root is not None and config is not None:
        _named[root.key] = root
        config["metadata"] = {**(config.get("metadata") or {}), _METADATA: root.key}


class StoreSequence:
    """Numbers that a store keeps beside the counts, so that another process finds them.

    They number a thread's root runs, and note what a graph has asked and checked. Where they are
    needed, reading one raises a `QuotaStoreError` while the store is unavailable.
    """

    def __init__(
        self, store: StoreClient, prefix: str | None = None, *, is_needed: bool = True
    ) -> None:
        self._store, self._is_needed = store, is_needed
        # The prefix of the keys; `None` for that of the running node.
        self._prefix = prefix

    def _key(self, kind: str, subject: str) -> str:
        prefix = self._prefix
        if prefix is None:
            prefix = prefix_now(self._store.prefix, {}, running_runtime())
        return str(CountKey(kind, ROOT_RUN, subject, prefix=prefix))

    async def numbered(self, mode: Mode, run: RootRun, caller: CallContext) -> str | None:
        """Return the thread of a root run and its number there; `None` without one of them."""
        thread = thread_of(run, caller)
        if thread is None:
            return None
        newest = await self.newest(mode, thread) if run.resumes else None
        if newest is None:
            number = await self.add(mode, "", str(thread), name=run.key)
            newest = None if number is None else f"{thread}@{number}"
        return newest

    async def newest(self, mode: Mode, thread: object) -> str | None:
        """Return a thread's newest root run, as counts name it; `None` if the store has none."""
        number = await self.read(mode, "", str(thread))
        return None if number is None else f"{thread}@{number}"

    async def read(self, mode: Mode, kind: str, subject: str) -> int | None:
        """Return a number, or `None` if the store has none."""
        key = self._key(kind, subject)
        counts = await self._store.peek(mode, [key])
        if counts is None:
            # The reply may be lost.
            counts = await self._store.peek(mode, [key])
        if counts is None and self._is_needed:
            raise QuotaStoreError(
                "the store could not be asked about the run: resume it again when the store answers"
            )
        return counts[key].used if counts and key in counts else None

    async def add(self, mode: Mode, kind: str, *subjects: str, name: str = "") -> int | None:
        """Add 1 to each number, once for a name.

        Return the first subject's number, or `None` if the store is unavailable.
        """
        # It begins with the time: one that has expired is not given again.
        keys = [self._key(kind, subject) for subject in subjects]
        counters = {key: CountRef(key, used=int(time.time()), mirrored=True) for key in keys}
        demand = Demand(dict.fromkeys(keys, 1))
        sent = AcquireRequest(name or keys[0], uuid4().hex, counters, (demand,))
        answer = await self._store.acquire(mode, sent, undo=False)
        return None if answer is None else answer.used[keys[0]] + 1

    async def note(self, mode: Mode, kind: str, *subjects: str) -> None:
        """Keep a number for each subject: now, or when the store answers again."""
        if await self.add(mode, kind, *subjects) is None:
            noted = Correction(uuid4().hex, {self._key(kind, name): 1 for name in subjects})
            self._store.settle_soon(AcquireRequest("", "", corrections=(noted,)))


def thread_of(run: RootRun, caller: CallContext) -> object:
    """Return the thread of a root run, or that of the caller."""
    return caller.run_thread_id if run.thread_id is None else run.thread_id
