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
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimitMiddleware,
    Telemetry,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
    hmac_label,
)
from langchain_quota.telemetry.tracing import Spans
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
