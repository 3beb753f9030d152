"""ToolCallLimitMiddleware: a drop-in for LangChain's, with exact counts and telemetry."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal

from langchain.agents.middleware.types import ResponseT, hook_config
from langgraph.runtime import Runtime

from langchain_quota.decision import Decision
from langchain_quota.engine import Limits
from langchain_quota.limits import Terms, ToolCallLimit, ToolExitBehavior, check_choice
from langchain_quota.middleware.limiter import Limiter
from langchain_quota.middleware.rulings import Ruling, Update
from langchain_quota.middleware.tool_case import tool_case
from langchain_quota.middleware.typevars import ContextT
from langchain_quota.state import ToolCallLimitState
from langchain_quota.telemetry import Telemetry

OnPending = Literal["skip", "raise"]


class ToolCallLimitMiddleware(Limiter[Any, ContextT, ResponseT], Generic[ResponseT, ContextT]):
    """Limits how many tool calls an agent's thread and run may make, and makes each visible.

    A drop-in for LangChain's middleware of the same name: the same arguments, state keys,
    messages and exceptions; `limit_name`, `message`, `on_pending` and `telemetry` are ours.

    Args:
        tool_name: The tool that is limited; `None` limits all tools together.
        thread_limit: Most calls over the life of a thread, a whole number from 0 (which forbids
            the tool); `None` for no limit. It needs a checkpointer, which keeps the count.
        run_limit: Most calls in one run (one invocation), likewise; at most `thread_limit`.
        exit_behavior: What a call over the limit does. `"continue"` answers it with an error
            message and lets the agent go on; `"end"` ends the run with a message, and answers
            every call that is still pending; `"error"` raises `ToolCallLimitExceededError`.
        limit_name: The limit's name in metrics and spans, 1 to 64 printable characters; by
            default `tool:<tool_name>`, or `tool:*`. Give names to put two limits on one tool.
        message: What the model reads as the answer of a refused call (and, with `"end"`, the
            user as the final message) instead of the default text: a text, or a function from
            the `Decision` to a text.
        on_pending: What `"end"` does when calls of other tools are pending in the same message:
            `"skip"` answers them as not run, `"raise"` raises `NotImplementedError`, as LangChain
            up to 1.3.14 did.
        telemetry: Where decisions are made visible; by default shared by the process, on
            Prometheus' global registry and OpenTelemetry's global tracer provider.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No limit is given, `run_limit` exceeds `thread_limit`, or an argument is out
            of bounds. The message names the argument and the value.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import ToolCallLimitMiddleware
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search", "search"], "That is all I found."])
        >>> limiter = ToolCallLimitMiddleware(tool_name="search", run_limit=1)
        >>> agent = create_agent(model, [search], middleware=[limiter])
        >>> result = agent.invoke({"messages": [("user", "Find it!")]})
        >>> sorted(message.content for message in result["messages"] if message.type == "tool")
        ["Tool call limit exceeded. Do not call 'search' again.", 'nothing found']
    """

    state_schema: type[ToolCallLimitState[Any]] = ToolCallLimitState

    def __init__(  # noqa: PLR0913 - LangChain's keyword arguments, and ours
        self,
        *,
        tool_name: str | None = None,
        thread_limit: int | None = None,
        run_limit: int | None = None,
        exit_behavior: ToolExitBehavior = "continue",
        limit_name: str | None = None,
        message: str | Callable[[Decision], str] | None = None,
        on_pending: OnPending = "skip",
        telemetry: Telemetry | None = None,
    ) -> None:
        check_choice("on_pending", on_pending, ("skip", "raise"))
        if tool_name is not None and not isinstance(tool_name, str):
            raise TypeError(f"tool_name must be a string or None, not {tool_name!r}")
        limit = ToolCallLimit(
            tool_name,
            thread_limit=thread_limit,
            run_limit=run_limit,
            exit_behavior=exit_behavior,
            message=message,
            name="" if limit_name is None else limit_name,
        )
        super().__init__((limit,), limit_name=limit_name, telemetry=telemetry)
        self._matching = Limits([Terms.of(limit)])
        self.tool_name = tool_name
        self.thread_limit = thread_limit
        self.run_limit = run_limit
        self.exit_behavior = exit_behavior
        self._on_pending = on_pending

    @hook_config(can_jump_to=["end"])
    def after_model(
        self, state: ToolCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made.

        Raises:
            ToolCallLimitExceededError: A call is over the limit and `exit_behavior` is `"error"`.
            NotImplementedError: Calls of other tools are pending and `on_pending` is `"raise"`.
        """
        return self._conclude(self._rule(state, runtime))

    @hook_config(can_jump_to=["end"])
    async def aafter_model(
        self, state: ToolCallLimitState[ResponseT], runtime: Runtime[ContextT]
    ) -> Update | None:
        """Judge the tool calls that the model just made; nothing in it waits or blocks.

        Raises:
            ToolCallLimitExceededError: A call is over the limit and `exit_behavior` is `"error"`.
            NotImplementedError: Calls of other tools are pending and `on_pending` is `"raise"`.
        """
        return self._conclude(self._rule(state, runtime))

    def _rule(self, state: Mapping[str, Any], runtime: Any) -> Ruling | None:
        case = tool_case(state, runtime, self._matching, judge=self.name, every_call=False)
        if case is None:
            return None
        return case.rule(pending_error=self._on_pending == "raise")
