"""The ledger kept in the graph state, checkpointed with the thread.

The annotations here are resolved by LangGraph at run time, in this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, NotRequired, cast

from langchain.agents.middleware.types import AgentState, PrivateStateAttr, ResponseT
from langgraph.channels.untracked_value import UntrackedValue
from langgraph.types import StateSnapshot

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.arguments import shown

LEDGER = "langchain_quota"
"""The state key of our own part of the ledger."""

THREAD_TOOLS = "thread_tool_call_count"
RUN_TOOLS = "run_tool_call_count"
THREAD_MODEL = "thread_model_call_count"
RUN_MODEL = "run_model_call_count"


Amounts = dict[str, int]
"""Numbers of calls, by a store's key."""


class Charge(TypedDict):
    """What is charged to one tool call, kept for refunds."""

    counters: dict[str, int]
    """By counter: limits with one counter share its count."""
    limits: dict[str, dict[str, int]]
    """By middleware and limit."""
    keys: Amounts
    """What a store charged."""


class ToolBatch(TypedDict):
    """The newest tool calls that were judged: those of one AIMessage."""

    message: str
    calls: dict[str, Charge]
    """What each call that was let through is charged, by its id."""
    waiting: list[str]
    """The names of the middlewares of this run that have not judged them yet."""


class Admitted(TypedDict):
    """A model call that is let through, and told when its request is known."""

    used: dict[str, int]
    """The counts before it, by counter."""
    keys: Amounts
    """What a store charged."""


class Ledger(TypedDict, total=False):
    """What the hooks of a thread pass on to later hooks; every value is plain JSON."""

    run: str | None
    """Names this run in a store; `None` if the state alone counts it."""
    root_run: str | None
    """Names the root run in a store, where quotas count by it."""
    root_used: dict[str, int]
    """What a store had counted of the root run when this agent last asked, by key."""
    run_tools: dict[str, int]
    """Tool calls let through in this run, by counter."""
    run_model: int
    """Model calls let through in this run."""
    thread_model: int
    """Model calls of the thread, if all limits are budgets."""
    model_mode: str | None
    """When this run's model calls are counted: when `"admitted"`, or when `"returned"`."""
    model_counted: bool
    """Whether the model call of this step is counted already."""
    batch: ToolBatch | None
    """The newest tool calls, and what is charged to them."""
    refusals: dict[str, dict[str, int]]
    """Refusals in this run, by middleware and name, of limits with `give_up_after`."""
    repeats: dict[str, dict[str, Any]]
    """The tool calls of this run, as each repeat limit remembers them, by middleware and name."""
    final: str
    """The run's final text if this step's model call is its last and has no answer; else empty."""
    refused: str | None
    """The id of this run's first message with a call that a limit refused."""
    turn: str | int | None
    """The newest message when the run began: its id or, without one, how many there were."""
    ended: str | None
    """The id of the message with which a limit ended this run."""
    error: list[Any] | None
    """What is raised behind the model's step: the counts, the limits, and the text."""
    begun_by: list[str]
    """The names of the middlewares that have begun the run."""
    trace: dict[str, str] | None
    """The first span of this run as W3C headers, if no span was active."""
    thread_spent: dict[str, int]
    """What the model calls of the thread have used of budgets, by counter."""
    run_spent: dict[str, int]
    """What the model calls of this run have used of budgets, by counter."""
    spent_by: str | None
    """Names the newest call whose use these numbers include: this process may know later ones."""
    admitted: Admitted | None
    """The model call that is let through and not told yet."""
    granted: dict[str, int]
    """What people have granted to the thread and to this run, if the state counts them."""
    owed: dict[str, Amounts]
    """What a store charged and is to take back with the next request, by the refund's name."""


def merge_ledgers(old: Ledger, new: Ledger) -> Ledger:
    """The reducer: fields that are written replace the old ones, the others stay."""
    return {**old, **new}


def latest(_old: int, new: int) -> int:
    """The reducer of a count to which several middlewares write the same value in one superstep."""
    return new


class ToolCallLimitState(AgentState[ResponseT]):
    """The agent's state with the counts of tool calls, under LangChain's keys, and the ledger.

    Attributes:
        thread_tool_call_count: Tool calls of the thread, by what is counted; see `ThreadUsage`.
        run_tool_call_count: Tool calls that the run asked for, refused ones included, as in
            LangChain's limiter. Limits use the ledger's count, if it has one.
        langchain_quota: Our own part of the ledger; not for use elsewhere.

    Examples:
        >>> from langchain_quota import ToolCallLimitState
        >>> def searches(state: ToolCallLimitState) -> int:
        ...     return state.get("thread_tool_call_count", {}).get("search", 0)
        >>> searches({"messages": [], "thread_tool_call_count": {"search": 2}})
        2
    """

    thread_tool_call_count: NotRequired[Annotated[dict[str, int], PrivateStateAttr]]
    run_tool_call_count: NotRequired[Annotated[dict[str, int], UntrackedValue, PrivateStateAttr]]
    langchain_quota: NotRequired[Annotated[Ledger, PrivateStateAttr, merge_ledgers]]


class ModelCallLimitState(AgentState[ResponseT]):
    """The agent's state with the counts of model calls, under LangChain's keys, and the ledger.

    Attributes:
        thread_model_call_count: Model calls of the thread.
        run_model_call_count: Model calls of the run, as LangChain's limiter counts them. Limits
            use the ledger's count, if it has one.
        langchain_quota: Our own part of the ledger; not for use elsewhere.

    Examples:
        >>> from langchain_quota import ModelCallLimitState
        >>> def model_calls(state: ModelCallLimitState) -> int:
        ...     return state.get("thread_model_call_count", 0)
        >>> model_calls({"messages": []})
        0
    """

    thread_model_call_count: NotRequired[Annotated[int, PrivateStateAttr, latest]]
    run_model_call_count: NotRequired[Annotated[int, UntrackedValue, PrivateStateAttr]]
    langchain_quota: NotRequired[Annotated[Ledger, PrivateStateAttr, merge_ledgers]]


