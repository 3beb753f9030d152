"""The spans of judged calls: how many, below which span, and what they tell."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode
from opentelemetry.trace import TracerProvider as AnyTracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    Telemetry,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
    hmac_label,
)
from langchain_quota.telemetry.tracing import Spans, Tracing
from langchain_quota.testing import ScriptedChatModel

if TYPE_CHECKING:
    from tests.signals import Signals

forms = pytest.mark.parametrize("form", ["ainvoke", "astream", "invoke"])


@tool
async def search(query: str = "") -> str:
    """Search."""
    await asyncio.sleep(0)
    return "found"


@tool
def calc(term: str = "") -> str:
    """Calculate."""
    return "4"


def agent_of(script: Any, *limiters: Any, name: str | None = "researcher") -> Any:
    # `invoke` needs the sync form of the tools.
    tools = [search.model_copy(update={"func": lambda query="": "found"}), calc]
    return create_agent(
        ScriptedChatModel(script=script),
        tools,
        middleware=limiters,
        checkpointer=InMemorySaver(),
        name=name,
    )


async def run(agent: Any, form: str = "ainvoke", thread_id: str = "thread-1") -> None:
    inputs = {"messages": [HumanMessage("hi")]}
    config: RunnableConfig = {"configurable": {"thread_id": thread_id}}
    if form == "invoke":
        agent.invoke(inputs, config)
    elif form == "astream":
        async for _ in agent.astream(inputs, config, stream_mode="updates"):
            pass
    else:
        await agent.ainvoke(inputs, config)


def judged(signals: "Signals") -> list[ReadableSpan]:
    """The spans of judged calls, in order."""
    return [span for span in signals.spans() if span.name.startswith("check_quota")]


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return dict(span.attributes or {})


def decision(span: ReadableSpan) -> str:
    return str(attributes(span)["langchain_quota.decision"])


@forms
async def test_one_span_per_call_below_the_callers(form: str, signals: "Signals") -> None:
    """Every judged call is one span, a child of the span that is active around the run."""
    agent = agent_of(
        [["search", "calc", "search"], "done"],
        ModelCallLimitMiddleware(run_limit=9, telemetry=signals.telemetry),
        ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=signals.telemetry),
    )
    tracer = signals.provider.get_tracer("application")
    with tracer.start_as_current_span("request") as request:
        await run(agent, form)
    spans = judged(signals)
    assert [(span.name, decision(span)) for span in spans] == [
        ("check_quota model", "allowed"),
        ("check_quota tool search", "allowed"),
        ("check_quota tool search", "blocked"),
        ("check_quota model", "allowed"),
    ]
    parent = request.get_span_context()
    for span in spans:
        assert span.parent is not None
        assert span.parent.span_id == parent.span_id
        assert span.context.trace_id == parent.trace_id
        assert span.kind is SpanKind.INTERNAL


async def test_one_span_per_call_and_limiter(signals: "Signals") -> None:
    """A call that two limiters judge has a span of each."""
    agent = agent_of(
        [["search", "calc"], "done"],
        ToolCallLimitMiddleware(tool_name="search", run_limit=9, telemetry=signals.telemetry),
        ToolCallLimitMiddleware(run_limit=9, telemetry=signals.telemetry),
    )
    await run(agent)
    seen = Counter(
        (attributes(span)["langchain_quota.limit"], attributes(span)["gen_ai.tool.name"])
        for span in judged(signals)
    )
    assert seen == {("tool:search", "search"): 1, ("tool:*", "search"): 1, ("tool:*", "calc"): 1}


async def test_concurrent_runs_keep_to_their_traces(signals: "Signals") -> None:
    """20 runs at once, each below a span of its own: 20 traces, and no span in a wrong one."""
    agent = agent_of(
        # Told from the history, since all runs share the model.
        lambda messages: "done" if len(messages) > 1 else ["search", "search"],
        ModelCallLimitMiddleware(run_limit=9, telemetry=signals.telemetry),
        ToolCallLimitMiddleware(tool_name="search", run_limit=1, telemetry=signals.telemetry),
    )
    tracer = signals.provider.get_tracer("application")
    traces: dict[str, int] = {}

    async def request(thread_id: str) -> None:
        with tracer.start_as_current_span("request") as span:
            traces[thread_id] = span.get_span_context().trace_id
            await run(agent, thread_id=thread_id)

    await asyncio.gather(*(request(f"thread-{number}") for number in range(20)))
    parents = {
        span.context.trace_id: span.context.span_id
        for span in signals.spans()
        if span.name == "request"
    }
    assert len(parents) == 20
    spans = judged(signals)
    assert len(spans) == 20 * 4
    for span in spans:
        thread_id = str(attributes(span)["gen_ai.conversation.id"])
        assert span.context.trace_id == traces[thread_id]
        assert span.parent is not None
        assert span.parent.span_id == parents[span.context.trace_id]
    assert set(Counter(span.context.trace_id for span in spans).values()) == {4}


async def test_tool_attributes(signals: "Signals") -> None:
    """The spans of an allowed and of a blocked tool call have exactly the documented attributes."""
    agent = agent_of(
        [["search", "search"], "done"],
        ToolCallLimitMiddleware(
            tool_name="search", thread_limit=5, run_limit=1, telemetry=signals.telemetry
        ),
    )
    await run(agent)
    allowed, blocked = judged(signals)
    common = {
        "langchain_quota.kind": "tool",
        "langchain_quota.limit": "tool:search",
        "langchain_quota.limits": ("tool:search",),
        "langchain_quota.exit_behavior": "continue",
        "langchain_quota.thread.used": 1,
        "langchain_quota.thread.limit": 5,
        "langchain_quota.run.used": 1,
        "langchain_quota.run.limit": 1,
        "gen_ai.conversation.id": "thread-1",
        "gen_ai.agent.name": "researcher",
        "gen_ai.tool.name": "search",
    }
    assert attributes(allowed) == {
        **common,
        "langchain_quota.decision": "allowed",
        "langchain_quota.scope": "none",
        "gen_ai.tool.call.id": "call_1",
    }
    assert attributes(blocked) == {
        **common,
        "langchain_quota.decision": "blocked",
        "langchain_quota.scope": "run",
        "gen_ai.tool.call.id": "call_2",
    }
    assert [span.status.status_code for span in (allowed, blocked)] == [StatusCode.UNSET] * 2


async def test_model_attributes(signals: "Signals") -> None:
    """The spans of an allowed and of a blocked model call have exactly the documented attributes.

    Attributes of a limit that is not set are left out.
    """
    agent = agent_of(
        [["search"], "never"], ModelCallLimitMiddleware(thread_limit=1, telemetry=signals.telemetry)
    )
    await run(agent)
    allowed, blocked = judged(signals)
    common = {
        "langchain_quota.kind": "model",
        "langchain_quota.limit": "model",
        "langchain_quota.limits": ("model",),
        "langchain_quota.exit_behavior": "end",
        "langchain_quota.thread.used": 1,
        "langchain_quota.thread.limit": 1,
        "langchain_quota.run.used": 1,
        "gen_ai.conversation.id": "thread-1",
        "gen_ai.agent.name": "researcher",
    }
    assert attributes(allowed) == {
        **common,
        "langchain_quota.decision": "allowed",
        "langchain_quota.scope": "none",
    }
    assert attributes(blocked) == {
        **common,
        "langchain_quota.decision": "blocked",
        "langchain_quota.scope": "thread",
    }
    assert [span.name for span in (allowed, blocked)] == ["check_quota model"] * 2
    assert [span.status.status_code for span in (allowed, blocked)] == [StatusCode.UNSET] * 2


async def test_skipped_call(signals: "Signals") -> None:
    """A call of another tool in a batch that `end` stops: skipped, of no limit, status unset."""
    agent = agent_of(
        [["search", "calc"]],
        ToolCallLimitMiddleware(
            tool_name="search", run_limit=0, exit_behavior="end", telemetry=signals.telemetry
        ),
    )
    await run(agent)
    by_tool = {attributes(span)["gen_ai.tool.name"]: span for span in judged(signals)}
    assert decision(by_tool["search"]) == "blocked"
    assert by_tool["search"].status.status_code is StatusCode.UNSET
    assert attributes(by_tool["calc"]) == {
        "langchain_quota.decision": "skipped",
        "langchain_quota.kind": "tool",
        "langchain_quota.limits": (),
        "gen_ai.conversation.id": "thread-1",
        "gen_ai.agent.name": "researcher",
        "gen_ai.tool.name": "calc",
        "gen_ai.tool.call.id": "call_2",
    }
    assert by_tool["calc"].status.status_code is StatusCode.UNSET


@forms
async def test_tool_error(form: str, signals: "Signals") -> None:
    """Where the exception propagates, the refused call's span, and only it, is an error."""
    agent = agent_of(
        [["search", "search"]],
        ToolCallLimitMiddleware(
            tool_name="search", run_limit=1, exit_behavior="error", telemetry=signals.telemetry
        ),
    )
    with pytest.raises(ToolCallLimitExceededError) as caught:
        await run(agent, form)
    by_decision = {decision(span): span for span in judged(signals)}
    assert by_decision.keys() == {"blocked", "skipped"}
    blocked, skipped = by_decision["blocked"], by_decision["skipped"]
    assert blocked.status.status_code is StatusCode.ERROR
    assert blocked.status.description == str(caught.value)
    assert attributes(blocked)["error.type"] == "ToolCallLimitExceededError"
    assert attributes(blocked)["langchain_quota.exit_behavior"] == "error"
    assert skipped.status.status_code is StatusCode.UNSET
    assert "error.type" not in attributes(skipped)


