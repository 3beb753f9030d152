"""The one flow of every limiting middleware: a run begins, its calls are judged."""

import time
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from inspect import signature
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ResponseT, StateT
from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime
from langsmith.utils import tracing_is_enabled

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.core.checks import OnStoreError, ResolvedLimits
from langchain_quota.core.decision import Refund
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call, Kind
from langchain_quota.middleware.calls import (
    Batch,
    HookResult,
    ToolCounts,
    Update,
    model_batch,
    refunding,
    tool_batch,
)
from langchain_quota.middleware.conclude import conclude_model, conclude_tools, refunds_of
from langchain_quota.middleware.context import (
    CallContext,
    LimitResolver,
    call_context,
    running_agent,
)
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.history import repaired, since, unfinished_calls
from langchain_quota.middleware.state import (
    LEDGER,
    NEW_RUN,
    THREAD_TOOLS,
    Amounts,
    Ledger,
    ledger,
    merge_ledgers,
    thread_tools,
)
from langchain_quota.runtime.arguments import UserLine
from langchain_quota.runtime.sync_async import Mode, ask
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.client import StoreClient
from langchain_quota.telemetry import Telemetry, names, recorder_of
from langchain_quota.telemetry.observers import Observer, Observers

if TYPE_CHECKING:
    from langgraph._internal._typing import StateLike
    from typing_extensions import TypeVar

    # `AgentMiddleware` is invariant in state and context, and a list of middlewares has one type of
    # each. So ours say `Any` for the state, and for a context that is not given.
    ContextT = TypeVar("ContextT", bound=StateLike | None, default=Any)
else:
    from langgraph.typing import ContextT

_JUMPS = "__can_jump_to__"  # what `hook_config` sets
ModelMode = Literal["admitted", "returned"]

_STAND_INS = ("awrap_model_call", "awrap_tool_call")


