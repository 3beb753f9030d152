"""The agents that are measured: the same steps, held to limits that nothing comes near to."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware import ModelCallLimitMiddleware as LangChainModelLimiter
from langchain.agents.middleware import ToolCallLimitMiddleware as LangChainToolLimiter
from langchain.agents.middleware.types import (
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    hook_config,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import Command
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import NoOpTracerProvider
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
from langchain_quota.middleware.state import (
    LEDGER,
    NEW_RUN,
    RUN_MODEL,
    RUN_TOOLS,
    THREAD_MODEL,
    THREAD_TOOLS,
    Ledger,
    ModelCallLimitState,
    QuotaState,
    ToolCallLimitState,
    merge_ledgers,
)
from langchain_quota.runtime.compat import untraced

# Most users have none of the packages whose tools need a hook around the model.
setup_checks._PACKAGES = ()

TOOLS = ("search", "fetch", "read", "write", "mail", "plan")
"""The tools of the agent; its steps call them in turn."""

ANY: tuple[str | None, ...] = (None,)
EACH: tuple[str | None, ...] = (None, *TOOLS)

UNREACHED = 1_000_000
"""The number of every limit, in calls."""

Mode = Literal["no SDK", "not sampled", "off", "sampled"]
"""What becomes of spans: no SDK makes any; the SDK makes, and drops, them; none is asked for; the
SDK records them, and hands them to nobody."""

Limits = dict[str, Any]
"""The arguments that all limiters have in common."""
Middlewares = list[AgentMiddleware[Any, Any, Any]]
Setup = Callable[[Telemetry, Limits], Middlewares]


IDLE_HOOKS = "two hooks that do nothing"

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


def telemetry(mode: Mode = "not sampled") -> Telemetry:
    """Telemetry of its own registry and tracer provider."""
    registry = CollectorRegistry()
    if mode == "no SDK":
        return Telemetry(registry=registry, tracer_provider=NoOpTracerProvider())
    return Telemetry(
        registry=registry,
        tracer_provider=provider(mode),
        spans="off" if mode == "off" else "all",
    )


def provider(mode: Mode) -> TracerProvider:
    """A tracer provider that samples all spans or none; its processor does nothing with them."""
    sampler = ALWAYS_ON if mode == "sampled" else ALWAYS_OFF
    made = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    made.add_span_processor(SpanProcessor())
    return made


def _nothing(_telemetry: Telemetry, _limits: Limits) -> Middlewares:
    return []


class _IdleHooks(AgentMiddleware[Any, Any, Any]):
    """Two hooks that do nothing: they are two nodes, and no more."""

    async def abefore_model(self, state: Any, runtime: Any) -> None:
        return None

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        return None


def _idle(_telemetry: Telemetry, _limits: Limits) -> Middlewares:
    return [_IdleHooks()]


def _langchain(tools: Sequence[str | None], *, model: bool) -> Setup:
    def make(_telemetry: Telemetry, limits: Limits) -> Middlewares:
        first: Middlewares = [LangChainModelLimiter(**limits)] if model else []
        return [*first, *(LangChainToolLimiter(tool_name=name, **limits) for name in tools)]

    return make


def _observed(tools: Sequence[str | None], *, model: bool) -> Setup:
    def make(_telemetry: Telemetry, limits: Limits) -> Middlewares:
        signals = Signals(provider("not sampled"))
        first: Middlewares = [ObservedModelLimiter(signals, **limits)] if model else []
        others = (ObservedToolLimiter(signals, tool_name=name, **limits) for name in tools)
        return [*first, *others]

    return make


def _drop_in(tools: Sequence[str | None], *, model: bool) -> Setup:
    def make(telemetry: Telemetry, limits: Limits) -> Middlewares:
        first: Middlewares = []
        if model:
            first.append(ModelCallLimitMiddleware(telemetry=telemetry, **limits))
        others = (
            ToolCallLimitMiddleware(tool_name=name, telemetry=telemetry, **limits) for name in tools
        )
        return [*first, *others]

    return make


def _together(
    kind: type[QuotaMiddleware[Any, Any] | InlineQuotaMiddleware[Any, Any]],
    tools: Sequence[str | None],
    *,
    model: bool,
    budgets: Sequence[type[TokenLimit | CostLimit]] = (),
) -> Setup:
    def make(telemetry: Telemetry, limits: Limits) -> Middlewares:
        first = [ModelCallLimit(**limits)] if model else []
        together: list[Limit] = [*first]
        together += [ToolCallLimit(name, **limits) for name in tools]
        together += [each(**limits) for each in budgets]
        prices = {"instant": Price(input="2.50", output=10)} if CostLimit in budgets else None
        return [kind(together, telemetry=telemetry, prices=prices)]

    return make


def _shared(*, per_user: bool) -> Setup:
    def make(telemetry: Telemetry, limits: Limits) -> Middlewares:
        store = limits.pop("store", None) or MemoryStore()
        if per_user:
            limits = {"quotas": [Quota(UNREACHED, per="user_id", window="1d")]}
        both: list[Limit] = [ModelCallLimit(**limits), ToolCallLimit(**limits)]
        return [QuotaMiddleware(both, store=store, telemetry=telemetry)]

    return make


_RUN: dict[str, Any] = {
    LEDGER: {
        **NEW_RUN,
        "run": "r",
        "turn": "t",
        "begun_by": {"hooks": None},
        "store": None,
        "own": {},
    },
}
"""What is written when a run begins."""

_CALL: dict[str, Any] = {
    THREAD_MODEL: 1,
    LEDGER: Ledger(counts={"run_model": 1}, final=""),
}
"""What is written when a model call is checked."""

_BATCH: dict[str, Any] = {
    THREAD_TOOLS: {"__all__": 1},
    LEDGER: Ledger(counts={"run_tools": {"__all__": 1}}, refusals={}),
}
"""What is written when tool calls are checked."""


class _WritingHooks(AgentMiddleware[Any, Any, Any]):
    """Two hooks that write the keys that `QuotaMiddleware` writes, and do nothing else."""

    state_schema = QuotaState

    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return _CALL

    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return _BATCH


class _WritingWrap(AgentMiddleware[Any, Any, Any]):
    """A hook around the model call that writes the keys of `InlineQuotaMiddleware`, and no more.

    It is not `async`, so that LangChain adds no wrapper for tracing, as it adds none to ours.
    """

    state_schema = QuotaState

    def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> Any:
        return self._write(handler(request))

    async def _write(self, response: Awaitable[ModelResponse[Any]]) -> ExtendedModelResponse[Any]:
        written = {**_CALL, **_BATCH, LEDGER: merge_ledgers(_CALL[LEDGER], _BATCH[LEDGER])}
        return ExtendedModelResponse(await response, Command(update=written))


class _Beginning(AgentMiddleware[Any, Any, Any]):
    """The hook in which a run begins: it writes what ours write."""

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        return _RUN

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        return _RUN


class _Wrapping(_Beginning):
    """Beside it, a hook around the model call that does nothing, traced as little as ours."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["awrap_model_call"] = untraced(self, "awrap_model_call")

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> Any:
        return await handler(request)


