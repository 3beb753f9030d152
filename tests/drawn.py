"""What property tests draw: limits, turns of models and people; and what really happened."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

from hypothesis import reject
from hypothesis import strategies as st
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool
from langgraph.types import interrupt

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    Quota,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit, check_together
from langchain_quota.testing import ToolRequest
from tests.telemetry import Signals
from tests.tokens import ProviderError

TOOLS = ("search", "calc", "ask")
INVENTED = "invented"
"""A tool that no agent has."""
REVIEWED = "calc"
WINDOW = timedelta(minutes=1)


RAISED = (ToolCallLimitExceededError, ModelCallLimitExceededError, ProviderError)
"""What ends a run, and not the test."""

Batch = list[ToolRequest]
"""The tool calls of one answer; none, and the model says that it is done."""


@dataclass(frozen=True)
class TurnPlan:
    """What happens in a turn, for whose time the store may be down."""

    answers: list[Batch | None]
    """A batch for each model call; `None` for a provider that fails."""
    people: list[str] = field(default_factory=list)
    """What is done at each interrupt; `"abandon"` begins the next turn instead."""
    steps: int | None = None
    """After how many steps of the graph the turn is cut off, if it is."""
    down: bool = False


@dataclass
class World:
    """What really happened."""

    started: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Task of the graph -> the tool that it started, and the id of the call."""
    started_in_run: dict[str, tuple[str, str]] = field(default_factory=dict)
    returned: int = 0
    returned_in_run: int = 0
    """Model calls that gave an answer."""
    failed: int = 0
    failed_in_run: int = 0
    cut_calls: int = 0
    """Calls that were waiting when a turn was cut off: charged or not, they did not run."""
    edited_calls: int = 0
    """Calls that a reviewer edited and a limit then refused with an exception: as `cut_calls`."""
    cut_models: int = 0
    """Model calls that may have been counted and not made, or the other way round."""
    queue: list[Batch | None] = field(default_factory=list)

    def new_run(self, answers: list[Batch | None]) -> None:
        self.queue = list(answers)
        self.started_in_run = {}
        self.returned_in_run = self.failed_in_run = 0

    def start(self, name: str, call_id: str, config: RunnableConfig) -> None:
        """Note a call; the task is the same when an interrupt runs the tool again."""
        task = config["metadata"]["langgraph_checkpoint_ns"]
        self.started[task] = self.started_in_run[task] = name, call_id

    def answer(self, _messages: Sequence[BaseMessage]) -> Any:
        batch = self.queue.pop(0) if self.queue else []
        if batch is None:
            self.failed += 1
            self.failed_in_run += 1
            return ProviderError("overloaded")
        self.returned += 1
        self.returned_in_run += 1
        return list(batch) or "done"

    def cut_off(self, messages: Sequence[BaseMessage]) -> None:
        self.cut_models += 1
        asked = [each for each in messages if isinstance(each, AIMessage)]
        self.cut_calls += len(asked[-1].tool_calls) if asked else 0


WORLD: ContextVar[World] = ContextVar("WORLD")
"""Where the tools run."""
CallId = Annotated[str, InjectedToolCallId]


def _made(name: str) -> BaseTool:
    def run(call_id: CallId, config: RunnableConfig) -> str:
        WORLD.get().start(name, call_id, config)
        return str(interrupt("what?")) if name == "ask" else "found"

    return StructuredTool.from_function(run, name=name, description=name)


REAL_TOOLS = [*map(_made, TOOLS)]
"""Made once: to make a tool takes as long as to run an agent."""


class Unknown(AgentMiddleware[Any, Any, Any]):
    """Notes the calls of tools that do not exist, which LangChain itself answers."""

    def __init__(self, start: Callable[[str, str, RunnableConfig], None]) -> None:
        super().__init__()
        self._start = start

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        self._note(request)
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        self._note(request)
        return await handler(request)

    def _note(self, request: Any) -> None:
        if request.tool is None:
            call = request.tool_call
            self._start(call["name"], call["id"], request.runtime.config)


