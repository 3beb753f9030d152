"""The agents that are measured: the same steps, held to limits that nothing comes near to."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware import ModelCallLimitMiddleware as LangChainModelLimiter
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainToolLimiter
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from prometheus_client import CollectorRegistry

from benchmarks.by_hand import ObservedModelLimiter, ObservedToolLimiter, Signals
from langchain_quota import (
    CostLimit,
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Price,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.features import setup_checks
from langchain_quota.limits import Limit

TOOLS = ("search", "fetch", "read", "write", "mail", "plan")
"""The tools of the agent; its steps call them in turn."""

ANY: tuple[str | None, ...] = (None,)
EACH: tuple[str | None, ...] = (None, *TOOLS)

UNREACHED = 1_000_000
"""The number of every limit, in calls."""

Spans = Literal["recorded", "dropped", "no SDK", "off"]
"""What becomes of spans: the SDK records them; its sampler drops them; there is none; none is made.

A span that is recorded goes to a processor that does nothing.
"""

Limits = dict[str, Any]
"""The arguments that all limiters have in common."""
Middlewares = list[AgentMiddleware[Any, Any, Any]]
Setup = Callable[[Spans, Limits], Middlewares]

REPORTED = UsageMetadata(input_tokens=100, output_tokens=10, total_tokens=110)
"""What a model call has used, where the model says so."""


class InstantModel(BaseChatModel):
    """A model that answers at once: the tools in turn, as many calls as it was asked for.

    Attributes:
        model: Its name.
        reports: Whether it says how many tokens it has used, as a provider's model does.
    """

    model: str = "instant"
    reports: bool = False

    @property
    def _llm_type(self) -> str:
        return "instant"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self

    async def _agenerate(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        done = sum(message.type == "tool" for message in messages)
        used = REPORTED if self.reports else None
        named = {"model_name": "instant"} if self.reports else {}
        answer = AIMessage("done", usage_metadata=used, response_metadata=named)
        if done < int(str(messages[0].content)):
            name = TOOLS[done % len(TOOLS)]
            call = ToolCall(name=name, args={}, id=f"call_{done}", type="tool_call")
            answer = AIMessage("", tool_calls=[call], usage_metadata=used, response_metadata=named)
        return ChatResult(generations=[ChatGeneration(message=answer)])


def telemetry(spans: Spans = "dropped") -> Telemetry:
    """Telemetry of its own registry and tracer provider."""
    made: Any = "off" if spans == "off" else "all"
    return Telemetry(registry=CollectorRegistry(), tracer_provider=provider(spans), spans=made)


def provider(spans: Spans) -> trace.TracerProvider:
    """A tracer provider of its own."""
    if spans == "no SDK":
        return trace.NoOpTracerProvider()
    sampler = ALWAYS_ON if spans == "recorded" else ALWAYS_OFF
    made = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    made.add_span_processor(SpanProcessor())
    return made


def _separate(
    model_kind: type[Any],
    tool_kind: type[Any],
    options: Callable[[Spans], dict[str, Any]] = lambda _: {},
) -> Callable[..., Setup]:
    """Set-ups with a middleware for each limit."""

    def of(tools: Sequence[str | None], *, model: bool) -> Setup:
        def make(spans: Spans, limits: Limits) -> Middlewares:
            own = {**options(spans), **limits}
            first: Middlewares = [model_kind(**own)] if model else []
            return [*first, *(tool_kind(tool_name=name, **own) for name in tools)]

        return make

    return of


def _together(kind: type[Any], *budgets: type[TokenLimit | CostLimit]) -> Callable[..., Setup]:
    """Set-ups with one middleware for all limits."""

    def of(tools: Sequence[str | None], *, model: bool) -> Setup:
        def make(spans: Spans, limits: Limits) -> Middlewares:
            together: list[Limit] = [ModelCallLimit(**limits)] if model else []
            together += [ToolCallLimit(name, **limits) for name in tools]
            together += [each(**limits) for each in budgets]
            prices = {"instant": Price(input="2.50", output=10)} if CostLimit in budgets else None
            return [kind(together, telemetry=telemetry(spans), prices=prices)]

        return make

    return of


def _shared(*, per_user: bool) -> Setup:
    def make(spans: Spans, limits: Limits) -> Middlewares:
        store = limits.pop("store", None) or MemoryStore()
        if per_user:
            limits = {"quotas": [Quota(UNREACHED, per="user_id", window="1d")]}
        both: list[Limit] = [ModelCallLimit(**limits), ToolCallLimit(**limits)]
        return [QuotaMiddleware(both, store=store, telemetry=telemetry(spans))]

    return make


NONE = "none"
_SIZES: dict[str, dict[str, Any]] = {
    "model": {"tools": (), "model": True},
    "tool": {"tools": ANY, "model": False},
    "2": {"tools": ANY, "model": True},
    "8": {"tools": EACH, "model": True},
}
"""One limit is on model calls or on all tools together, two are both, eight are those and one on
each tool."""

_KINDS = {
    "LangChain": _separate(LangChainModelLimiter, LangChainToolLimiter),
    "LangChain and telemetry": _separate(
        ObservedModelLimiter,
        ObservedToolLimiter,
        lambda spans: {"signals": Signals(provider(spans))},
    ),
    "drop-in": _separate(
        ModelCallLimitMiddleware,
        ToolCallLimitMiddleware,
        lambda spans: {"telemetry": telemetry(spans)},
    ),
    "QuotaMiddleware": _together(QuotaMiddleware),
    "Inline": _together(InlineQuotaMiddleware),
}

SETUPS: dict[str, Setup] = {
    NONE: lambda _spans, _limits: [],
    **{
        f"{kind}, {size}": of(**limits)
        for kind, of in _KINDS.items()
        for size, limits in _SIZES.items()
    },
}
"""The set-ups by name."""

BUDGETS: dict[str, Setup] = {
    "QuotaMiddleware, 8 and tokens": _together(QuotaMiddleware, TokenLimit)(EACH, model=True),
    "QuotaMiddleware, 8, tokens, cost": _together(QuotaMiddleware, TokenLimit, CostLimit)(
        EACH, model=True
    ),
    "Inline, 8 and tokens": _together(InlineQuotaMiddleware, TokenLimit)(EACH, model=True),
}
"""Set-ups of eight limits with budgets beside them."""

STORED: dict[str, Setup] = {
    "QuotaMiddleware, 2 in a store": _shared(per_user=False),
    "QuotaMiddleware, 2 per user": _shared(per_user=True),
}
"""Set-ups of two limits whose counts a store keeps: those of runs, and those of a user's day."""


