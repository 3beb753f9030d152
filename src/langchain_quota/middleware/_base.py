"""What every limiting middleware shares: its name, and the beginning of a run."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ResponseT, StateT
from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime
from langsmith.utils import tracing_is_enabled

from langchain_quota import messages
from langchain_quota.decision import ROOT_RUN, THREAD, Call
from langchain_quota.features.deep_agents.interpreters import unseen_calls
from langchain_quota.features.deep_agents.sub_agents import starters, unlimited_sub_agents
from langchain_quota.features.root_run.run import root_run, watch_root_runs
from langchain_quota.features.telling.offered_tools import OfferedTools
from langchain_quota.features.unjudged import count_unjudged_calls, mark_judged
from langchain_quota.limits import Limit
from langchain_quota.middleware._abandoned import abandoned_calls, take_back
from langchain_quota.middleware._calls import Conclusion, Request, Update
from langchain_quota.middleware._context import CallContext, call_context, running_agent
from langchain_quota.middleware._history import (
    answered_history,
    dangling_calls,
    since,
)
from langchain_quota.middleware._tool_counts import ToolCounts
from langchain_quota.state import (
    LEDGER,
    NEW_RUN,
    THREAD_TOOLS,
    Abandoned,
    Ledger,
    ledger,
    thread_tools,
)
from langchain_quota.telemetry import Telemetry, recorder_of
from langchain_quota.telemetry.labels import UNNAMED
from langchain_quota.user_line import UserLine

if TYPE_CHECKING:
    from langgraph._internal._typing import StateLike
    from typing_extensions import TypeVar

    # `AgentMiddleware` is invariant in state and context, and a list of middlewares has one type of
    # each. So ours say `Any` for the state, and for a context that is not given.
    ContextT = TypeVar("ContextT", bound=StateLike | None, default=Any)
else:
    from langgraph.typing import ContextT

ModelMode = Literal["admitted", "returned"]


class Limiter(AgentMiddleware[StateT, ContextT, ResponseT]):
    """A middleware that holds agents to limits.

    Args:
        limits: The limits, judged together.
        limit_name: The name that the user gave, if any.
        telemetry: Where decisions are made visible; `None` for the process's default.

    Raises:
        TypeError: `telemetry` has the wrong type.
    """

    def __init__(
        self, limits: tuple[Limit, ...], *, limit_name: str | None, telemetry: Telemetry | None
    ) -> None:
        super().__init__()
        self._made_at = UserLine.of_caller()
        self.limits = limits
        self._enforced = tuple(limit for limit in limits if limit.enforce)
        self._limit_name = limit_name
        self._recorder = recorder_of(telemetry)
        self._recorder.watch_limits(limits)
        self._counts_root_runs = any(
            quota.per == ROOT_RUN for limit in limits for quota in limit.quotas
        )
        if self._counts_root_runs:
            watch_root_runs()
        if self._recorder.unjudged is not None:
            count_unjudged_calls()
        if not tracing_is_enabled():
            vars(self)["awrap_model_call"] = untraced(self)
        self._model_mode: ModelMode | None = None
        # Whether a store counts threads; `None` where the middleware takes no store.
        self._has_store: bool | None = None
        self._warned = False
        self._offered = OfferedTools(limits, self._recorder)
        # The functions that start sub-agents and that have been checked already.
        self._looked_at: WeakSet[FunctionType] = WeakSet()

    @property
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
        return self._begin_run(state, runtime)

    async def abefore_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """`before_agent`, without blocking the event loop."""
        return self._begin_run(state, runtime)

    def _learn_tools(self, request: ModelRequest[Any]) -> None:
        """Tell the telemetry which tools there really are, before the model invents others."""
        is_new = self._offered.learn(request)
        if is_new:
            self._warn_of_sub_agents(request.tools)
        self._refuse_unseen_calls(request)
        if is_new:
            on_trial = unseen_calls(self.limits, request.tools)
            if on_trial is not None:
                self._made_at.warn(on_trial)

    def _refuse_unseen_calls(self, request: ModelRequest[Any]) -> None:
        """Refuse to run an agent whose code can call a limited tool."""
        unseen = unseen_calls(self._enforced, request.tools)
        if unseen is not None:
            raise RuntimeError(unseen)

    def _warn_of_sub_agents(self, tools: Sequence[Any]) -> None:
        """Warn once per agent whose tools start other agents without limits."""
        for start in starters(tools):
            if start in self._looked_at:
                continue
            self._looked_at.add(start)
            unlimited = ", ".join(map(repr, unlimited_sub_agents(start)))
            if unlimited:
                self._made_at.warn(
                    f"the sub-agents that the tool 'task' of agent {running_agent() or UNNAMED!r} "
                    f"starts have no limits of langchain-quota: {unlimited}. Give them their "
                    "parent's limits: with_limits(create_deep_agent, quota)(…)"
                )

    def _mark_judged(self, state: Mapping[str, Any]) -> None:
        """Note that this agent's newest model call is judged, and its tool calls."""
        mark_judged(self._recorder.unjudged, state)

    def _begin_run(self, state: Mapping[str, Any], runtime: Runtime[ContextT]) -> Update:
        context = call_context(runtime, model_name=None)
        self._warn_if_forgetful(context)
        update: Update = {}
        history = state.get("messages") or ()
        known = ledger(state)
        begun = _has_begun(state) and self.name not in known.get("begun_by", ())
        abandoned = known.get("abandoned") if begun else abandoned_calls(state)
        dangling = dangling_calls(state)
        earlier = ToolCounts.of(state, None)
        pending_refunds = earlier.pending_refunds
        if earlier.thread != thread_tools(state):
            update[THREAD_TOOLS] = earlier.thread
            state = {**state, THREAD_TOOLS: earlier.thread}
        if dangling:
            repaired = answered_history(
                history, dangling, messages.ABANDONED, is_shared=context.is_nested
            )
            update["messages"] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *repaired]
            history = repaired
        if abandoned is not None and self._held(abandoned):
            counts, refunds = take_back(state, abandoned, context)
            self._recorder.record_refunds(refunds)
            update[THREAD_TOOLS] = counts.thread
            pending_refunds |= counts.pending_refunds
            abandoned = None
        if state.get("structured_response") is not None:
            # Older versions of LangChain keep that of an earlier turn.
            update["structured_response"] = None
        if not begun:
            self._recorder.record_run(context.agent, context.task("run"))
        before: Ledger = known if begun else {}
        update[LEDGER] = {
            **NEW_RUN,
            "run": before.get("run") or context.run(),
            "turn": known.get("turn") if begun else _turn(history),
            "begun_by": [*before.get("begun_by", ()), self.name],
            "model_mode": self._checked_mode(before.get("model_mode")),
            "abandoned": abandoned,
            "pending_refunds": pending_refunds,
        }
        if known.get("repeats"):
            update[LEDGER]["repeats"] = {}
        if granted := known.get("granted"):
            of_thread = {
                name: each for name, each in granted.items() if name.endswith(f"/{THREAD}")
            }
            update[LEDGER]["granted"] = of_thread
        return update

    def _checked_mode(self, begun: str | None) -> str | None:
        """How this run counts model calls, from all middlewares that have begun it."""
        own = self._model_mode
        if begun is None or own is None:
            return own or begun
        if begun == own == "returned":
            return own
        raise RuntimeError(
            f"{self.name} and another middleware of this agent both count its model calls: put "
            "all model limits into one QuotaMiddleware"
        )

    def _held(self, abandoned: Abandoned) -> bool:
        """Whether the abandoned calls did not pass these limits, so that none of them started."""
        # They did not if a limit raised, or if a review stopped them before it.
        calls = [(Call("tool", name), Call("tool", old)) for name, _, old in abandoned["calls"]]
        return self.name in abandoned["held_by"] and any(
            limit.matches(call) and limit.matches(original)
            for limit in self.limits
            for call, original in calls
        )

    def _record(self, request: Request, conclusion: Conclusion) -> Conclusion:
        """Make a conclusion visible, unless the hook runs again."""
        known = request.known.get("trace")
        recorded = self._recorder.record(
            conclusion.decisions,
            started=request.started,
            error=conclusion.error,
            task_id=request.task_id,
            trace=known,
            after_refusal=request.follows_refusal,
        )
        if recorded.is_new and conclusion.refunds:
            self._recorder.record_refunds(conclusion.refunds)
        written = Ledger()
        if recorded.trace is not None and recorded.trace != known:
            # Later steps of the run belong to this trace.
            written["trace"] = dict(recorded.trace)
        root = root_run() if self._counts_root_runs else None
        if root is not None:
            written.update(root.unsaved(request.known))
        if not written:
            return conclusion
        update = conclusion.update or {}
        written = {**update.get(LEDGER, {}), **written}
        return conclusion._replace(update={**update, LEDGER: written})

    def _counts_last(self, context: CallContext) -> bool:
        """Whether the counts of threads outlive the run."""
        return context.remembers

    def _warn_if_forgetful(self, context: CallContext) -> None:
        if self._warned or self._counts_last(context):
            return
        remedy = _remedy(context, has_store=self._has_store)
        for limit in self.limits:
            if limit.thread_limit is not None:
                self._warned = True
                self._made_at.warn(
                    f"{self.name} has a thread limit, but this agent's state does not outlive the "
                    f"run: the limit holds within one run only. {remedy}"
                )
                return