class LimitMiddleware(AgentMiddleware[StateT, ContextT, ResponseT]):
    """A middleware that holds agents to limits.

    Args:
        limits: The limits, judged together.
        limit_name: The name that the user gave, if any.
        telemetry: Where decisions are made visible; `None` for the process's default.
        store: Where runs share counts, if they do.
        on_store_error: What happens to calls while the store cannot be asked.
        on_decision: The user's functions that get every decision.
        options: What features are told.

    Raises:
        TypeError: `telemetry` has the wrong type.
    """

    feature_kinds: ClassVar[Sequence[type[Feature]]] = ()
    """The features that it may have, in the order in which they are called."""
    _every_call: ClassVar[bool] = True
    # Whether tool calls that no limit matches are visible, too.

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise a `TypeError` if LangChain would ignore that an override ends the run."""
        super().__init_subclass__(**options)
        for hook in ("before_model", "abefore_model", "after_model", "aafter_model"):
            defined = [base for base in cls.__mro__ if hook in vars(base)]
            ours = next(base for base in defined if is_own(base) or base is AgentMiddleware)
            used, own = (getattr(vars(each)[hook], _JUMPS, ()) for each in (defined[0], ours))
            if "end" in own and "end" not in used:
                raise TypeError(
                    f"{cls.__name__}.{hook} could not end a run, and calls over the limit would "
                    'run: write @hook_config(can_jump_to=["end"]) above it, and from '
                    "langchain.agents.middleware import hook_config"
                )

    def __init__(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        limits: tuple[Limit, ...],
        *,
        limit_name: str | None = None,
        telemetry: Telemetry | None,
        store: QuotaStore | None = None,
        on_store_error: OnStoreError = "block",
        on_decision: Observer | Sequence[Observer] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.created_at = UserLine.of_caller()
        self.limits = limits
        self._limit_name = limit_name
        # The kinds of calls that are judged.
        self._kinds = {kind for each in limits for kind in each.kinds}
        self.recorder = recorder_of(telemetry)
        self.recorder.watch_limits(limits)
        self.observers = Observers(on_decision, self.recorder)
        self.store = None if store is None else StoreClient(store, self.recorder)
        self.on_store_error: OnStoreError = on_store_error
        self.options = options or {}
        self._model_mode: ModelMode | None = None
        self._now = LimitResolver(
            limits,
            self.recorder,
            prefix=getattr(store, "prefix", None),
            clock=None if store is None else clock_of(store),
        )
        if not tracing_is_enabled():
            vars(self).update({hook: untraced(self, hook) for hook in _STAND_INS})
        # Only one agent's tools are kept, so that those of agents that are gone can be freed.
        self._newest: tuple[str | None, list[Any]] = (None, [])
        made = [kind.of(self) for kind in self.feature_kinds]
        self.features = tuple(each for each in made if each is not None)
        self.hooks = own_methods(self.features)

    def __getstate__(self) -> dict[str, object]:
        """What a copy has: not the tools, which may hold what cannot be copied."""
        return {**vars(self), "_newest": (None, [])}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take over what the original has, except its own stand-ins."""
        stand_ins = {hook: untraced(self, hook) for hook in _STAND_INS if hook in state}
        vars(self).update(state, **stand_ins)

    @cached_property
    def name(self) -> str:
        """The middleware's name in the graph: its class, the limited tools and the limit's name."""
        parts = [*self.limits[0].tools, *([self._limit_name] if self._limit_name else [])]
        if not parts:
            return type(self).__name__
        # LangGraph reserves these two in the names of nodes.
        inner = "/".join(parts).replace(":", "_").replace("|", "_")
        return f"{type(self).__name__}[{inner}]"

    def before_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Begin a new run: set the run's counts to 0, and answer every call left without an answer.

        LangGraph does not call this when a run is resumed.

        Raises:
            RuntimeError: Another middleware of this agent counts its model calls, too; or LangChain
                is older than `InlineQuotaMiddleware` needs.
        """
        return self._begin_run("", state, runtime)

    async def abefore_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """`before_agent`, without blocking the event loop."""
        return self._begin_run("a", state, runtime)

    def _begin_run(self, mode: Mode, state: Mapping[str, Any], runtime: Any) -> Update:
        # Around the model call, another middleware could take the error for one of the model.
        self.observers.check(mode)
        context = call_context(runtime, model_name=None)
        update: Update = {}
        history = state.get("messages") or ()
        known = ledger(state)
        begun = _has_begun(state) and self.name not in known.get("begun_by", ())
        counts = self._refund_stopped_calls(state, context)
        if counts.thread != thread_tools(state):
            update[THREAD_TOOLS] = counts.thread
        answered = repaired(state, is_shared=context.is_nested)
        if answered is not None:
            update["messages"] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *answered]
            history = answered
        if state.get("structured_response") is not None:
            # Older versions of LangChain keep that of an earlier turn.
            update["structured_response"] = None
        if not begun and self.recorder.is_new(context.task("run")):
            self.recorder.count(names.RUNS, context.agent)
        before: Ledger = known if begun else {}
        written: Ledger = {
            **NEW_RUN,
            "run": before.get("run") or context.run(),
            "turn": known.get("turn") if begun else _turn(history),
            "begun_by": self._also_begun(before.get("begun_by", {})),
            "store": self._only_store(before.get("store")),
            "own": {},
        }
        batch = known.get("batch")
        if batch is not None:
            written["batch"] = {**batch, "calls": counts.calls}
        for begin in self.hooks["begin"]:
            begin(state, written["own"])
        return {**update, LEDGER: written}

    def _refund_stopped_calls(self, state: Mapping[str, Any], context: CallContext) -> ToolCounts:
        """The counts without what the last run was charged for calls that these limits stopped."""
        # They did so if a limit raised, or if a review stopped the calls before it: then no call of
        # the message has started. What a store was charged stays: a caller who begins at an old
        # checkpoint would have it taken back for calls that ran behind that checkpoint.
        known = ledger(state)
        counts, batch = ToolCounts.of(state, known, None), known.get("batch")
        found = unfinished_calls(state, batch["message"]) if batch else None
        if batch is None or found is None or self.name not in batch.get("waiting", ()):
            return counts
        message, calls = found
        original = {call["id"]: Call("tool", call["name"]) for call in message.tool_calls}
        if not any(
            limit.matches(Call("tool", call["name"])) and limit.matches(original[call["id"]])
            for limit in self.limits
            for call in calls
        ):
            return counts
        refunds: list[Refund] = []
        for call in calls:
            charge = counts.calls.get(str(call["id"]))
            if charge is None or charge["keys"]:
                continue
            made = Call("tool", call["name"], call["id"], 1, context.agent, context.thread_id)
            refunds += refunds_of(made, counts.refund(str(call["id"])))
        self.recorder.record_refunds(refunds)
        return counts

    def _also_begun(self, begun_by: Mapping[str, str | None]) -> dict[str, str | None]:
        """The middlewares that have begun a run, this one included."""
        made = {**begun_by, self.name: self._model_mode}
        counting = [each for each in made.values() if each is not None]
        if self._model_mode is None or len(counting) == 1 or {*counting} == {"returned"}:
            return made
        raise RuntimeError(
            f"{self.name} and another middleware of this agent both count its model calls: put "
            "all model limits into one QuotaMiddleware"
        )

    def _only_store(self, known: str | None) -> str | None:
        """Name the agent's store; raise if this middleware has another one than an earlier one."""
        # The charges in the ledger do not say which store has them.
        client = StoreClient.by_name.get(known or "")
        if self.store is None or (client is not None and client.store is self.store.store):
            return known
        if client is None:
            return self.store.name
        raise RuntimeError(
            f"{self.name} and another middleware of this agent have two stores: give them the same "
            "object, or hold another agent or graph to the limits of the second store"
        )

    async def release(
        self, mode: Mode, known: Ledger, step: str, refunds: Mapping[str, Amounts]
    ) -> None:
        """Give back now what the agent's store was charged for calls that do not run."""
        # Another middleware may have charged them. Its store is only found in the process in which
        # the run began.
        client = self.store or StoreClient.by_name.get(known.get("store") or "")
        if client is not None:
            sent = AcquireRequest("", "", corrections=refunding(step, refunds))
            await client.settle(mode, sent)

    def learn_tools(self, request: ModelRequest[Any]) -> None:
        """Learn which tools there really are, before the model invents others."""
        agent, tools = running_agent(), request.tools
        known, newest = self._newest
        if agent == known and len(tools) == len(newest) and all(map(is_, tools, newest)):
            return
        self.recorder.learn_tools(agent, [t.name for t in tools if not isinstance(t, dict)])
        for learn in self.hooks["learn"]:
            learn(agent, tools)
        self._newest = agent, [*tools]

    async def resolve_limits(
        self, mode: Mode, kind: Kind | None, state: Any, runtime: Any
    ) -> ResolvedLimits:
        """The limits on calls of a kind, or on all calls, with their numbers at this moment."""
        limits = self._now.fixed.get(kind)
        if limits is None:
            limits = await self._now.at(mode, kind, state, runtime, self.hooks["root_run"])
        for change in self.hooks["limits"]:
            limits = change(state, limits)
        return limits

    async def check_model_call(
        self, mode: Mode, state: Mapping[str, Any], runtime: Any
    ) -> Update | None:
        """Judge the model call that is about to be made; what follows."""
        if "model" not in self._kinds:
            return None
        limits = await self.resolve_limits(mode, "model", state, runtime)
        for known in self.hooks["known"]:
            await known(mode, state, runtime, limits)
        for attempt in self.hooks["attempt"]:
            runtime = await attempt(mode, runtime)
        batch = model_batch(state, runtime, limits, task=self.name)
        return await self._check_and_record(mode, batch, self._conclude_model)

    async def check_tool_calls(
        self, mode: Mode, state: Mapping[str, Any], runtime: Any, *, task: str = ""
    ) -> Update | None:
        """Judge the tool calls that the model just made; what follows."""
        if "tool" not in self._kinds and not ledger(state).get("final"):
            return None
        limits = await self.resolve_limits(mode, "tool", state, runtime)
        for attempt in self.hooks["attempt"]:
            runtime = await attempt(mode, runtime)
        batch = tool_batch(
            state, runtime, limits, middleware=self.name, every_call=self._every_call, task=task
        )
        if batch is None:
            return None
        return await self._check_and_record(mode, batch, self._conclude_tools)

    def _conclude_model(self, batch: Batch, result: AcquireResult) -> HookResult:
        return conclude_model(batch, result)

    def _conclude_tools(self, batch: Batch, result: AcquireResult) -> HookResult:
        return conclude_tools(batch, result)

    def learn_answer(self, state: Mapping[str, Any], *, saved: bool) -> None:
        """Tell features what the model's step has written."""
        for after_model in self.hooks["after_model"]:
            after_model(state, saved=saved)

    def checking_nodes(self) -> tuple[str, ...]:
        """The nodes of the graph in which this middleware judges."""
        return f"{self.name}.before_model", f"{self.name}.after_model"

    async def _check_and_record(
        self,
        mode: Mode,
        batch: Batch,
        conclude: Callable[[Batch, AcquireResult], HookResult],
    ) -> Update | None:
        """Judge calls, make it visible, and let what follows take effect."""
        for checks in self.hooks["checks"]:
            checks(batch)
        if self.hooks["judged"]:
            (judged,) = self.hooks["judged"]
            batch, result = await judged(mode, batch)
        else:
            result = await self.acquire(mode, batch)
        if result.stopped:
            for refused in self.hooks["refused"]:
                batch, result = await refused(mode, batch, result)
        batch.counted = result.used
        conclusion = conclude(batch, result)
        if batch.counts and batch.counts.refunds and not conclusion.error:
            step = batch.context.step(f"{batch.task}.refused")
            await self.release(mode, batch.known, step, batch.counts.refunds)
        for change in self.hooks["concluded"]:
            conclusion = change(batch, conclusion)
        update = await self.record(mode, batch, conclusion)
        if conclusion.error is not None:
            raise conclusion.error
        return update

    async def acquire(self, mode: Mode, batch: Batch) -> AcquireResult:
        """The answer: from the state's counts, or from the store's if it keeps any of them."""
        if self.store is None or not any(each.shared for each in batch.asked):
            return batch.by_state()
        # Fail before anything is charged.
        self.observers.check(mode)
        sent = batch.to_store()
        result = await self.store.acquire(mode, sent)
        if result is None:
            # The store's client has counted and logged why.
            return self._without_store(batch, sent, self.store)
        batch.answered = True
        batch.raise_limits(sent.keyed(result.granted))
        new = batch.limits.newly_raised(sent.keyed(result.newly_granted))
        self.recorder.record_granted(batch.context.agent, new)
        for answered in self.hooks["answered"]:
            answered(batch, result)
        return result

    def _without_store(
        self, batch: Batch, sent: AcquireRequest, store: StoreClient
    ) -> AcquireResult:
        """The answer while the store cannot be asked; what runs is charged there later."""
        for unanswered in self.hooks["unanswered"]:
            unanswered(batch)
        calls = sum(asked.shared for asked in batch.asked)
        result = batch.without_store(self.on_store_error)
        # What would only be held is charged when it is known what was used.
        held = {name for name, each in sent.counters.items() if each.lease is not None}
        # With "block" a call runs only if limits on trial alone refuse it.
        ran = Counts[str]()
        for hits, admitted in zip(sent.hits, result.admitted, strict=True):
            if admitted and not result.stopped:
                ran.update(
                    sent.keyed({name: n for name, n in hits.amounts.items() if name not in held})
                )
        # A request that was charged after all is taken back, too.
        store.correct_later(sent, ran)
        labels = batch.context.agent, self.on_store_error
        self.recorder.count(names.STORE_FALLBACKS, *labels, amount=calls)
        return result

    async def record(self, mode: Mode, batch: Batch, conclusion: HookResult) -> Update | None:
        """Make a conclusion visible, unless the hook runs again; what is written."""
        if self.observers.present:
            self.observers.check(mode)
        update = conclusion.update
        told = self.recorder.record(
            conclusion.decisions,
            started=batch.started,
            error=conclusion.error,
            task_id=batch.context.task(batch.task),
        )
        if told.is_new and conclusion.refunds:
            self.recorder.record_refunds(conclusion.refunds)
        if batch.written:
            written = merge_ledgers((update or {}).get(LEDGER, {}), batch.written)
            update = {**(update or {}), LEDGER: written}
        if self.observers.present:
            await ask(mode, self.observers, "notify", conclusion.decisions, told)
        return update


