"""Random agents, run with `invoke` and with `ainvoke`, and inline: nothing that one sees differs.

So all other tests may prove what they prove in one form: see `both_forms` in `tests/scene.py`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, ToolCall

from langchain_quota import MemoryStore, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import Turn, captured_decisions
from tests import drawn
from tests.drawn import Batch, ProviderError, TurnPlan
from tests.examples import examples
from tests.scene import ANN, Form, Kind, Scene
from tests.stores import Clock, FickleStore, counts
from tests.telemetry import needs_inline, telling


@dataclass(frozen=True)
class Computed:
    """A limit that is computed when it is needed."""

    number: int

    def __call__(self, state: Any, runtime: Any) -> int:
        return self.number


@dataclass(frozen=True)
class Plan:
    """Limits, and what happens on one thread, with or without a store."""

    limits: list[Limit]
    turns: list[TurnPlan]
    stored: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def _computed(limit: Limit) -> Limit:
    number: Any = limit.run_limit
    computed: dict[str, Any] = {"run_limit": Computed(number)}
    return replace(limit, **computed) if isinstance(number, int) else limit


@st.composite
def plans(draw: st.DrawFn, *, stacked: bool = False, failing: bool = True) -> Plan:
    """Plans in which most turns come to a limit, and nothing raises unless it is `failing`."""
    stored = not stacked and draw(st.booleans())
    limits = draw(drawn.limit_lists(stacked=stacked, stored=stored))
    if not failing and any(
        each.kind == "tool" and each.exit_behavior == "error" for each in limits
    ):
        reject()
    if not stacked:
        limits = [_computed(each) if draw(st.booleans()) else each for each in limits]
    answer = drawn.answers(*drawn.TOOLS) if failing else drawn.batches(*drawn.TOOLS)
    down = st.sampled_from([False, False, True]) if stored and failing else st.just(value=False)
    turn = st.builds(TurnPlan, answers=st.lists(answer, min_size=1, max_size=3), down=down)
    options: dict[str, Any] = {}
    if not stacked:
        options |= {"tell_model": draw(st.booleans()), "hide_exhausted": draw(st.booleans())}
    if stored:
        options["on_store_error"] = draw(st.sampled_from(["block", "allow"]))
    turns = draw(st.lists(turn, min_size=1, max_size=3 if stored else 2))
    return Plan(limits, turns, stored, options)


def play(plan: Plan, kind: Kind, form: Form) -> dict[str, Any]:
    """Play a plan, and give all that one can see of it."""
    signals, batches, numbers = telling(), list[Batch | None](), count()
    raised: list[str] = []
    # Calls without an id, where a middleware does not limit their tool, are LangChain's.
    leaves = kind == "drop-in" or not any("tool" in each.kinds for each in plan.limits)

    def answer(_: Sequence[BaseMessage]) -> Turn:
        batch = batches.pop(0) if batches else []
        if batch is None:
            return ProviderError("overloaded")
        return _numbered(batch, next(numbers), leaves=leaves) if batch else "done"

    store: Any = FickleStore(MemoryStore(clock=Clock())) if plan.stored else None
    options = {**plan.options, **({"store": store} if store else {})}
    options |= {"form": form, "context": ANN, "name": "researcher"}
    scene = Scene(signals, answer, plan.limits, kind=kind, tools=drawn.TOOLS, **options)
    with captured_decisions() as decisions:
        for turn in plan.turns:
            batches[:] = turn.answers
            if store is not None:
                store.down = turn.down
            try:
                asyncio.run(scene.play())
            except drawn.RAISED as error:
                raised.append(repr(error))
    used = scene.usage()
    return {
        "ran": sorted(scene.ran),
        "requests": [
            (list(map(drawn.told, each.messages)), each.tools) for each in scene.model.calls
        ],
        "messages": list(map(drawn.told, scene.state()["messages"])),
        "counts": (used.model, dict(used.tools), used.run_model, dict(used.run_tools)),
        "stored": None
        if store is None
        else (counts(store), sorted(u.used for u in store.usages())),
        "metrics": drawn.metrics(signals),
        "spans": [(each.name, dict(each.attributes or {})) for each in signals.spans()],
        "decisions": [(each.call, each.outcome, each.limits) for each in decisions],
        "raised": raised,
    }


def _numbered(batch: Batch, number: int, *, leaves: bool) -> AIMessage:
    """An answer under an id of its own, from which follow those of its calls that have none."""
    calls = []
    for index, each in enumerate(batch):
        call = ToolCall(name=str(each), args={}, id=None) if isinstance(each, str) else each
        assert isinstance(call, dict)
        given = isinstance(each, str) or (leaves and not call["id"])
        call_id = f"{number}-{index}" if given else call["id"]
        calls.append(ToolCall(name=call["name"], args={}, id=call_id, type="tool_call"))
    return AIMessage("", id=f"answer-{number}", tool_calls=calls)


@pytest.mark.parametrize("kind", ["drop-in", "quota", pytest.param("inline", marks=needs_inline)])
@examples(40)
@given(data=st.data())
def test_both_forms_do_the_same(kind: Kind, data: st.DataObject) -> None:
    """Of any limits, batches, failures and outages: all that one can see is the same."""
    plan = data.draw(plans(stacked=kind == "drop-in"))
    assert play(plan, kind, "sync") == play(plan, kind, "async")


@needs_inline
@examples(30)
@given(plans(failing=False))
def test_inline_is_the_same_as_quota_middleware(plan: Plan) -> None:
    """What runs, the answers, the counts, metrics, spans and messages are QuotaMiddleware's."""
    assert play(plan, "inline", "async") == play(plan, "quota", "async")


def test_the_plans_do_something() -> None:
    """A plan comes to calls that run, messages, counts, metrics and spans that are compared."""
    limits: list[Limit] = [ToolCallLimit("search", run_limit=1)]
    played = play(Plan(limits, [TurnPlan([["search"] * 3])]), "quota", "sync")

    assert (played["ran"], played["counts"][1]) == (["search"], {"search": 1})
    assert [name for name, _ in played["spans"]] == ["check_quota tool search"] * 3
    assert [len(played[each]) for each in ("decisions", "messages", "requests")] == [3, 6, 2]
    assert sum(n for (name, *_), n in played["metrics"].items() if "calls_total" in name) == 3
