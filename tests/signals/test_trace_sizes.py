"""How much of a run's history traces of LangSmith and of callbacks repeat for our hooks."""

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.load import dumps
from langchain_core.tracers.base import BaseTracer
from langsmith.run_helpers import tracing_context

from langchain_quota import ModelCallLimit, QuotaMiddleware, ToolCallLimit
from tests.scene import CONFIG, Kind, Scene
from tests.telemetry import Signals, needs_inline, telling

pytestmark = pytest.mark.skipif(
    not hasattr(AgentMiddleware, "trace_policy"), reason="this LangChain has no trace_policy"
)
LIMITS: list[Any] = [ModelCallLimit(run_limit=99), ToolCallLimit(run_limit=99)]
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


@pytest.mark.parametrize(
    ("kind", "items"),
    [("quota", LIMITS), pytest.param("inline", LIMITS, marks=needs_inline), ("drop-in", LIMITS)],
)
async def test_a_trace_is_little_larger(kind: Kind, items: Any) -> None:
    """Hooks repeat no history: a trace has at most 1.1 times the bytes of one without limits."""
    sizes, none = await traced(*items, kind=kind), await traced()
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


async def test_the_users_policy_applies(policy: Any, signals: Signals) -> None:
    """`configure_trace_policy` holds for our hooks, and a subclass may have its own policy."""
    full = Full(LIMITS, telemetry=signals.telemetry)
    assert all("messages" in each for each in (await traced(full)).inputs)
    policy.configure_trace_policy(policy.TracePolicy(process_inputs=lambda _: {"by": "me"}))
    assert {str(each) for each in (await traced(*LIMITS)).inputs} == {"{'by': 'me'}"}
    policy.configure_trace_policy(policy.TracePolicy())
    assert all("messages" in each for each in (await traced(*LIMITS)).inputs)


@pytest.mark.parametrize("enabled", [False, True])
async def test_langsmith_is_known_before_the_first_run(
    enabled: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where LangSmith's tracing is on, not even the first hook of a process repeats the history."""
    monkeypatch.setattr("langchain_quota.runtime.compat.TRACED", Event())
    with tracing_context(enabled=enabled):
        quota = QuotaMiddleware(LIMITS)
    sizes = Sizes()
    scene = Scene(telling(), ["done"], [quota])
    await scene.agent.ainvoke({"messages": [("user", TEXT)]}, {**CONFIG, "callbacks": [sizes]})
    first, *others = sizes.inputs
    assert (first == {}, others) == (enabled, [{}] * 2)
