"""The ledger kept in the graph state, checkpointed with the thread.

The annotations here are resolved by LangGraph at run time, in this module.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware.types import AgentState, PrivateStateAttr, ResponseT
from langgraph.channels import LastValue
from langgraph.channels.untracked_value import UntrackedValue

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.core.decision import Refund
from langchain_quota.core.stops import StopReason
from langchain_quota.limits.call import Call
from langchain_quota.limits.options import NANODOLLARS

LEDGER = "langchain_quota"
"""The state key of our own part of the ledger."""

THREAD_TOOLS = "thread_tool_call_count"
RUN_TOOLS = "run_tool_call_count"
THREAD_MODEL = "thread_model_call_count"
RUN_MODEL = "run_model_call_count"

State = Mapping[str, Any]
"""A graph's state, by key."""

Amounts = dict[str, int]
"""Amounts by name, such as a store's key, in the unit of what is counted."""

Entries = dict[str, Any]
"""Data of one feature in the ledger."""

FeatureData = dict[str, Entries]
"""Data of features, by their names."""


class Charge(TypedDict):
    """What is charged to one tool call, kept for refunds."""

    counters: dict[str, int]
    """By counter: limits with one counter share its count."""
    limits: dict[str, dict[str, int]]
    """By middleware and limit."""
    keys: Amounts
    """What a store charged."""
    costs: NotRequired[Amounts]
    """What a paid call costs, in nanodollars, by limit."""


def new_charge() -> Charge:
    """Return what is charged to a call that is charged nothing yet."""
    return {"counters": {}, "limits": {}, "keys": {}}


class ToolBatch(TypedDict):
    """The newest tool calls that were checked: those of one AIMessage."""

    message: str
    calls: dict[str, Charge]
    """Charges of each allowed call, by its id."""
    waiting: list[str]
    """Names of the middlewares of this run that have not checked them yet."""


class Counts(TypedDict, total=False):
    """Numbers of allowed calls that LangChain's keys do not have."""

    run_tools: dict[str, int]
    """Tool calls of this run, by counter."""
    run_model: int
    """Model calls of this run."""
    thread_model: int
    """Model calls of the thread, if all limits are budgets."""
    model_counted: bool
    """Whether the model call of this step is counted already."""


class Ledger(TypedDict, total=False):
    """What the hooks of a thread pass on to later hooks; every value is plain JSON."""

    run: str | None
    """Names this run in a store; `None` if the state alone counts it."""
    turn: str | int | None
    """The newest message when the run began: its id or, without one, how many there were."""
    begun_by: dict[str, str | None]
    """The names of the middlewares that have begun the run. Of those with limits on model calls it
    says when they count them: when `"admitted"`, or when `"returned"`."""
    counts: Counts
    batch: ToolBatch | None
    """The newest tool calls, and what is charged to them."""
    refusals: dict[str, dict[str, int]]
    """Refusals in this run, by middleware and name, of limits with `give_up_after`."""
    near: dict[str, int]
    """How much of thread limits was told as near, by limit and counter, without a store."""
    final: str
    """The run's final text if this step's model call is its last and has no answer; else empty."""
    final_reason: StopReason
    """Why that call is the last one."""
    downgraded: str
    """The limit that has this step's model call go to another model; else empty."""
    ended: str | None
    """The id of the message with which a limit ended this run."""
    ended_again: int
    """How often the run has ended again since, because something led it back."""
    store: str | None
    """Names the agent's store among those of a process; `None` if its limits have none."""
    own: FeatureData
    """Data that each feature alone reads and writes, by its name."""


def merge_ledgers(old: Ledger, new: Ledger) -> Ledger:
    """Return the old ledger with the new keys, merged within counts and features."""
    merged: Ledger = {**old, **new}
    if "counts" in new:
        merged["counts"] = {**old.get("counts", {}), **new["counts"]}
    if "own" in new:
        features = old.get("own", {})
        written = {
            name: {**features.get(name, {}), **values} for name, values in new["own"].items()
        }
        merged["own"] = {**features, **written}
    return merged


# A reducer would do the same as these two channels. But LangGraph copies each channel after each
# node that has a conditional edge, and looks at the type of a reducer's value at each copy.
class LedgerChannel(LastValue[Ledger]):
    """The ledger, which merges what the nodes of a superstep write."""

    def update(self, values: Sequence[Ledger]) -> bool:
        """Merge these values; return whether there is one."""
        for value in values:
            self.value = merge_ledgers(self.value, value) if self.is_available() else value
        return bool(values)


class LatestCount(LastValue[int]):
    """A count, of which several middlewares write the same in one superstep."""

    def update(self, values: Sequence[int]) -> bool:
        """Keep the last of these counts; return whether there is one."""
        for value in values:
            self.value = value
        return bool(values)