def untraced(middleware: AgentMiddleware[Any, Any, Any]) -> Callable[..., Awaitable[Any]]:
    """A stand-in for `awrap_model_call` that is not `async`, while LangSmith is switched off."""
    # LangChain then adds no wrapper for tracing, which costs two trips through threads a call.
    stand_in: Any = partial(_model_call, middleware)
    # LangSmith reads the signature at every call. If it is missing, LangSmith computes it again.
    stand_in.__signature__ = signature(stand_in)
    made: Callable[..., Awaitable[Any]] = stand_in
    return made


def _model_call(
    middleware: AgentMiddleware[Any, Any, Any],
    request: ModelRequest[Any],
    handler: Callable[[ModelRequest[Any]], Awaitable[Any]],
) -> Awaitable[Any]:
    return type(middleware).awrap_model_call(middleware, request, handler)


def effect(conclusion: Conclusion) -> Update | None:
    """Return what the hook returns, or raise the conclusion's error."""
    if conclusion.error is not None:
        raise conclusion.error
    return conclusion.update


def _remedy(context: CallContext, *, has_store: bool | None) -> str:
    """What to do where the counts of threads do not outlive the run."""
    thread_id = '{"configurable": {"thread_id": …}}'
    if not context.is_nested:
        if has_store:
            return f"Call the agent with {thread_id}: the store counts by it"
        return "Give create_agent a checkpointer, or use run_limit"
    root_run = 'limit the outermost run: Quota(…, per="root_run")'
    if has_store:
        return f"Call the outermost graph with {thread_id}: the store counts by it. Or {root_run}"
    user = "use QuotaMiddleware with" if has_store is None else "give the middleware"
    return (
        f"To count all agents of a thread together, {user} store=MemoryStore() or RedisStore(), "
        f"and call the outermost graph with {thread_id}; or, with a store, {root_run}. To count "
        "this agent alone, give create_agent checkpointer=True, and the outermost graph a "
        "checkpointer"
    )


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
