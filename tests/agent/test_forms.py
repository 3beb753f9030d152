"""Random agents, run with `invoke` and with `ainvoke`: nothing that one can see differs.

So all other tests may prove what they prove in one form: see `both_forms` in `conftest.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit, check_together
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import Turn, captured_decisions
from tests.agent import test_properties as four_rules
from tests.agent import test_shared_properties as shared_quotas
from tests.agent.test_properties import Batch, ProviderError
from tests.examples import examples
from tests.scene import ANN, CONFIG, Form, Middleware, Scene
from tests.signals import HAS_INLINE, Signals
from tests.stores import Clock, FickleStore

KINDS = ["quota", "stack", *(["inline"] if HAS_INLINE else [])]
CLASSES: dict[str, Any] = {"quota": QuotaMiddleware, "inline": InlineQuotaMiddleware}


@dataclass(frozen=True)
class Computed:
    """A limit that is computed when it is needed."""

    number: int

    def __call__(self, state: Any, runtime: Any) -> int:
        return self.number


@dataclass(frozen=True)
class TurnPlan:
    """What the model asks for in a turn; `None` for a provider that fails.

    Attributes:
        answers: A batch for each model call.
        down: Whether the store is down.
    """

    answers: list[Batch | None]
    down: bool = False


@dataclass(frozen=True)
class Plan:
    """Limits, and what happens on one thread.

    Attributes:
        limits: The limits.
        turns: The turns, one after the other.
        stored: Whether there is a store.
        options: Of the middleware that has all limits.
    """

    limits: list[Limit]
    turns: list[TurnPlan]
    stored: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def possible(limits: Sequence[Limit]) -> None:
    """Draw again where a limit can never be reached."""
    try:
        check_together(limits)
    except ValueError:
        reject()


def _computed(limit: Limit) -> Limit:
    number: Any = limit.run_limit
    computed: dict[str, Any] = {"run_limit": Computed(number)}
    return replace(limit, **computed) if isinstance(number, int) else limit


@st.composite
def plans(draw: st.DrawFn, *, stacked: bool = False, failing: bool = True) -> Plan:
    """Plans in which most turns come to a limit.

    Args:
        draw: Draws values.
        stacked: Whether each limit is a drop-in's.
        failing: Whether providers fail, the store is down and limits raise at tool calls.
    """
    stored = not stacked and draw(st.booleans())
    if stored:
        limits = draw(shared_quotas.limit_lists())
    else:
        limits = draw(four_rules.limit_lists(stacked=stacked))
    if not failing and any(
        each.kind == "tool" and each.exit_behavior == "error" for each in limits
    ):
        reject()
    if not stacked:
        possible(limits)
        limits = [_computed(each) if draw(st.booleans()) else each for each in limits]
    tools = four_rules.TOOLS
    answer = four_rules.answers(*tools) if failing else four_rules.batches(*tools)
    down = st.sampled_from([False, False, True]) if stored and failing else st.just(value=False)
    turn = st.builds(TurnPlan, answers=st.lists(answer, min_size=1, max_size=3), down=down)
    options: dict[str, Any] = {}
    if not stacked:
        options |= {"tell_model": draw(st.booleans()), "hide_exhausted": draw(st.booleans())}
    if stored:
        options["on_store_error"] = draw(st.sampled_from(["deny", "allow"]))
    turns = draw(st.lists(turn, min_size=1, max_size=3 if stored else 2))
    return Plan(limits, turns, stored, options)


@dataclass
class Played:
    """All that one can see of a plan that was played."""

    ran: list[str]
    requests: list[Any]
    messages: list[Any]
    counts: Any
    stored: Any
    metrics: dict[Any, float]
    spans: list[Any]
    decisions: list[Any]
    raised: list[str]


def play(plan: Plan, kind: str, form: Form) -> Played:
    """Play a plan.

    Args:
        plan: The plan.
        kind: `"quota"`, `"inline"`, or `"stack"` for a drop-in for each limit.
        form: Which hooks run.
    """
    exporter, provider, registry = InMemorySpanExporter(), TracerProvider(), CollectorRegistry()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(registry=registry, tracer_provider=provider)
    signals = Signals(telemetry, registry, provider, exporter)
    batches: list[Batch | None] = []
    numbers = count()
    raised: list[str] = []

    def answer(_: Sequence[BaseMessage]) -> Turn:
        batch = batches.pop(0) if batches else []
        if batch is None:
            return ProviderError("overloaded")
        return _numbered(batch, next(numbers), kind) if batch else "done"

    store = FickleStore(MemoryStore(clock=Clock())) if plan.stored else None
    scene = Scene(
        signals,
        answer,
        _middleware(plan, kind, telemetry, store),
        tools=four_rules.TOOLS,
        form=form,
        name="researcher",
    )
    scene.context = ANN
    with captured_decisions() as decisions:
        for turn in plan.turns:
            batches[:] = turn.answers
            if store is not None:
                store.down = turn.down
            try:
                asyncio.run(scene.play())
            except (
                ToolCallLimitExceededError,
                ModelCallLimitExceededError,
                ProviderError,
            ) as error:
                raised.append(repr(error))
    snapshot = scene.agent.get_state(CONFIG)
    used = usage(snapshot)
    return Played(
        ran=sorted(scene.ran),
        requests=[(list(map(_told, each.messages)), each.tools) for each in scene.model.calls],
        messages=list(map(_told, snapshot.values["messages"])),
        counts=(used.model, dict(used.tools), used.run_model, dict(used.run_tools)),
        stored=None if store is None else shared_quotas.nameless_counts(store),
        metrics=_samples(registry),
        spans=[(each.name, dict(each.attributes or {})) for each in signals.spans()],
        decisions=[(each.call, each.outcome, each.limits) for each in decisions],
        raised=raised,
    )


def _middleware(plan: Plan, kind: str, telemetry: Telemetry, store: Any) -> list[Middleware]:
    if kind == "stack":
        return [four_rules.drop_in(limit, telemetry) for limit in plan.limits]
    quota: Any = CLASSES[kind](plan.limits, store=store, telemetry=telemetry, **plan.options)
    quota._clock = Clock()
    return [quota]


def _numbered(batch: Batch, number: int, kind: str) -> AIMessage:
    """An answer under an id of its own, from which follow those of its calls that have none."""
    calls = []
    for index, each in enumerate(batch):
        call = ToolCall(name=str(each), args={}, id=None) if isinstance(each, str) else each
        assert isinstance(call, dict)
        # A drop-in leaves calls without an id to LangChain, where it does not limit their tool.
        given = isinstance(each, str) or (kind == "stack" and not call["id"])
        call_id = f"{number}-{index}" if given else call["id"]
        calls.append(ToolCall(name=call["name"], args={}, id=call_id, type="tool_call"))
    return AIMessage("", id=f"answer-{number}", tool_calls=calls)


def _told(message: BaseMessage | AnyMessage) -> Any:
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return message.type, message.name, message.content, calls


def _samples(registry: CollectorRegistry) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith(
            ("_created", "_timestamp_seconds", "_start_time_seconds", "_sum", "_bucket")
        )
    }


def _with_kind(kind: str) -> st.SearchStrategy[tuple[str, Plan]]:
    return st.tuples(st.just(kind), plans(stacked=kind == "stack"))


@examples(40)
@given(st.sampled_from(KINDS).flatmap(_with_kind))
def test_both_forms_do_the_same(planned: tuple[str, Plan]) -> None:
    """Of any limits, batches, failures and outages: all that one can see is the same."""
    kind, plan = planned
    assert play(plan, kind, "sync") == play(plan, kind, "async")


def test_the_plans_do_something() -> None:
    """A plan comes to calls that run, messages, counts, metrics and spans that are compared."""
    limits: list[Limit] = [ToolCallLimit("search", run_limit=1)]
    played = play(Plan(limits, [TurnPlan([["search"] * 3])]), "quota", "sync")

    assert (played.ran, played.counts[1]) == (["search"], {"search": 1})
    assert Counter(name for name, _ in played.spans) == {
        "check_quota model": 2,
        "check_quota tool search": 3,
    }
    assert (len(played.decisions), len(played.messages), len(played.requests)) == (5, 6, 2)
    assert sum(value for (name, *_), value in played.metrics.items() if "calls_total" in name) == 5