def told(message: BaseMessage) -> Any:
    """What a message says, and the calls that it makes or answers."""
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return message.type, message.name, message.content, calls, getattr(message, "tool_call_id", 0)


def metrics(signals: Signals) -> dict[Any, float]:
    """All samples that do not depend on the time."""
    of_time = ("_timestamp_seconds", "_start_time_seconds", "_sum", "_bucket")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in signals.registry.collect()
        for sample in family.samples
        if not sample.name.endswith(of_time)
    }


def odd_calls(*tools: str) -> st.SearchStrategy[ToolCall]:
    """Calls without an id, or with that of another one."""
    return st.builds(
        ToolCall,
        name=st.sampled_from(tools),
        args=st.just({}),
        id=st.sampled_from([None, "", "same", "same"]),
        type=st.just("tool_call"),
    )


def batches(*tools: str) -> st.SearchStrategy[Batch]:
    """Batches as models make them: with an id for each call, most of the time, and real tools."""
    odd = odd_calls(*tools, *tools, INVENTED)
    plain = st.sampled_from([*tools, *tools, INVENTED])
    return st.one_of(
        st.lists(st.sampled_from(tools), min_size=1, max_size=4),
        st.lists(st.one_of(plain, plain, odd), min_size=1, max_size=4),
    )


def answers(*tools: str) -> st.SearchStrategy[Batch | None]:
    """Batches; some models fail, or are done before that."""
    batch = batches(*tools)
    return st.one_of(batch, batch, batch, batch, st.none(), st.just(list[ToolRequest]()))


@st.composite
def quota_lists(draw: st.DrawFn, *more: str) -> list[Quota]:
    kinds = st.sampled_from(["user_id", "global", "agent", *more])
    pers = draw(st.lists(kinds, max_size=3, unique=True))
    windows = st.sampled_from([None, WINDOW])
    return [Quota(draw(st.integers(0, 4)), per=each, window=draw(windows)) for each in pers]


@st.composite
def limit_lists(draw: st.DrawFn, *, stacked: bool = False, stored: bool = False) -> list[Limit]:
    """Limits that can all be reached, of drop-ins if `stacked`, with quotas if `stored`."""
    limits: list[Limit] = []
    for index in range(draw(st.integers(2 if stacked else 1, 3 if stacked else 4))):
        target = draw(st.sampled_from(["search", "search", "calc", "ask", None, None, "model"]))
        thread, run = draw(st.tuples(*[st.sampled_from([0, 1, 2, 3, 9])] * 2))
        options: Any = {"name": f"limit-{index}"}
        scopes = draw(st.sampled_from(["thread", "run", "both"]))
        options["thread_limit"] = None if scopes == "run" else thread
        options["run_limit"] = None if scopes == "thread" else min(run, thread)
        if stored:
            options["quotas"] = draw(quota_lists(*["thread"] * (scopes == "run")))
        if not stacked:
            options["enforce"] = draw(st.sampled_from([True, True, True, False]))
        enforced = options.get("enforce", True)
        if target == "model":
            exits = ["end", "error"] if stacked or not enforced else ["end", "error", "finalize"]
            limits.append(ModelCallLimit(exit_behavior=draw(st.sampled_from(exits)), **options))
            continue
        common = "error" if stacked else "continue"
        options["exit_behavior"] = draw(st.sampled_from(["continue", "end", "error", common]))
        tools: Any = target
        if not stacked:
            if enforced and options["exit_behavior"] == "continue":
                options["give_up_after"] = draw(st.sampled_from([None, None, 1, 3]))
            if target == "ask":
                tools = ["ask", "search"]
            elif target is None:
                options["exclude"] = draw(st.sampled_from([(), ("calc",)]))
        limits.append(ToolCallLimit(tools, **options))
    return limits if stacked else possible(limits)


def possible(limits: list[Limit]) -> list[Limit]:
    """The limits; draws again where one can never be reached."""
    try:
        check_together(limits)
    except ValueError:
        reject()
    return limits
