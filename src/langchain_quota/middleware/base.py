"""The base of all middlewares: LangChain's hooks, which call the kernel, and how runs begin."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from inspect import currentframe
from typing import TYPE_CHECKING, Any, ClassVar

from langchain.agents.middleware.types import (
    AgentMiddleware,
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    ResponseT,
    StateT,
)
from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime
from langgraph.types import Command
from langsmith.utils import tracing_is_enabled

from langchain_quota.core.decision import Refund
from langchain_quota.core.plans import stops_after
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.limits.calls import ConcurrencyLimit
from langchain_quota.middleware.calls import Update
from langchain_quota.middleware.conclude import end_again, ending_message
from langchain_quota.middleware.context import CallContext, call_context, running_config
from langchain_quota.middleware.damage import DAMAGES, raise_if_damaged
from langchain_quota.middleware.feature import Feature, Handler, Request, Response
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import repaired, since, unfinished_calls
from langchain_quota.middleware.state import (
    LEDGER,
    NEW_RUN,
    THREAD_TOOLS,
    Ledger,
    State,
    ToolCounts,
    ledger,
    thread_tools,
)
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, as_async, run_sync
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry import names

if TYPE_CHECKING:
    from langgraph._internal._typing import StateLike
    from typing_extensions import TypeVar

    # `AgentMiddleware` is invariant in state and context, and a list of middlewares has one type of
    # each. So ours say `Any` for the state, and for a context that is not given.
    ContextT = TypeVar("ContextT", bound=StateLike | None, default=Any)
else:
    from langgraph.typing import ContextT


_JUMPS = "__can_jump_to__"
"""The attribute that LangChain's `hook_config` sets."""

_STAND_INS = ("awrap_model_call", "awrap_tool_call")
"""The hooks that have stand-ins while LangSmith is switched off."""


def is_own(cls: type) -> bool:
    """Return whether a class is one of this package."""
    return cls.__module__.startswith("langchain_quota.")


class MiddlewareName(str):
    """A name that says what to write if an agent lists two middlewares of this name."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        is_same = str.__eq__(self, other)
        if is_same and isinstance(other, MiddlewareName) and compat.is_from_factory(currentframe()):
            raise ValueError(
                f"middleware lists two of the name {str(self)!r}: put their limits into one "
                "QuotaMiddleware([…]), or give each drop-in a limit_name= of its own"
            )
        return is_same


class ModelCallMiddleware(AgentMiddleware[StateT, ContextT, ResponseT]):
    """A middleware around model calls, which says once for both modes what it does there."""

    trace_policy = compat.small_traces()
    """What traces show of the hooks."""

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT]:
        """Make a model call with all that belongs to it."""
        return run_sync(self._wrap_model_call("", request, as_async(handler)))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT]:
        """Call `wrap_model_call` without blocking the event loop."""
        return await self._wrap_model_call("a", request, handler)

    async def _wrap_model_call(self, mode: Mode, request: Request, handler: Handler) -> Response:
        raise NotImplementedError


class LimitMiddleware(ModelCallMiddleware[StateT, ContextT, ResponseT]):
    """A middleware that limits agents.

    Args:
        limits: The limits, checked together.
        parts: What its name has beside that of the class: limited tools, the limit's name.
        settings: The other arguments of `Kernel`.
    """

    feature_kinds: ClassVar[Sequence[type[Feature]]] = ()
    """Kinds of features, in the order in which they are called."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise a `TypeError` if LangChain would ignore that an override ends the run."""
        super().__init_subclass__(**options)
        for hook in ("before_model", "abefore_model", "after_model", "aafter_model"):
            defined = [base for base in cls.__mro__ if hook in vars(base)]
            ours = next(base for base in defined if is_own(base) or base is AgentMiddleware)
            overridden_jumps, jumps = (
                getattr(vars(base)[hook], _JUMPS, ()) for base in (defined[0], ours)
            )
            if "end" in jumps and "end" not in overridden_jumps:
                raise TypeError(
                    f"{cls.__name__}.{hook} could not end a run, and calls over the limit would "
                    'run: write @hook_config(can_jump_to=["end"]) above it, and from '
                    "langchain.agents.middleware import hook_config"
                )

    def __init__(
        self, limits: tuple[Limit, ...], *, parts: Sequence[str | None] = (), **settings: Any
    ) -> None:
        super().__init__()
        self.limits = limits
        self._parts = [part for part in parts if part]
        self.kernel = Kernel(self, limits, feature_kinds=self.feature_kinds, **settings)
        if tracing_is_enabled():
            compat.TRACED.set()
        else:
            vars(self).update({hook: compat.untraced(self, hook) for hook in _STAND_INS})

    def __setstate__(self, state: dict[str, object]) -> None:
        """Copy the state of the original, with new stand-ins."""
        stand_ins = {hook: compat.untraced(self, hook) for hook in _STAND_INS if hook in state}
        vars(self).update(state, **stand_ins)

    # A new object each time: a set compares only different ones, even if a name is listed twice.
    @property
    def name(self) -> str:
        """Name in the graph: its class and, of a drop-in, the limited tool and the limit's name."""
        # LangGraph reserves these two in the names of nodes.
        inner = "/".join(self._parts).replace(":", "_").replace("|", "_")
        return MiddlewareName(type(self).__name__ + (f"[{inner}]" if inner else ""))

    def before_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Begin a new run: set the run's counts to 0, and answer every call left without an answer.

        LangGraph does not call this when a run is resumed.

        Raises:
            RuntimeError: Another middleware of this agent counts its model calls, too.
        """
        return begin_run(self.kernel, "", state, runtime)

    async def abefore_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Call `before_agent` without blocking the event loop."""
        return begin_run(self.kernel, "a", state, runtime)

    async def _wrap_model_call(self, mode: Mode, request: Request, handler: Handler) -> Response:
        # A run that a limit has ended makes no more model calls.
        update = end_again(request.state, request.runtime)
        if update is None:
            return await self._call_model(mode, request, handler)
        # The message has its old id, so that it is no new one.
        return WrittenResponse(None, {**update, "messages": [ending_message(request.state)]})

    async def _call_model(self, mode: Mode, request: Request, handler: Handler) -> Response:  # noqa: ARG002 - for subclasses
        return await handler(request)

    def remove_hooks(self, hooks: Sequence[str]) -> None:
        """Remove hooks that are not needed from this object's class."""
        # LangChain makes a node for each hook that the class overrides, and a wrapper around each
        # model and tool call. A subclass of the user's own keeps all hooks.
        if is_own(type(self)):
            package_class: Any = type(self)
            self.__class__ = _without_hooks(package_class, tuple(hooks))