class _ToolHooks(_Beginning):
    """The hooks of `QuotaMiddleware` with one tool limit: they write its keys, and no more."""

    state_schema = QuotaState

    @hook_config(can_jump_to=["end"])
    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        return _BATCH


class _ModelHooks(_Beginning):
    """The same with model limits only."""

    state_schema = QuotaState

    @hook_config(can_jump_to=["end"])
    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return _CALL


class _BothHooks(_ToolHooks, _ModelHooks):
    """The same with limits on both."""


class _InlineHooks(_Beginning):
    """The hooks of `InlineQuotaMiddleware`: they write its keys, and no more."""

    state_schema = QuotaState
    awrap_model_call = _WritingWrap.awrap_model_call
    _write = _WritingWrap._write


class _DropInToolHooks(_Beginning):
    """The hooks of our `ToolCallLimitMiddleware`: they write its keys, and no more."""

    state_schema = ToolCallLimitState

    @hook_config(can_jump_to=["end"])
    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {**_BATCH, RUN_TOOLS: {"__all__": 1}}


class _DropInModelHooks(_Wrapping):
    """The hooks of our `ModelCallLimitMiddleware`: they write its keys, and no more."""

    state_schema = ModelCallLimitState

    @hook_config(can_jump_to=["end"])
    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {LEDGER: Ledger(counts={"model_counted": False})}

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> Any:
        written = {THREAD_MODEL: 1, LEDGER: Ledger(counts={"run_model": 1, "model_counted": True})}
        return ExtendedModelResponse(await handler(request), Command(update=written))

    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {RUN_MODEL: 1}


def _floor(*kinds: type[AgentMiddleware[Any, Any, Any]]) -> Setup:
    def make(_telemetry: Telemetry, _limits: Limits) -> Middlewares:
        return [kind() for kind in kinds]

    return make