def agent(
    setup: str,
    saver: BaseCheckpointSaver[Any] | None = None,
    *,
    answer: str = "done",
    store: object = None,
    spans: Spans = "dropped",
) -> Any:
    """An agent of a set-up; its model reports what it has used if there are budgets.

    Each of its tools gives the answer. Without a checkpointer there are no limits on threads. By
    default a `STORED` one has a store in memory.
    """
    # Most users have none of the packages whose tools need a hook around the model.
    setup_checks._PACKAGES = ()
    limits: Limits = {"run_limit": UNREACHED, **({"store": store} if store else {})}
    if saver is not None:
        limits["thread_limit"] = UNREACHED
    return create_agent(
        InstantModel(reports=setup in BUDGETS),
        tools=list(tools(answer)),
        middleware=(SETUPS | BUDGETS | STORED)[setup](spans, limits),
        checkpointer=saver,
        name="benchmark",
    )


async def run(agent: Any, steps: int, thread: str) -> dict[str, Any]:
    """Run an agent once: so many steps of a model call and a tool call, and a last model call.

    Raises:
        RuntimeError: It did something else.
    """
    asked, config = {"messages": [("user", str(steps))]}, {"configurable": {"thread_id": thread}}
    state: dict[str, Any] = await agent.ainvoke(asked, config, context={"user_id": "ada"})
    last = state["messages"][-1]
    if len(state["messages"]) != 2 * steps + 2 or last.content != "done":
        raise RuntimeError(f"not a run of {steps} steps: {state['messages']}")
    return state


def tools(answer: str = "done") -> Iterator[BaseTool]:
    """The tools: each does nothing, at once."""

    async def work() -> str:
        return answer

    for name in TOOLS:
        yield StructuredTool.from_function(coroutine=work, name=name, description="Works.")