def is_own(cls: type) -> bool:
    """Whether a class is one of this package."""
    return cls.__module__.startswith("langchain_quota.")


def own_methods(features: Sequence[Feature]) -> Mapping[str, list[Callable[..., Any]]]:
    """Each method of the seam, of those features that have one of their own."""
    return {
        name: [getattr(each, name) for each in features if getattr(type(each), name) is not base]
        for name, base in vars(Feature).items()
        if isinstance(base, FunctionType) and not name.startswith("_")
    }


def clock_of(store: QuotaStore) -> Callable[[], float]:
    """What says which window of a store's counts it is."""
    clock: Callable[[], float] = getattr(store, "clock", time.time)
    return clock


def untraced(middleware: Any, hook: str) -> Callable[..., Awaitable[Any]]:
    """A stand-in for an async hook that is not `async` itself, while LangSmith is switched off."""
    # LangChain then adds no wrapper for tracing, which costs two trips through threads a call.
    stand_in: Any = partial(_call, middleware, hook)
    # LangSmith reads the signature at every call. If it is missing, LangSmith computes it again.
    stand_in.__signature__ = signature(stand_in)
    made: Callable[..., Awaitable[Any]] = stand_in
    return made


def _call(middleware: Any, hook: str, request: Any, handler: Any) -> Awaitable[Any]:
    made: Awaitable[Any] = getattr(type(middleware), hook)(middleware, request, handler)
    return made


def _has_begun(state: Mapping[str, Any]) -> bool:
    """Whether another limiter has begun this run: the model has not answered since."""
    messages = since(state.get("messages") or (), ledger(state).get("turn"))
    return messages is not None and not any(isinstance(each, AIMessage) for each in messages)


def _turn(history: Sequence[AnyMessage]) -> str | int | None:
    """How the newest message is found again, after the run has added others."""
    if not history:
        return None
    # Not every reducer gives messages an id.
    return len(history) if history[-1].id is None else history[-1].id