@cache
def _without_hooks(cls: type, hooks: tuple[str, ...]) -> type:
    """Return the same class without some hooks."""
    removed = {hook: vars(AgentMiddleware)[hook] for hook in [*hooks, *(f"a{h}" for h in hooks)]}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), {**named, **removed}) if hooks else cls


def may_end_runs(limits: Sequence[Limit]) -> bool:
    """Return whether one of the limits may end a run."""
    return any(stops_after(limit) is not None for limit in limits)


class WrittenResponse(ModelResponse[Any], ExtendedModelResponse[Any]):
    """An answer, with what is written to the state. A subclass can use it as any response."""

    def __init__(self, response: Response | None, update: Update) -> None:
        written = {**update}
        # Without an answer, the messages are the final ones of a refused call.
        self.result = response.result if response else written.pop("messages", [])
        self.structured_response = response.structured_response if response else None
        self.command = Command(update=written)

    @property
    def model_response(self) -> Response:  # type: ignore[override]  # as it is now
        """Response without the update."""
        return ModelResponse(self.result, self.structured_response)


def begin_run(kernel: Kernel, mode: Mode, state: State, runtime: object) -> Update:
    """Begin a new run, and return the update; see `LimitMiddleware.before_agent`."""
    # Around the model call, another middleware could take the error for one of the model.
    kernel.observers.check(mode)
    try:
        return _begin_run(kernel, state, call_context(runtime))
    except DAMAGES as error:
        raise_if_damaged(state, error)
        raise


def _begin_run(kernel: Kernel, state: State, context: CallContext) -> Update:
    compat.note_tracers(running_config().get("callbacks"))
    update: Update = {}
    history = state.get("messages") or ()
    old = ledger(state)
    has_begun = _has_begun(state) and kernel.name not in old.get("begun_by", ())
    counts = _refund_stopped_calls(kernel, state, context)
    if counts.thread != thread_tools(state):
        update[THREAD_TOOLS] = counts.thread
    answered = repaired(state, is_shared=context.is_nested)
    if answered is not None:
        update["messages"] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *answered]
        history = answered
    if state.get("structured_response") is not None:
        # Older versions of LangChain keep the response of an earlier turn.
        update["structured_response"] = None
    if not has_begun and kernel.recorder.is_new(context.task("run")):
        kernel.recorder.count(names.RUNS, context.agent)
    kernel.recorder.begin_series(context.agent, kernel.limits)
    begun: Ledger = old if has_begun else {}
    written: Ledger = {
        **NEW_RUN,
        "run": begun.get("run") or context.run(),
        "turn": old.get("turn") if has_begun else _turn(history),
        "begun_by": _also_begun(kernel, begun.get("begun_by", {})),
        "store": _only_store(kernel, begun.get("store")),
        "own": {},
    }
    batch = old.get("batch")
    if batch is not None:
        written["batch"] = {**batch, "calls": counts.calls}
    for begin in kernel.begin_run_hooks:
        begin(state, written["own"])
    return {**update, LEDGER: written}


