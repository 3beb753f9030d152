"""Which trace the spans of a run belong to: the caller's, or one of the run's own."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitMiddleware,
)
from langchain_quota.testing import ScriptedChatModel

if TYPE_CHECKING:
    from tests.signals import Signals

Limiters = Callable[[Telemetry], Sequence[Any]]

THREAD: RunnableConfig = {"configurable": {"thread_id": "thread-1"}}


def quota(telemetry: Telemetry) -> Sequence[Any]:
    limits: list[ModelCallLimit | ToolCallLimit] = [
        ModelCallLimit(run_limit=9),
        ToolCallLimit("search", run_limit=1),
        ToolCallLimit(run_limit=9),
    ]
    return [QuotaMiddleware(limits, telemetry=telemetry)]


def only_tools(telemetry: Telemetry) -> Sequence[Any]:
    # The first that is judged is then a batch.
    return [ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry)]


def stacked(telemetry: Telemetry) -> Sequence[Any]:
    return [
        ModelCallLimitMiddleware(run_limit=9, telemetry=telemetry),
        ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=telemetry),
        ToolCallLimitMiddleware(run_limit=9, telemetry=telemetry),
    ]


limiters = pytest.mark.parametrize("limiters", [quota, only_tools, stacked])


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def ask(question: str = "") -> str:
    """Ask the user."""
    return str(interrupt("what?"))


def again(*turns: Any) -> Callable[[Sequence[Any]], Any]:
    """A script that depends only on the history, so that runs and processes can share it."""

    def script(messages: Sequence[Any]) -> Any:
        newest = max(i for i, each in enumerate(messages) if isinstance(each, HumanMessage))
        answer = turns[sum(isinstance(each, AIMessage) for each in messages[newest:])]
        if isinstance(answer, str):
            return answer
        # Ids of one's own, since a call that has an answer is no longer pending.
        calls = [(name, f"call-{len(messages)}-{i}") for i, name in enumerate(answer)]
        return AIMessage("", tool_calls=[{"name": n, "args": {}, "id": i} for n, i in calls])

    return script


SEARCHING = again(["search", "search"], ["search"], "done")


def agent_of(
    middleware: Sequence[Any], script: Any = SEARCHING, tools: Any = (search, ask), saver: Any = ...
) -> Any:
    return create_agent(
        ScriptedChatModel(script=script),
        list(tools),
        middleware=list(middleware),
        checkpointer=InMemorySaver() if saver is ... else saver,
        name="researcher",
    )


async def run(
    agent: Any, inputs: Any = ..., form: str = "ainvoke", config: RunnableConfig = THREAD
) -> None:
    inputs = hello() if inputs is ... else inputs
    before = otel.get_current()
    match form:
        case "ainvoke":
            await agent.ainvoke(inputs, config)
        case "astream":
            async for _ in agent.astream(inputs, config, stream_mode="updates"):
                pass
        case "invoke":
            agent.invoke(inputs, config)
        case "stream":
            for _ in agent.stream(inputs, config):
                pass
    assert otel.get_current() is before


def hello() -> dict[str, Any]:
    return {"messages": [HumanMessage("hi")]}


def judged(signals: "Signals") -> list[ReadableSpan]:
    return [span for span in signals.spans() if span.name.startswith("check_quota")]


def assert_below(spans: Sequence[ReadableSpan], parent: trace.SpanContext) -> None:
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id == parent.span_id
        assert span.context.trace_id == parent.trace_id


def boss_of(child: Any, telemetry: Telemetry, limiters: Limiters) -> Any:
    @tool
    async def delegate(task: str = "") -> str:
        """Delegate."""
        await child.ainvoke(hello())
        return "done"

    twice = again(["delegate", "search"], ["delegate", "search"], "done")
    return agent_of(limiters(telemetry), twice, [delegate, search])


@limiters
async def test_a_sub_agent_below_the_active_span(limiters: Limiters, signals: "Signals") -> None:
    """With an active span those of an agent in a tool are its children, too."""
    child = agent_of(limiters(signals.telemetry), saver=None)
    boss = boss_of(child, signals.telemetry, limiters)
    with signals.provider.get_tracer("app").start_as_current_span("request") as request:
        await run(boss)
    assert len(judged(signals)) >= 6
    assert_below(judged(signals), request.get_span_context())


HOOKS = ("before_agent", "before_model", "wrap_model_call", "after_model")


@contextlib.contextmanager
def watching(seen: list[tuple[str, bool]], hook: str) -> Iterator[None]:
    before = otel.get_current()
    try:
        yield
    finally:
        seen.append((hook, otel.get_current() is before))


def watched(hook: Callable[..., Any], seen: list[tuple[str, bool]]) -> Callable[..., Any]:
    """The hook, noting whether it leaves the context as it was."""
    if inspect.iscoroutinefunction(hook):

        @wraps(hook)
        async def ahook(*args: Any, **kwargs: Any) -> Any:
            with watching(seen, hook.__name__):
                return await hook(*args, **kwargs)

        return ahook

    @wraps(hook)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with watching(seen, hook.__name__):
            return hook(*args, **kwargs)

    return plain


CLASSES = (QuotaMiddleware, ModelCallLimitMiddleware, ToolCallLimitMiddleware)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each hook that was called, and whether the context was the same afterwards."""
    noted: list[tuple[str, bool]] = []
    for cls in CLASSES:
        for name in (*HOOKS, *(f"a{hook}" for hook in HOOKS)):
            if name in cls.__dict__ or name in {"before_agent", "abefore_agent"}:
                monkeypatch.setattr(cls, name, watched(getattr(cls, name), noted))
    return noted