NONE = "none"
TWO_HOOKS = "two hooks that only write"
WRAP_HOOK = "a wrap hook that only writes"
SETUPS: dict[str, Setup] = {
    NONE: _nothing,
    IDLE_HOOKS: _idle,
    "LangChain, model": _langchain((), model=True),
    "LangChain, tool": _langchain(ANY, model=False),
    "LangChain, 2": _langchain(ANY, model=True),
    "LangChain, 8": _langchain(EACH, model=True),
    "LangChain and telemetry, model": _observed((), model=True),
    "LangChain and telemetry, tool": _observed(ANY, model=False),
    "LangChain and telemetry, 2": _observed(ANY, model=True),
    "LangChain and telemetry, 8": _observed(EACH, model=True),
    "drop-in, model": _drop_in((), model=True),
    "drop-in, tool": _drop_in(ANY, model=False),
    "drop-in, 2": _drop_in(ANY, model=True),
    "drop-in, 8": _drop_in(EACH, model=True),
    "QuotaMiddleware, tool": _together(QuotaMiddleware, ANY, model=False),
    "QuotaMiddleware, model": _together(QuotaMiddleware, (), model=True),
    "QuotaMiddleware, 2": _together(QuotaMiddleware, ANY, model=True),
    "QuotaMiddleware, 8": _together(QuotaMiddleware, EACH, model=True),
    "Inline, 1": _together(InlineQuotaMiddleware, ANY, model=False),
    "Inline, 2": _together(InlineQuotaMiddleware, ANY, model=True),
    "Inline, 8": _together(InlineQuotaMiddleware, EACH, model=True),
    TWO_HOOKS: _floor(_WritingHooks),
    WRAP_HOOK: _floor(_WritingWrap),
}
"""The set-ups by name. One limit is on all tools together or on model calls, two are both,
eight are those and one on each tool."""


BUDGETS: dict[str, Setup] = {
    "QuotaMiddleware, 8 and tokens": _together(
        QuotaMiddleware, EACH, model=True, budgets=[TokenLimit]
    ),
    "QuotaMiddleware, 8, tokens, cost": _together(
        QuotaMiddleware, EACH, model=True, budgets=[TokenLimit, CostLimit]
    ),
    "Inline, 8 and tokens": _together(
        InlineQuotaMiddleware, EACH, model=True, budgets=[TokenLimit]
    ),
}
"""Set-ups of eight limits with budgets beside them."""

STORED: dict[str, Setup] = {
    "QuotaMiddleware, 2 in a store": _shared(per_user=False),
    "QuotaMiddleware, 2 per user": _shared(per_user=True),
}
"""Set-ups of two limits whose counts a store keeps: those of runs, and those of a user's day."""

HOOKS: dict[str, Setup] = {
    "hooks of QuotaMiddleware, tool": _floor(_ToolHooks),
    "hooks of QuotaMiddleware, model": _floor(_ModelHooks),
    "hooks of QuotaMiddleware, 2": _floor(_BothHooks),
    "hooks of QuotaMiddleware, 8": _floor(_BothHooks),
    "hooks of Inline, 2": _floor(_InlineHooks),
    "hooks of Inline, 8": _floor(_InlineHooks),
    "hooks of drop-in, tool": _floor(_DropInToolHooks),
    "hooks of drop-in, model": _floor(_DropInModelHooks),
    "hooks of drop-in, 2": _floor(_DropInModelHooks, _DropInToolHooks),
}
"""Set-ups whose hooks are of the same kinds as ours. They write the same keys, and no more."""


def middlewares(
    setup: str, *, has_threads: bool, mode: Mode = "not sampled", store: object = None
) -> Middlewares:
    """The middlewares of a set-up; without a checkpointer there are no limits on threads."""
    limits: Limits = {"run_limit": UNREACHED, **({"store": store} if store else {})}
    if has_threads:
        limits["thread_limit"] = UNREACHED
    return (SETUPS | BUDGETS | STORED | HOOKS)[setup](telemetry(mode), limits)


def agent(
    setup: str,
    saver: BaseCheckpointSaver[Any] | None = None,
    mode: Mode = "not sampled",
    *,
    reports: bool = False,
    answer: str = "done",
    store: object = None,
) -> Any:
    """An agent of a set-up; its model reports what it has used if it should, or has budgets.

    Each of its tools gives the answer. By default a `STORED` one has a store in memory.
    """
    return create_agent(
        InstantModel(reports=reports or setup in BUDGETS),
        tools=list(tools(answer)),
        middleware=middlewares(setup, has_threads=saver is not None, mode=mode, store=store),
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