class ToolCallLimitState(AgentState[ResponseT]):
    """The agent's state with the counts of tool calls, under LangChain's keys, and the ledger.

    Attributes:
        thread_tool_call_count: Tool calls of the thread, by what is counted; see `ThreadUsage`.
        run_tool_call_count: Tool calls that the run asked for, refused ones included, as in
            LangChain's limiter. Limits use the ledger's count, if it has one.
        langchain_quota: Our own part of the ledger; not for use elsewhere.

    Examples:
        >>> from langchain_quota.middleware.state import ToolCallLimitState
        >>> def searches(state: ToolCallLimitState) -> int:
        ...     return state.get("thread_tool_call_count", {}).get("search", 0)
        >>> searches({"messages": [], "thread_tool_call_count": {"search": 2}})
        2
    """

    thread_tool_call_count: NotRequired[Annotated[dict[str, int], PrivateStateAttr]]
    run_tool_call_count: NotRequired[Annotated[dict[str, int], UntrackedValue, PrivateStateAttr]]
    langchain_quota: NotRequired[Annotated[Ledger, PrivateStateAttr, LedgerChannel]]


class ModelCallLimitState(AgentState[ResponseT]):
    """The agent's state with the counts of model calls, under LangChain's keys, and the ledger.

    Attributes:
        thread_model_call_count: Model calls of the thread.
        run_model_call_count: Model calls of the run, as LangChain's limiter counts them. Limits
            use the ledger's count, if it has one.
        langchain_quota: Our own part of the ledger; not for use elsewhere.

    Examples:
        >>> from langchain_quota.middleware.state import ModelCallLimitState
        >>> def model_calls(state: ModelCallLimitState) -> int:
        ...     return state.get("thread_model_call_count", 0)
        >>> model_calls({"messages": []})
        0
    """

    thread_model_call_count: NotRequired[Annotated[int, PrivateStateAttr, LatestCount]]
    run_model_call_count: NotRequired[Annotated[int, UntrackedValue, PrivateStateAttr]]
    langchain_quota: NotRequired[Annotated[Ledger, PrivateStateAttr, LedgerChannel]]


class ToolQuotaState(AgentState[ResponseT]):
    """A `QuotaState` without a count of model calls, for agents in which no limit counts them."""

    thread_tool_call_count: NotRequired[Annotated[dict[str, int], PrivateStateAttr]]
    langchain_quota: NotRequired[Annotated[Ledger, PrivateStateAttr, LedgerChannel]]


class QuotaState(ToolQuotaState[ResponseT]):
    """The agent's state with the counts of threads and the ledger, which has those of runs.

    To read what a thread and its newest run have used, call `usage`.

    Attributes:
        thread_tool_call_count: Tool calls of the thread, by what is counted; see `ThreadUsage`.
        thread_model_call_count: Model calls of the thread, if a limit counts them.
        langchain_quota: Our own part of the ledger; not for use elsewhere.

    Examples:
        As the argument of a function that computes a limit:

        >>> from langchain_quota import ToolCallLimit
        >>> from langchain_quota.middleware.state import QuotaState
        >>> def searches(state: QuotaState, runtime) -> int:
        ...     return 3 if len(state["messages"]) < 50 else 1
        >>> limit = ToolCallLimit("search", run_limit=searches)
    """

    thread_model_call_count: NotRequired[Annotated[int, PrivateStateAttr, LatestCount]]


NEW_RUN: Ledger = {
    "run": None,
    "counts": {"run_tools": {}, "run_model": 0, "model_counted": False},
    "refusals": {},
    "ended": None,
    "ended_again": 0,
    "final": "",
}
"""What a run begins with: its counts are 0."""


def ledger(state: State) -> Ledger:
    """Return our part of the ledger; empty on a thread that never ran under our limits."""
    return state.get(LEDGER) or Ledger()


def feature_ledger(state: State, feature: str) -> Entries:
    """Return the data of a feature in the ledger; empty if it has none."""
    return ledger(state).get("own", {}).get(feature, {})


def thread_tools(state: State) -> dict[str, int]:
    """Return the tool calls of the thread, by counter."""
    return dict(state.get(THREAD_TOOLS) or {})


def run_tools(state: State) -> dict[str, int]:
    """Return the allowed tool calls of the run by counter, or LangChain's count without ours."""
    count = (state.get(LEDGER) or Ledger()).get("counts", {}).get("run_tools")
    return dict(count if count is not None else state.get(RUN_TOOLS) or {})


def thread_model(state: State) -> int:
    """Return the model calls of the thread."""
    count = ledger(state).get("counts", {}).get("thread_model", 0)
    return max(int(state.get(THREAD_MODEL) or 0), count)