@forms
async def test_model_error(form: str, signals: "Signals") -> None:
    """A refused model call whose exception propagates is an error, with its type."""
    agent = agent_of(
        [["search"], "never"],
        ModelCallLimitMiddleware(run_limit=1, exit_behavior="error", telemetry=signals.telemetry),
    )
    with pytest.raises(ModelCallLimitExceededError) as caught:
        await run(agent, form)
    allowed, blocked = judged(signals)
    assert (allowed.status.status_code, decision(allowed)) == (StatusCode.UNSET, "allowed")
    assert (blocked.status.status_code, decision(blocked)) == (StatusCode.ERROR, "blocked")
    assert blocked.status.description == str(caught.value)
    assert attributes(blocked)["error.type"] == "ModelCallLimitExceededError"
    assert "error.type" not in attributes(allowed)


async def test_unnamed_agent_without_thread(signals: "Signals") -> None:
    """What is not known is left out: no agent name without one, no conversation without one."""
    agent = create_agent(
        ScriptedChatModel(script=["done"]),
        middleware=[ModelCallLimitMiddleware(run_limit=1, telemetry=signals.telemetry)],
    )
    await agent.ainvoke({"messages": [HumanMessage("hi")]})
    [span] = judged(signals)
    assert not {"gen_ai.agent.name", "gen_ai.conversation.id"} & attributes(span).keys()


