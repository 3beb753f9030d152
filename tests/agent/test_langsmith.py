"""With LangSmith tracing on: an agent runs as without it, and its runs reach LangSmith in full.

The client of LangSmith is its own; what it would send is kept, and nothing goes to the network.
"""

import asyncio
import gc
import json
import socket
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import pytest
import requests
from langchain.agents import create_agent
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langsmith import Client
from langsmith.run_helpers import tracing_context

from langchain_quota import (
    Decision,
    InlineQuotaMiddleware,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    ToolCallLimit,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware._base import Limiter
from langchain_quota.testing import ScriptedChatModel
from tests.signals import needs_inline

if TYPE_CHECKING:
    from tests.signals import Signals

Mode = Literal["sync", "async"]
Make = Callable[..., Limiter[Any, Any, Any]]

SCRIPT = [["search", "search"], ["search"], "done"]


class Kept(requests.Session):
    """A session that sends nothing, and keeps what it was given to send."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, dict[str, Any]] = {}
        """The runs as LangSmith would know them, by their id."""
        self.ends: list[str] = []
        """The runs that were said to have ended."""

    def request(
        self, method: str, url: str | bytes, *args: Any, **options: Any
    ) -> requests.Response:
        """Keep a run that has begun, or ended."""
        run = json.loads(options["data"])
        known = self.runs.setdefault(run["id"], {})
        known.update({key: value for key, value in run.items() if value is not None})
        if method == "PATCH":
            self.ends.append(run["id"])
        response = requests.Response()
        response.status_code = 202
        return response


class LangSmith:
    """A LangSmith of the test's own."""

    def __init__(self) -> None:
        self.session = Kept()
        self.client = Client(
            "http://langsmith.invalid",
            api_key="none",
            session=self.session,
            auto_batch_tracing=False,
            info={},
        )

    @property
    def names(self) -> list[str]:
        """The names of the runs, in the order in which they began."""
        runs = sorted(self.session.runs.values(), key=lambda run: str(run["start_time"]))
        return [str(run["name"]) for run in runs]

    def check(self) -> None:
        """Each run has ended once, and all of them are in one trace."""
        assert sorted(self.session.ends) == sorted(self.session.runs)
        assert len({run["trace_id"] for run in self.session.runs.values()}) == 1


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects to a server fails."""

    def refuse(_socket: socket.socket, address: object) -> None:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)


@tool("search")
async def asearch(query: str = "") -> str:
    """Search."""
    return "found"


@tool
def search(query: str = "") -> str:
    """Search."""
    return "found"


def quota(signals: "Signals", **options: Any) -> Limiter[Any, Any, Any]:
    limits: list[Limit] = [ModelCallLimit(run_limit=9), ToolCallLimit("search", run_limit=2)]
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def inline(signals: "Signals", **options: Any) -> Limiter[Any, Any, Any]:
    limits: list[Limit] = [ModelCallLimit(run_limit=9), ToolCallLimit("search", run_limit=2)]
    return InlineQuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def drop_in(signals: "Signals") -> Limiter[Any, Any, Any]:
    return ModelCallLimitMiddleware(run_limit=9, telemetry=signals.telemetry)


modes = pytest.mark.parametrize("mode", ["sync", "async"])
middlewares = pytest.mark.parametrize(
    "make",
    [
        pytest.param(quota, id="QuotaMiddleware"),
        pytest.param(inline, marks=needs_inline, id="InlineQuotaMiddleware"),
        pytest.param(drop_in, id="ModelCallLimitMiddleware"),
    ],
)
CONFIG: Any = {"configurable": {"thread_id": "thread-1"}}


async def run(agent: Any, mode: Mode, langsmith: LangSmith | None) -> dict[str, Any]:
    """Run the agent, with tracing where there is a LangSmith."""
    given: dict[str, list[AnyMessage]] = {"messages": [HumanMessage("hi")]}
    client = None if langsmith is None else langsmith.client
    result: dict[str, Any]
    with tracing_context(enabled=langsmith is not None, client=client):
        if mode == "sync":
            result = agent.invoke(given, CONFIG)
        else:
            result = await agent.ainvoke(given, CONFIG)
    # A coroutine that nobody awaits is told when it is collected, and fails the test.
    gc.collect()
    return result


def agent_of(middleware: Any, mode: Mode, script: Any = SCRIPT) -> tuple[Any, ScriptedChatModel]:
    model = ScriptedChatModel(script=script)
    tools = [search if mode == "sync" else asearch]
    agent: Any = create_agent(
        model, tools, middleware=[middleware], checkpointer=InMemorySaver(), name="researcher"
    )
    return agent, model


@modes
@middlewares
async def test_an_agent_runs_as_without(mode: Mode, make: Make, signals: "Signals") -> None:
    """Answers, requests to the model and counts are those of a run that is not traced."""
    found = []
    for langsmith in (None, LangSmith()):
        agent, model = agent_of(make(signals), mode)
        result = await run(agent, mode, langsmith)
        answers = sorted(str(message.content) for message in result["messages"])
        requests_made = [[m.content for m in call.messages] for call in model.calls]
        found.append((answers, requests_made, usage(agent.get_state(CONFIG))))
    assert found[0] == found[1]
    assert found[0][2].model == 3


@modes
@middlewares
async def test_langsmith_gets_every_run(mode: Mode, make: Make, signals: "Signals") -> None:
    """Each model call and each tool call that ran is a run of the one trace, and has ended."""
    langsmith = LangSmith()
    agent, model = agent_of(make(signals), mode)
    await run(agent, mode, langsmith)
    langsmith.check()
    names = langsmith.names
    assert names.count("ScriptedChatModel") == len(model.calls) == 3
    assert names.count("search") == (3 if make is drop_in else 2)
    for known in langsmith.session.runs.values():
        assert "error" not in known


@modes
@middlewares
async def test_model_calls_are_in_the_hooks(mode: Mode, make: Make, signals: "Signals") -> None:
    """Where tracing is on when the middleware is made, its hook's run has the model's in it."""
    langsmith = LangSmith()
    with tracing_context(enabled=True, client=langsmith.client):
        middleware = make(signals)
    agent, _ = agent_of(middleware, mode)
    await run(agent, mode, langsmith)
    runs = langsmith.session.runs
    calls = [each for each in runs.values() if each["name"] == "ScriptedChatModel"]
    hook = f"{middleware.name}.{'a' if mode == 'async' else ''}wrap_model_call"
    assert [runs[each["parent_run_id"]]["name"] for each in calls] == [hook] * 3


@middlewares
async def test_runs_at_the_same_time(make: Make, signals: "Signals") -> None:
    """Concurrent runs of one agent are traces of their own, and none loses a call."""
    agent, _ = agent_of(make(signals), "async", lambda messages: SCRIPT[len(messages) // 3])
    given = {"messages": [HumanMessage("hi")]}
    clients = [LangSmith() for _ in range(4)]

    async def one(number: int, langsmith: LangSmith) -> None:
        config: Any = {"configurable": {"thread_id": f"thread-{number}"}}
        with tracing_context(enabled=True, client=langsmith.client):
            await agent.ainvoke(given, config)

    await asyncio.gather(*(one(*each) for each in enumerate(clients)))
    gc.collect()
    for langsmith in clients:
        langsmith.check()
    assert len({str(sorted(each.names)) for each in clients}) == 1
    assert clients[0].names.count("ScriptedChatModel") == 3


@modes
@middlewares
async def test_what_a_model_raises(mode: Mode, make: Make, signals: "Signals") -> None:
    """The model's exception reaches the caller as it is, and is in the trace."""
    langsmith = LangSmith()
    agent, _ = agent_of(make(signals), mode, [["search"], ZeroDivisionError("no")])
    with pytest.raises(ZeroDivisionError, match="no"):
        await run(agent, mode, langsmith)
    langsmith.check()
    failed = [each["name"] for each in langsmith.session.runs.values() if "error" in each]
    assert {"ScriptedChatModel", "model", "researcher"} <= set(failed)


@modes
@pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
async def test_a_refusal_reaches_the_caller(mode: Mode, kind: Any, signals: "Signals") -> None:
    """So does that of a limit, and the model is not called."""
    langsmith = LangSmith()
    limit = ModelCallLimit(run_limit=1, exit_behavior="error")
    agent, model = agent_of(kind([limit], telemetry=signals.telemetry), mode)
    with pytest.raises(ModelCallLimitExceededError):
        await run(agent, mode, langsmith)
    langsmith.check()
    assert len(model.calls) == langsmith.names.count("ScriptedChatModel") == 1


@pytest.mark.parametrize("make", [quota, pytest.param(inline, marks=needs_inline)])
async def test_observers_are_told_once(make: Make, signals: "Signals") -> None:
    """An async observer sees each decision once, whether or not the run is traced."""
    seen: list[str] = []

    async def observe(decision: Decision) -> None:
        await asyncio.sleep(0)
        seen.append(f"{decision.call.kind} {decision.outcome}")

    agent, _ = agent_of(make(signals, on_decision=observe, tell_model=True), "async")
    await run(agent, "async", LangSmith())
    assert seen == [
        *["model allowed", "tool allowed", "tool allowed"],
        *["model allowed", "tool blocked"],
        "model allowed",
    ]


@pytest.mark.parametrize("around", [True, False])
@modes
async def test_spans_of_langsmith(
    mode: Mode,
    around: bool,  # noqa: FBT001 - a parameter of the test
    signals: "Signals",
) -> None:
    """Where LangSmith makes spans, a span around the run makes it one trace; else there are two."""
    client = Client(
        "http://langsmith.invalid",
        api_key="none",
        tracing_mode="otel",
        otel_tracer_provider=signals.provider,
        info={},
    )
    agent, _ = agent_of(quota(signals), mode)
    request = signals.provider.get_tracer("app").start_as_current_span("request")
    given: Any = {"messages": [HumanMessage("hi")]}

    with tracing_context(enabled=True, client=client), request if around else nullcontext():
        if mode == "sync":
            agent.invoke(given, CONFIG)
        else:
            await agent.ainvoke(given, CONFIG)
    client.flush()
    client.close()

    traces: dict[int, list[str]] = {}
    for span in signals.spans():
        traces.setdefault(span.context.trace_id, []).append(span.name)
    ours = [sum(name.startswith("check_quota") for name in names) for names in traces.values()]
    assert "ScriptedChatModel" in str(traces)
    assert sorted(ours) == ([6] if around else [0, 6])


async def test_the_network_is_watched() -> None:
    """The detector works: who connects to a server fails."""
    with pytest.raises(AssertionError, match="a connection"), socket.socket() as client:
        client.connect(("127.0.0.1", 9))
