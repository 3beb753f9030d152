"""Beside the packages that trace agents themselves: OpenTelemetry's, Langfuse, LangSmith.

Hooks repeat little of a run's history in their traces. Nothing goes to the network.
"""

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import requests
from langchain.agents.middleware import AgentMiddleware
from langchain_core.load import dumps
from langchain_core.tracers.base import BaseTracer
from langsmith import Client
from langsmith.run_helpers import tracing_context
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from langchain_quota.limits import Limit
from tests.forked import run_python
from tests.scene import CONFIG, Form, Kind, Scene, both_forms, each_middleware
from tests.telemetry import Signals, telling

GENAI = "opentelemetry.instrumentation.genai.langchain"
LIMITS: list[Limit] = [ModelCallLimit(run_limit=9), ToolCallLimit("search", run_limit=2)]
KEY = "pk-lf-of-the-tests"


def script(messages: Any) -> Any:
    return (["search", "search"], ["search"], "done")[len(messages) // 3]


def scene_of(signals: Signals, kind: Kind = "quota", form: Form = "async", **options: Any) -> Scene:
    return Scene(signals, script, LIMITS, kind=kind, form=form, name="researcher", **options)


def traces(signals: Signals) -> list[list[tuple[str, str]]]:
    """The names of the spans by trace, each with its parent's."""
    names = {each.context.span_id: each.name for each in signals.spans()}
    found: dict[int, list[tuple[str, str]]] = {}
    for each in signals.spans():
        parent = names[each.parent.span_id] if each.parent else ""
        found.setdefault(each.context.trace_id, []).append((each.name, parent))
    return list(found.values())


def ours(spans: list[tuple[str, str]]) -> list[str]:
    """The parents of our spans."""
    return [parent for name, parent in spans if name.startswith("check_quota")]


def play_instrumented(form: Form, switched: str) -> None:
    """In a process apart: run an agent beside OpenTelemetry's instrumentation, which patches it."""
    signals = telling()
    instrumentor = import_module(GENAI).LangChainInstrumentor()
    if switched != "imported":
        instrumentor.instrument(tracer_provider=signals.provider)
    scene = scene_of(signals, form=form)
    if switched == "on and off":
        instrumentor.uninstrument()
    asyncio.run(scene.play())
    if switched == "on":
        instrumentor.uninstrument()
    print(json.dumps(traces(signals)))  # noqa: T201 - the result


@pytest.mark.rest
@pytest.mark.parametrize(
    ("form", "switched", "parents"),
    [
        ("sync", "on", {"invoke_agent researcher"}),
        ("async", "on", {"invoke_agent researcher"}),
        ("async", "imported", {""}),
        ("sync", "on and off", {""}),
    ],
)
def test_beside_opentelemetrys_instrumentation(
    form: Form, switched: str, parents: set[str]
) -> None:
    """Our spans are below its `invoke_agent` span; where it is not on, it changes nothing."""
    pytest.importorskip(GENAI)
    program = f"from {__name__} import play_instrumented\nplay_instrumented({form!r}, {switched!r})"
    done = run_python(program, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = [parent for spans in json.loads(done.stdout) for parent in ours(spans)]
    assert len(found) == 6
    assert set(found) == parents


@pytest.fixture(scope="session")
def langfuse() -> Iterator[tuple[Any, Signals]]:
    """A client of Langfuse that sends nothing, and makes spans beside ours.

    A process has one for each key, which keeps its first provider, in whatever order tests run.
    """
    made, signals = pytest.importorskip("langfuse"), telling()
    client = made.Langfuse(
        public_key=KEY,
        secret_key="none",  # noqa: S106 - there is no server
        base_url="http://langfuse.invalid",
        tracer_provider=signals.provider,
        span_exporter=InMemorySpanExporter(),
    )
    yield client, signals
    client.shutdown()


@pytest.mark.parametrize(
    ("form", "around", "counts"),
    [("sync", False, [6]), ("async", True, [6]), ("async", False, [0, 1, 1, 1, 1, 1, 1])],
)
async def test_beside_langfuse(
    form: Form,
    around: bool,  # noqa: FBT001 - a parameter of the test
    counts: list[int],
    langfuse: tuple[Any, Signals],
) -> None:
    """A sync run is one trace; an async one is, where an observation is around it."""
    client, signals = langfuse
    signals.exporter.clear()
    agent = scene_of(signals, form=form).agent
    handler = pytest.importorskip("langfuse.langchain").CallbackHandler(public_key=KEY)
    given: Any = {"messages": [("user", "hi")]}
    config: Any = {"callbacks": [handler], "configurable": {"thread_id": "t"}}
    request = client.start_as_current_observation(name="request")
    with request if around else nullcontext():
        _ = agent.invoke(given, config) if form == "sync" else await agent.ainvoke(given, config)
    assert sorted(len(ours(spans)) for spans in traces(signals)) == counts


class Kept(requests.Session):
    """A session that sends nothing, and keeps the runs as LangSmith would know them, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, dict[str, Any]] = {}

    def request(self, method: Any, url: Any, *args: Any, **options: Any) -> requests.Response:
        run = json.loads(options["data"])
        known = self.runs.setdefault(run["id"], {"ends": 0})
        known.update({key: value for key, value in run.items() if value is not None})
        known["ends"] += method == "PATCH"
        response = requests.Response()
        response.status_code = 202
        return response


@both_forms
@each_middleware
async def test_beside_langsmith(form: Form, kind: Kind, signals: Signals) -> None:
    """A traced run is as one that is not; each call is in the one trace, a model's in its hook."""
    kept = Kept()
    client = Client(
        "http://langsmith.invalid", api_key="none", info={}, session=kept, auto_batch_tracing=False
    )
    plain = scene_of(telling(), kind, form)
    answers = [each.content for each in (await plain.play())["messages"]]
    with tracing_context(enabled=True, client=client):
        scene = scene_of(signals, kind, form)
        assert [each.content for each in (await scene.play())["messages"]] == answers
    # A coroutine that nobody awaits is told when it is collected, and fails the test.
    gc.collect(1)
    assert scene.usage() == plain.usage()
    runs = kept.runs
    assert {each["ends"] for each in runs.values()} == {1}
    assert len({each["trace_id"] for each in runs.values()}) == 1
    assert not any("error" in each for each in runs.values())
    names = [each["name"] for each in runs.values()]
    assert (names.count("ScriptedChatModel"), names.count("search")) == (3, 2)
    parents = {
        runs[each["parent_run_id"]]["name"]
        for each in runs.values()
        if each["name"] == "ScriptedChatModel"
    }
    # These limits need no hook of `QuotaMiddleware` around the model.
    around = "model" if kind == "quota" else "wrap_model_call"
    assert all(each.endswith(around) for each in parents)


has_policy = pytest.mark.skipif(
    not hasattr(AgentMiddleware, "trace_policy"), reason="this LangChain has no trace_policy"
)
ROOMY: list[Any] = [ModelCallLimit(run_limit=99), ToolCallLimit(run_limit=99)]
TEXT = "x" * 4_000


class Sizes(BaseTracer):
    """A tracer that sums what it records, and keeps the inputs of our hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.inputs: list[Any] = []

    def _persist_run(self, run: Any) -> None:
        pass

    def _end_trace(self, run: Any) -> None:
        self.total += len(dumps(run.inputs)) + len(dumps(run.outputs or {}))
        if "Quota" in run.name or "CallLimit" in run.name:
            self.inputs.append(run.inputs)
        super()._end_trace(run)


async def traced(*items: Any, kind: Kind = "quota", **options: Any) -> Sizes:
    """What a tracer has recorded of a run of twenty steps, after another traced run."""
    script = [["search"]] * 20 + ["done"]
    sizes = Sizes()
    for tracer in (Sizes(), sizes):
        scene = Scene(telling(), script, items, kind=kind, **options)
        given: Any = {"messages": [("user", TEXT)]}
        await scene.agent.ainvoke(given, {**CONFIG, "callbacks": [tracer], "recursion_limit": 400})
    return sizes


@has_policy
@each_middleware
async def test_a_trace_is_little_larger(kind: Kind) -> None:
    """Hooks repeat no history: a trace has at most 1.1 times the bytes of one without limits."""
    sizes, none = await traced(*ROOMY, kind=kind), await traced()
    assert 0 < none.total < sizes.total <= 1.1 * none.total
    assert sizes.inputs
    assert {dumps(each) for each in sizes.inputs} == {"{}"}


class Full(QuotaMiddleware[Any, Any]):
    trace_policy = None


@pytest.fixture
def policy() -> Iterator[Any]:
    from langchain.agents import middleware  # noqa: PLC0415 - older ones have no policy

    yield middleware
    middleware.configure_trace_policy(None)


@has_policy
async def test_the_users_policy_applies(policy: Any, signals: Signals) -> None:
    """`configure_trace_policy` holds for our hooks, and a subclass may have its own policy."""
    full = Full(ROOMY, telemetry=signals.telemetry)
    assert all("messages" in each for each in (await traced(full)).inputs)
    policy.configure_trace_policy(policy.TracePolicy(process_inputs=lambda _: {"by": "me"}))
    assert {str(each) for each in (await traced(*ROOMY)).inputs} == {"{'by': 'me'}"}
    policy.configure_trace_policy(policy.TracePolicy())
    assert all("messages" in each for each in (await traced(*ROOMY)).inputs)


@has_policy
@pytest.mark.parametrize("enabled", [False, True])
async def test_langsmith_is_known_before_the_first_run(
    enabled: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where LangSmith's tracing is on, not even the first hook of a process repeats the history."""
    monkeypatch.setattr("langchain_quota.runtime.compat.TRACED", Event())
    with tracing_context(enabled=enabled):
        quota = QuotaMiddleware(ROOMY)
    sizes = Sizes()
    scene = Scene(telling(), ["done"], [quota])
    await scene.agent.ainvoke({"messages": [("user", TEXT)]}, {**CONFIG, "callbacks": [sizes]})
    first, *others = sizes.inputs
    assert (first == {}, others) == (enabled, [{}] * 2)
