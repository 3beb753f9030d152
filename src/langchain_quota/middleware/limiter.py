"""What every limiting middleware shares: its name, the beginning of a run, subclassing."""

import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ResponseT, StateT
from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime
from langgraph.typing import ContextT
from langsmith.utils import tracing_is_enabled

from langchain_quota import messages
from langchain_quota.decision import Call, Refund
from langchain_quota.errors import QuotaWarning
from langchain_quota.limits import Limit
from langchain_quota.middleware.history import (
    answered_history,
    dangling_calls,
    since,
    unfinished_calls,
)
from langchain_quota.middleware.origin import Origin, origin, running_agent
from langchain_quota.middleware.rulings import Ruling, Update
from langchain_quota.middleware.subclassing import begins_runs, complete
from langchain_quota.middleware.unknown_tools import unknown_tools
from langchain_quota.state import (
    LEDGER,
    NEW_RUN,
    THREAD_TOOLS,
    Abandoned,
    Ledger,
    ToolCounts,
    ledger,
    thread_tools,
)
from langchain_quota.telemetry import Telemetry, recorder_of

ModelMode = Literal["admitted", "returned"]

_REMEDY = (
    "Give create_agent a checkpointer; for a sub-agent, limit the calls of its parent, or use "
    "run_limit"
)
"""What to do where a thread's counts do not outlive the run."""


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
        self._limits = limits
        self._limit_name = limit_name
        self._recorder = recorder_of(telemetry)
        self._recorder.watch_limits(limits)
        if not tracing_is_enabled():
            vars(self)["awrap_model_call"] = self._untraced_model_call
        self._model_mode: ModelMode | None = None
        self._warned = False
        self._remedy = _REMEDY
        # The tools by agent.
        self._offered: dict[str | None, list[str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Honour a subclass's hook in both forms, and begin its runs whatever it overrides.

        Raises:
            TypeError: It overrides `wrap_model_call`, and not `awrap_model_call`.
        """
        super().__init_subclass__(**kwargs)
        complete(cls)

    @property
    def name(self) -> str:
        """The middleware's name in the graph: the class, and what it limits as far as given."""
        parts = [*self._limits[0].tools, *([self._limit_name] if self._limit_name else [])]
        if not parts:
            return type(self).__name__
        # LangGraph reserves these two in the names of nodes.
        inner = "/".join(parts).replace(":", "_").replace("|", "_")
        return f"{type(self).__name__}[{inner}]"

    @begins_runs
    def before_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Begin a new run: a new budget, and an answer for every call that was left without one.

        LangGraph does not call this when a run is resumed.

        Raises:
            RuntimeError: Another middleware of this agent counts its model calls, too; or LangChain
                is older than `InlineQuotaMiddleware` needs.
        """
        return self._begin_run(state, runtime)

    @begins_runs
    async def abefore_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Begin a new run: a new budget, and an answer for every call that was left without one.

        LangGraph does not call this when a run is resumed.

        Raises:
            RuntimeError: Another middleware of this agent counts its model calls, too; or LangChain
                is older than `InlineQuotaMiddleware` needs.
        """
        return self._begin_run(state, runtime)

    def _untraced_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Awaitable[Any]:
        """`awrap_model_call` as LangChain may wrap it for LangSmith while that is switched off.

        A hook that it sees to be `async` costs two trips through worker threads a call.
        """
        return type(self).awrap_model_call(self, request, handler)

    def _learn_tools(self, request: ModelRequest[Any]) -> None:
        """Tell the telemetry which tools there really are, before the model invents others."""
        names = [tool.name for tool in request.tools if not isinstance(tool, dict)]
        agent = running_agent()
        known = self._offered.get(agent)
        if names == known:
            return
        self._offered[agent] = names
        self._recorder.learn_tools(agent, names)
        if known is None:
            self._tell_unknown_tools(agent, request)

    def _tell_unknown_tools(self, agent: str | None, request: ModelRequest[Any]) -> None:
        offered = {_tool_name(tool) for tool in request.tools}
        # Logged, and no QuotaWarning, which can be an error: a tool may be offered later.
        for limit, tool, hint in unknown_tools(self._limits, offered):
            self._recorder.warn_unknown_tool(agent, limit, tool, hint)

    def _begin_run(self, state: Mapping[str, Any], runtime: Runtime[ContextT]) -> Update:
        caller = origin(runtime, model_name=None)
        self._warn_if_forgetful(caller)
        update: Update = {}
        history = state.get("messages") or ()
        known = ledger(state)
        begun = _has_begun(state) and self.name not in known.get("begun_by", ())
        abandoned = known.get("abandoned") if begun else _abandoned(state)
        dangling = dangling_calls(state)
        owed = known.get("owed") or {}
        if dangling:
            repaired = answered_history(history, dangling, messages.ABANDONED)
            update["messages"] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *repaired]
            history = repaired
        if abandoned is not None and self._held(abandoned):
            counts = ToolCounts(
                thread_tools(state),
                {},
                deepcopy(abandoned["charges"]),
                dict(abandoned.get("reserved") or {}),
                dict(owed),
            )
            self._recorder.record_refunds(_refunds(counts, abandoned, caller))
            update[THREAD_TOOLS] = counts.thread
            owed = counts.owed
            abandoned = None
        if state.get("structured_response") is not None:
            # Older versions of LangChain keep that of an earlier turn.
            update["structured_response"] = None
        before: Ledger = known if begun else {}
        update[LEDGER] = {
            **NEW_RUN,
            "run": before.get("run") or caller.run(),
            "turn": known.get("turn") if begun else _turn(history),
            "begun_by": [*before.get("begun_by", ()), self.name],
            "model_mode": self._checked_mode(before.get("model_mode")),
            "abandoned": abandoned,
            "owed": owed,
        }
        return update

    def _checked_mode(self, begun: str | None) -> str | None:
        """How this run counts model calls, by all middlewares that have begun it.

        Raises:
            RuntimeError: Two middlewares would count each call twice.
        """
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
        """Whether the abandoned calls did not get past these limits, so that none started.

        A limit that raised, or that a review kept the calls from, has not let them pass.
        """
        calls = [(Call("tool", name), Call("tool", asked)) for name, _, asked in abandoned["calls"]]
        return self.name in abandoned["held_by"] and any(
            limit.matches(call) and limit.matches(asked)
            for limit in self._limits
            for call, asked in calls
        )

    def _conclude(self, ruling: Ruling | None) -> Update | None:
        """Make a ruling visible, and then let it take effect."""
        if ruling is None:
            return None
        return self._effect(self._emit(ruling))

    def _effect(self, ruling: Ruling) -> Update | None:
        if ruling.error is not None:
            raise ruling.error
        return ruling.update

    def _emit(self, ruling: Ruling) -> Ruling:
        """Make a ruling visible, unless it is that of a hook that runs again."""
        emitted = self._recorder.record(
            ruling.decisions,
            started=ruling.started,
            error=ruling.error,
            task_id=ruling.task_id,
            trace=ruling.trace,
        )
        if emitted.is_new:
            self._recorder.record_refunds(ruling.refunds)
        return ruling.traced(emitted.trace)

    def _counts_last(self, caller: Origin) -> bool:
        """Whether the counts of threads outlive the run."""
        return caller.remembers

    def _warn_if_forgetful(self, caller: Origin) -> None:
        if self._warned or self._counts_last(caller):
            return
        for limit in self._limits:
            if limit.thread_limit is not None:
                self._warned = True
                warnings.warn(
                    f"{self.name} has a thread limit, but this agent's state does not outlive the "
                    f"run: the limit holds within one run only. {self._remedy}",
                    QuotaWarning,
                    stacklevel=2,
                )
                return


def _tool_name(tool: Any) -> str:
    """The name of a tool, also of a provider's own, or one that is written as OpenAI does."""
    if not isinstance(tool, dict):
        return str(tool.name)
    return str((tool.get("function") or tool).get("name") or tool.get("type"))


def _has_begun(state: Mapping[str, Any]) -> bool:
    """Whether another limiter has begun this run: the model has not answered since."""
    messages = since(state.get("messages") or (), ledger(state).get("turn"))
    return messages is not None and not any(isinstance(each, AIMessage) for each in messages)


def _turn(history: Sequence[AnyMessage]) -> str | int | None:
    """What the newest message is known by, before the run adds others."""
    if not history:
        return None
    # Not every reducer gives messages an id.
    return len(history) if history[-1].id is None else history[-1].id


def _abandoned(state: Mapping[str, Any]) -> Abandoned | None:
    """What the run before left of its last batch, by what its limiters knew of it."""
    known = ledger(state)
    batch = known.get("batch")
    found = unfinished_calls(state, batch["message"]) if batch else None
    if batch is None or found is None:
        return None
    message, calls = found
    asked = {call["id"]: call["name"] for call in message.tool_calls}
    return Abandoned(
        calls=[[call["name"], str(call["id"]), asked[call["id"]]] for call in calls],
        charges=batch["charges"],
        reserved=batch.get("reserved", {}),
        held_by=[each for each in known.get("begun_by", ()) if each not in batch["passed"]],
    )


def _refunds(counts: ToolCounts, abandoned: Abandoned, caller: Origin) -> list[Refund]:
    return [
        Refund(Call("tool", name, call_id, amount, caller.agent, caller.thread_id), limit)
        for name, call_id, _ in abandoned["calls"]
        for limit, amount in counts.take_back(call_id)
        if limit
    ]