class QuotaState(ToolCallLimitState[ResponseT], ModelCallLimitState[ResponseT]):
    """The agent's state with all counts and the ledger.

    Its keys are those of `ToolCallLimitState` and `ModelCallLimitState`. To read what a thread has
    used, call `usage`.

    Examples:
        As the argument of a function that computes a limit:

        >>> from langchain_quota import QuotaState, ToolCallLimit
        >>> def searches(state: QuotaState, runtime) -> int:
        ...     return 3 if len(state["messages"]) < 50 else 1
        >>> limit = ToolCallLimit("search", run_limit=searches)
    """


NEW_RUN: Ledger = {
    "run": None,
    "root_run": None,
    "root_used": {},
    "run_tools": {},
    "run_model": 0,
    "model_counted": False,
    "refusals": {},
    "refused": None,
    "ended": None,
    "final": "",
    "trace": None,
}
"""What a run begins with: its counts are 0."""


def ledger(state: Mapping[str, Any]) -> Ledger:
    """Our part of the ledger; empty on a thread that never ran under our limits."""
    return cast("Ledger", state.get(LEDGER) or {})


def thread_tools(state: Mapping[str, Any]) -> dict[str, int]:
    """Tool calls of the thread, by counter."""
    return dict(state.get(THREAD_TOOLS) or {})


def run_tools(state: Mapping[str, Any]) -> dict[str, int]:
    """Tool calls let through in the run, by counter; LangChain's count if ours is missing."""
    own = ledger(state).get("run_tools")
    return dict(own if own is not None else state.get(RUN_TOOLS) or {})


def thread_model(state: Mapping[str, Any]) -> int:
    """Model calls of the thread."""
    return max(int(state.get(THREAD_MODEL) or 0), ledger(state).get("thread_model", 0))


def run_model(state: Mapping[str, Any]) -> int:
    """Model calls let through in the run; LangChain's count if ours is missing."""
    own = ledger(state).get("run_model")
    return int(own if own is not None else state.get(RUN_MODEL) or 0)


def spent(state: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What model calls have used of budgets, by counter: those of the thread, and of the run."""
    known = ledger(state)
    return dict(known.get("thread_spent") or {}), dict(known.get("run_spent") or {})


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """What a thread has used, in calls, and of budgets in tokens and microdollars.

    Attributes:
        tools: Tool calls of the thread, by what is counted: a tool's name, several joined by
            commas, `"__all__"` for all tools.
        model: Model calls of the thread.
        run_tools: Tool calls of its newest run, by what is counted.
        run_model: Model calls of its newest run.
        spent: What the model calls of the thread have used of its budgets, by
            `"model.total_tokens"`, `"model.input_tokens"`, `"model.output_tokens"` and
            `"model.microdollars"`.
        run_spent: What those of its newest run have used, under the same names.

    Examples:
        >>> from langchain_quota import ThreadUsage
        >>> used = ThreadUsage(tools={"search": 5}, model=9, run_tools={"search": 1}, run_model=2)
        >>> used.tools.get("search", 0)
        5
    """

    tools: Mapping[str, int]
    model: int
    run_tools: Mapping[str, int]
    run_model: int
    spent: Mapping[str, int] = field(default_factory=dict)
    run_spent: Mapping[str, int] = field(default_factory=dict)


def usage(snapshot: StateSnapshot) -> ThreadUsage:
    """What a thread has used, read from its state; zero for a thread without a state.

    Args:
        snapshot: What `agent.get_state(config)` or `await agent.aget_state(config)` gives.

    Raises:
        TypeError: It is something else, such as the agent, or a run's result.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langgraph.checkpoint.memory import InMemorySaver
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware, usage
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> agent = create_agent(
        ...     ScriptedChatModel(script=["Hello."]),
        ...     middleware=[QuotaMiddleware([ModelCallLimit(thread_limit=100)])],
        ...     checkpointer=InMemorySaver(),
        ... )
        >>> config = {"configurable": {"thread_id": "7"}}
        >>> result = agent.invoke({"messages": [("user", "Hi!")]}, config)
        >>> usage(agent.get_state(config)).model
        1
    """
    state = getattr(snapshot, "values", None)
    if state is None or callable(state):
        given = shown(snapshot)
        raise TypeError(f"snapshot must be what agent.get_state(config) gives, not {given}")
    of_thread, of_run = spent(state)
    return ThreadUsage(
        tools=MappingProxyType(thread_tools(state)),
        model=thread_model(state),
        run_tools=MappingProxyType(run_tools(state)),
        run_model=run_model(state),
        spent=MappingProxyType(of_thread),
        run_spent=MappingProxyType(of_run),
    )


NOTHING_SPENT: Ledger = {"run_spent": {}, "admitted": None, "error": None}
"""What a run with budgets begins with, beside `NEW_RUN`."""

UNUSED: Mapping[str, Any] = {
    THREAD_TOOLS: {},
    THREAD_MODEL: 0,
    LEDGER: {
        **NEW_RUN,
        **NOTHING_SPENT,
        "thread_spent": {},
        "thread_model": 0,
        "repeats": {},
        "batch": None,
    },
}
"""The counts of a thread that has used nothing."""