def run_model(state: State) -> int:
    """Return the allowed model calls of the run, or LangChain's count without ours."""
    count = ledger(state).get("counts", {}).get("run_model")
    return int(count if count is not None else state.get(RUN_MODEL) or 0)


def spent(
    state: State, entries: State = MappingProxyType({})
) -> tuple[dict[str, int], dict[str, int]]:
    """Return what the thread and the run have used of budgets, by counter.

    `entries` has newer counts of model calls. Paid tool calls are among the counts of tool calls.
    """
    values = {**feature_ledger(state, "budgets"), **entries}
    of_thread, of_run = dict(values.get("thread_spent") or {}), dict(values.get("run_spent") or {})
    for used, tools in ((of_thread, thread_tools(state)), (of_run, run_tools(state))):
        if NANODOLLARS in tools:
            used[NANODOLLARS] = used.get(NANODOLLARS, 0) + tools[NANODOLLARS]
    return of_thread, of_run


@dataclass(slots=True)
class ToolCounts:
    """The counts of tool calls as one hook reads and rewrites them."""

    thread: dict[str, int]
    run: dict[str, int]
    calls: dict[str, Charge]
    # What to refund in the agent's store now, by the call's id.
    refunds: dict[str, Amounts] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State, old: Ledger, message: str | None) -> "ToolCounts":
        """Return the counts in a state, with the charges of the calls of a message."""
        # No message says that a call did not run: a caller can write it, too.
        batch = old.get("batch")
        is_of_message = batch is not None and message in (None, batch["message"])
        calls = deepcopy(batch["calls"]) if batch is not None and is_of_message else {}
        return cls(thread_tools(state), run_tools(state), calls)

    def used(self, counter: str, ids: Collection[str]) -> tuple[int, int]:
        """Return the thread's and the run's count, without the charges of these calls."""
        charged = 0
        for call_id in ids:
            if call_id in self.calls:
                charged += self.calls[call_id]["counters"].get(counter, 0)
        # Never below zero, even where someone else reset the counts.
        thread, run = self.thread.get(counter, 0), self.run.get(counter, 0)
        return max(0, thread - charged), max(0, run - charged)

    def of_call(self, call_id: str) -> Charge:
        """Return the charges of a call."""
        return self.calls.setdefault(call_id, new_charge())

    def charge(self, call_id: str, new: Charge) -> None:
        """Charge a call to counters, which count it once, however many middlewares limit it."""
        charge = self.calls.setdefault(call_id, new)
        for counter, amount in new["counters"].items():
            before = 0 if charge is new else charge["counters"].get(counter, 0)
            if amount > before:
                charge["counters"][counter] = amount
                self.thread[counter] = self.thread.get(counter, 0) + amount - before
                self.run[counter] = self.run.get(counter, 0) + amount - before
        if charge is not new:
            for middleware, names in new["limits"].items():
                charge["limits"].setdefault(middleware, {}).update(names)
            if "costs" in new:
                charge["costs"] = new["costs"]

    def refund(self, call: Call) -> list[Refund]:
        """Refund a call; return what each limit refunds."""
        charge = self.calls.pop(str(call.id), None)
        if charge is None:
            return []
        if charge["keys"]:
            self.refunds[str(call.id)] = charge["keys"]
        for counter, amount in charge["counters"].items():
            self.thread[counter] = max(0, self.thread.get(counter, 0) - amount)
            self.run[counter] = max(0, self.run.get(counter, 0) - amount)
        return refunds_of(call, charge)

    def forget_keys(self, call_id: str, keys: Collection[str]) -> Amounts:
        """Remove and return what a store charged for a call under keys that it charges again."""
        charged = self.calls[call_id]["keys"] if call_id in self.calls else {}
        return {key: charged.pop(key) for key in sorted(charged.keys() & set(keys))}


def refunds_of(call: Call, charge: Charge) -> list[Refund]:
    """Return the refunds of what limits charged to a call, for the metrics."""
    costs = dict(charge.get("costs", {}))
    calls = [item for by_limit in charge["limits"].values() for item in by_limit.items()]
    refunds = [Refund(call._replace(amount=n), name, costs.pop(name, 0)) for name, n in calls]
    # A limit in a dry run is not charged a call that it would refuse, but what it costs.
    return refunds + [Refund(call._replace(amount=0), name, cost) for name, cost in costs.items()]


UNUSED: State = {
    THREAD_TOOLS: {},
    THREAD_MODEL: 0,
    LEDGER: {
        **NEW_RUN,
        "counts": {**NEW_RUN["counts"], "thread_model": 0},
        "batch": None,
        "near": {},
    },
}
"""The counts of a thread that has used nothing; features have their own."""