def _refund_stopped_calls(kernel: Kernel, state: State, context: CallContext) -> ToolCounts:
    """Refund calls of the last run that these limits stopped, and return the counts."""
    # A limit raised, or a review stopped the calls before the limits saw them: so no call of the
    # message has started. What a store was charged is not refunded: a caller who begins at an old
    # checkpoint would get refunds for calls that ran after that checkpoint.
    old = ledger(state)
    counts, batch = ToolCounts.of(state, old, None), old.get("batch")
    unfinished = unfinished_calls(state, batch["message"]) if batch else None
    if batch is None or unfinished is None or kernel.name not in batch.get("waiting", ()):
        return counts
    message, calls = unfinished
    original = {call["id"]: Call("tool", call["name"]) for call in message.tool_calls}
    if not any(
        limit.matches(Call("tool", call["name"])) and limit.matches(original[call["id"]])
        for limit in kernel.limits
        for call in calls
    ):
        return counts
    refunds: list[Refund] = []
    for call in calls:
        charge = counts.calls.get(str(call["id"]))
        if charge is None or charge["keys"]:
            continue
        caller = context.agent, context.thread_id
        refunds += counts.refund(Call("tool", call["name"], call["id"], 1, *caller))
    kernel.recorder.record_refunds(refunds)
    return counts


def _also_begun(kernel: Kernel, begun_by: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the middlewares that have begun a run, this one included."""
    begun = {**begun_by, kernel.name: kernel.counts_models}
    counting = [mode for mode in begun.values() if mode is not None]
    if kernel.counts_models is None or len(counting) == 1 or {*counting} == {"returned"}:
        return begun
    raise RuntimeError(
        f"{kernel.name} and another middleware of this agent both count its model calls: put "
        "all model limits into one QuotaMiddleware"
    )


def _only_store(kernel: Kernel, name: str | None) -> str | None:
    """Return the name of the agent's store; raise if another middleware has a different one."""
    # The charges in the ledger do not say which store has them.
    client = StoreClient.by_name.get(name or "")
    if kernel.store is None or (client is not None and client.store is kernel.store.store):
        return name
    if client is None:
        return kernel.store.name
    raise RuntimeError(
        f"{kernel.name} and another middleware of this agent have two stores: give them the same "
        "object, or hold another agent or graph to the limits of the second store"
    )


def _has_begun(state: State) -> bool:
    """Return whether another middleware has begun this run: no answer of the model since."""
    messages = since(state.get("messages") or (), ledger(state).get("turn"))
    return messages is not None and not any(isinstance(message, AIMessage) for message in messages)


def _turn(history: Sequence[AnyMessage]) -> str | int:
    """Return the id or number by which the newest message is found again."""
    # Not every reducer gives messages an id.
    newest = history[-1].id if history else None
    return len(history) if newest is None else newest


def check_store(store: object, limits: Sequence[Limit]) -> None:
    """Check that a store is a `QuotaStore`, and that there is one if limits need it."""
    if store is not None and (isinstance(store, type) or not isinstance(store, QuotaStore)):
        # A URL is not shown: it may have a password.
        shown = "a string: RedisStore(url) is one" if isinstance(store, str) else repr(store)
        if isinstance(store, type):
            shown = f"the class: write store={store.__name__}()"
        raise TypeError(f"store must be a QuotaStore or None, not {shown}")
    for limit in limits:
        if store is None and limit.quotas:
            raise ValueError(
                f"limit {limit.name!r} has quotas: give a store that counts them, "
                "store=MemoryStore() in one process, store=RedisStore() in several, or "
                "PostgresStore(…)"
            )
        wide = [f"per={quota.per!r}" for quota in limit.quotas if quota.per in ("global", "agent")]
        wide += ["concurrency"] if isinstance(limit, ConcurrencyLimit) else []
        if wide and callable(getattr(store, "prefix", None)):
            raise ValueError(
                f"limit {limit.name!r} has {wide[0]}, which counts calls of all prefixes, but the "
                "store's prefix is a function, such as of the tenant: hold another agent to the "
                "limit, such as a sub-agent, whose store has a string as prefix"
            )
