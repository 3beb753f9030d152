"""What a thread has used, read from its state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from langgraph.types import StateSnapshot

from langchain_quota.errors import LimitError
from langchain_quota.limits.options import NANODOLLARS
from langchain_quota.middleware.state import (
    State,
    run_model,
    run_tools,
    spent,
    thread_model,
    thread_tools,
)
from langchain_quota.runtime.arguments import short_repr


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """What a thread has used: calls, tokens, nanodollars and milliseconds.

    Attributes:
        tools: Tool calls of the thread, by what is counted: a tool's name, several joined by
            commas, `"__all__"` for all tools.
        model: Model calls of the thread.
        run_tools: Tool calls of its newest run, by what is counted.
        run_model: Model calls of its newest run.
        spent: What the calls of the thread have used of its budgets, by
            `"model.total_tokens"`, `"model.input_tokens"`, `"model.output_tokens"`,
            `"model.uncached_tokens"` and `"model.nanodollars"`, and its time by
            `"model.milliseconds"`.
        run_spent: What those of its newest run have used, under the same names.

    Examples:
        >>> from langchain_quota.middleware.thread_usage import ThreadUsage
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
    """Return what a thread has used, from its state; zero for a thread without a state.

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
        text = short_repr(snapshot)
        raise TypeError(f"snapshot must be what agent.get_state(config) gives, not {text}")
    return usage_in(state)


def usage_in(state: State) -> ThreadUsage:
    """Return what a state says that its thread has used."""
    of_thread, of_run = spent(state)
    return ThreadUsage(
        tools=_calls(thread_tools(state)),
        model=thread_model(state),
        run_tools=_calls(run_tools(state)),
        run_model=run_model(state),
        spent=MappingProxyType(of_thread),
        run_spent=MappingProxyType(of_run),
    )


def with_work(error: Exception, state: State) -> Exception:
    """Return an error; that of a limit has the work of the run so far."""
    if isinstance(error, LimitError):
        error.messages = [*state.get("messages", ())]
        error.usage = usage_in(state)
    return error


def _calls(counts: Mapping[str, int]) -> Mapping[str, int]:
    calls = {counter: count for counter, count in counts.items() if counter != NANODOLLARS}
    return MappingProxyType({counter.removeprefix(","): count for counter, count in calls.items()})