async def test_hidden_thread_id(signals: "Signals") -> None:
    """With a `thread_label` the raw thread id is in no attribute, and its label in our own."""
    label = hmac_label("a secret of sixteen bytes")
    telemetry = Telemetry(
        registry=CollectorRegistry(), tracer_provider=signals.provider, thread_label=label
    )
    agent = agent_of(["done"], ModelCallLimitMiddleware(run_limit=1, telemetry=telemetry))
    await run(agent, thread_id="ada@example.org")
    [span] = judged(signals)
    assert attributes(span)["langchain_quota.thread.id"] == label("ada@example.org")
    assert "gen_ai.conversation.id" not in attributes(span)
    assert "ada@example.org" not in str(attributes(span))


@pytest.mark.parametrize(
    ("spans", "seen"),
    [
        ("all", {"allowed": 3, "blocked": 1, "skipped": 2}),
        ("refused", {"blocked": 1, "skipped": 2}),
        ("off", {}),
    ],
)
@forms
async def test_chosen_spans(
    spans: Spans, seen: dict[str, int], form: str, signals: "Signals"
) -> None:
    """`spans` chooses which calls get a span; every call is counted anyway."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=signals.provider, spans=spans)
    agent = agent_of(
        [["search"], ["search", "search", "calc"]],
        ModelCallLimitMiddleware(run_limit=9, telemetry=telemetry),
        ToolCallLimitMiddleware(
            tool_name="search", run_limit=2, exit_behavior="end", telemetry=telemetry
        ),
    )
    await run(agent, form)
    assert Counter(decision(span) for span in judged(signals)) == seen
    counted: Counter[str] = Counter()
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == "langchain_quota_calls_total":
                counted[sample.labels["decision"]] += int(sample.value)
    assert +counted == {"allowed": 3, "blocked": 1, "skipped": 2}


@pytest.mark.parametrize(
    ("provider", "records"),
    [
        (NoOpTracerProvider(), False),
        (TracerProvider(sampler=ALWAYS_OFF), False),
        (TracerProvider(), True),
    ],
    ids=["no SDK", "not sampled", "recorded"],
)
async def test_unrecorded_spans_cost_no_attributes(
    provider: AnyTracerProvider, *, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no span is recorded no attribute is built and no exemplar set; calls are counted."""
    built = []
    build = Tracing._attributes

    def watched(self: Tracing, *arguments: Any) -> Any:
        built.append(arguments)
        return build(self, *arguments)

    monkeypatch.setattr(Tracing, "_attributes", watched)
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    agent = agent_of(
        [["search", "search"], "done"],
        ModelCallLimitMiddleware(run_limit=9, telemetry=telemetry),
        ToolCallLimitMiddleware(run_limit=1, telemetry=telemetry),
    )
    await run(agent)
    assert len(built) == (4 if records else 0)
    exemplars = [
        sample.exemplar
        for family in registry.collect()
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert bool(exemplars) is records
    labels = {"agent": "researcher", "kind": "tool", "tool": "search", "decision": "blocked"}
    assert registry.get_sample_value("langchain_quota_calls_total", labels) == 1
