"""Random agents and graphs, called in every form: nothing that one sees differs.

So all other tests may prove what they prove in one form: see `both_forms` in `tests/scene.py`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import given, reject
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
from langgraph.types import Command, interrupt

from langchain_quota import MemoryStore, TokenLimit, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.testing import Turn, captured_decisions
from tests import drawn
from tests.drawn import Batch, TurnPlan
from tests.examples import examples
from tests.loops import SHAPES, looped
from tests.scene import ANN, Form, Scene, check_history, recording
from tests.stores import Clock, FickleStore, counts
from tests.telemetry import needs_inline, telling
from tests.tokens import ProviderError


@dataclass(frozen=True)
class Computed:
    """A limit that is computed when it is needed."""

    number: int

    def __call__(self, state: Any, runtime: Any) -> int:
        return self.number


@dataclass(frozen=True)
class Plan:
    """Limits, and what happens on one thread, with or without a store.

    The model calls use so many `tokens`, one after the other, over and over. In loops the tool
    `ask` waits for an answer.
    """

    limits: list[Limit]
    turns: list[TurnPlan]
    stored: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tokens: Sequence[int] = (1,)
    loops: bool = False


def _computed(limit: Limit) -> Limit:
    number: Any = limit.run_limit
    computed: dict[str, Any] = {"run_limit": Computed(number)}
    return replace(limit, **computed) if isinstance(number, int) else limit


@st.composite
def budgets(draw: st.DrawFn) -> Limit:
    run, more = draw(st.none() | st.integers(2, 100)), draw(st.integers(2, 100))
    hold = draw(st.none() | st.integers(1, 40))
    exit_behavior: Any = draw(st.sampled_from(["end", "error", "finalize"]))
    return TokenLimit(
        run_limit=run,
        thread_limit=more + (run or 0),
        exit_behavior=exit_behavior,
        keep=draw(st.integers(1, (run or more) - 1)) if exit_behavior == "finalize" else None,
        # A number is held earlier in a graph than in an agent.
        reserve=None if hold is None else lambda request: hold + len(request.tools),
    )


def _plain(batch: Batch) -> Batch:
    """A batch with ids; a node of tools runs it again if one has waited: so that one is alone."""
    names: Batch = [each["name"] if isinstance(each, dict) else each for each in batch]
    return ["ask"] if "ask" in names else names


@st.composite
def plans(
    draw: st.DrawFn, *, stacked: bool = False, failing: bool = True, loops: bool = False
) -> Plan:
    """Plans in which most turns come to a limit, and nothing raises unless it is `failing`."""
    stored = loops or (not stacked and draw(st.booleans()))
    limits = draw(drawn.limit_lists(stacked=stacked, stored=stored))
    if not (failing or loops) and any(
        each.kind == "tool" and each.exit_behavior == "error" for each in limits
    ):
        reject()
    if not stacked:
        limits = [_computed(each) if draw(st.booleans()) else each for each in limits]
    answer = drawn.answers(*drawn.TOOLS) if failing else drawn.batches(*drawn.TOOLS)
    if loops:
        limits = drawn.possible([*limits, *draw(st.lists(budgets(), max_size=1))])
        answer = drawn.batches(*drawn.TOOLS).map(_plain)
    down = st.sampled_from([False, False, True]) if stored and failing else st.just(value=False)
    turn = st.builds(TurnPlan, answers=st.lists(answer, min_size=1, max_size=3), down=down)
    options: dict[str, Any] = {}
    if not stacked:
        options |= {"tell_model": draw(st.booleans()), "hide_exhausted": draw(st.booleans())}
    if stored:
        options["on_store_error"] = draw(st.sampled_from(["block", "allow"]))
    turns = draw(st.lists(turn, min_size=1, max_size=3 if stored else 2))
    tokens = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    return Plan(limits, turns, stored, options, tokens, loops)


async def play(plan: Plan, kind: Any, form: Form) -> dict[str, Any]:
    """Play a plan, and give all that one can see of it. What blocks the event loop fails."""
    signals, batches, numbers = telling(), list[Batch | None](), count()
    raised, ran, last, tokens = list[str](), list[str](), list[str](), cycle(plan.tokens)
    # Calls without an id, where a middleware does not limit their tool, are LangChain's.
    leaves = kind == "drop-in" or not any("tool" in each.kinds for each in plan.limits)

    def answer(_: Sequence[BaseMessage]) -> Turn:
        batch = batches.pop(0) if batches else []
        if batch is None:
            return ProviderError("overloaded")
        return _numbered(batch, next(numbers), next(tokens), leaves=leaves)

    store: Any = FickleStore(MemoryStore(clock=Clock())) if plan.stored else None
    options = {**plan.options, **({"store": store} if store else {}), "ran": ran}
    options |= {"form": form, "context": ANN, "name": "researcher"}
    asks = (lambda: interrupt("Sure?")) if plan.loops else None
    options["tools"] = ["search", "calc", recording("ask", ran, asks)]
    if kind in SHAPES:
        scene = looped(kind, signals, answer, plan.limits, **options)
    else:
        scene = Scene(signals, answer, plan.limits, kind=kind, **options)
    with captured_decisions() as decisions:
        for turn in plan.turns:
            batches[:] = turn.answers
            if store is not None:
                store.down = turn.down
            given: Any = {"messages": [("user", "hi")]}
            try:
                while given:
                    with blockbuster_ctx() if form == "async" else nullcontext():
                        result = await scene.invoke(given)
                    waiting = result.get("__interrupt__")
                    last += [] if waiting else [result["messages"][-1].text]
                    given = waiting and Command(resume={each.id: "yes" for each in waiting})
            except drawn.RAISED as error:
                raised.append(repr(error))
    if plan.loops:
        scene.check_requests()
        if not raised:
            check_history(scene.state()["messages"])
    # A graph has no state of ours, and a loop in the functional API that raises none at all.
    in_agent = kind not in SHAPES
    used: Any = in_agent and scene.usage()
    return {
        "ran": sorted(ran),
        "last": last,
        "requests": [
            (list(map(drawn.told, each.messages)), each.tools) for each in scene.model.calls
        ],
        "messages": in_agent and list(map(drawn.told, scene.state()["messages"])),
        "counts": used and (used.model, dict(used.tools), used.run_model, dict(used.run_tools)),
        "stored": store
        and (counts(store), sorted((u.key.split(":")[:2], u.used) for u in store.usages())),
        "metrics": drawn.metrics(signals),
        "spans": [(each.name, dict(each.attributes or {})) for each in signals.spans()],
        "decisions": [(each.call, each.outcome, each.limits) for each in decisions],
        "raised": raised,
    }


def _numbered(batch: Batch, number: int, tokens: int, *, leaves: bool) -> AIMessage:
    """An answer under an id of its own, from which follow those of its calls that have none."""
    calls = []
    for index, each in enumerate(batch):
        call = ToolCall(name=str(each), args={}, id=None) if isinstance(each, str) else each
        assert isinstance(call, dict)
        given = isinstance(each, str) or (leaves and not call["id"])
        call_id = f"{number}-{index}" if given else call["id"]
        calls.append(ToolCall(name=call["name"], args={}, id=call_id, type="tool_call"))
    used: Any = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    text = "" if calls else "done"
    return AIMessage(text, id=f"answer-{number}", tool_calls=calls, usage_metadata=used)


@pytest.mark.parametrize("kind", ["drop-in", "quota", pytest.param("inline", marks=needs_inline)])
@examples(40)
@given(data=st.data())
async def test_both_forms_do_the_same(kind: str, data: st.DataObject) -> None:
    """Of any limits, batches, failures and outages: all that one can see is the same."""
    plan = data.draw(plans(stacked=kind == "drop-in"))
    assert await play(plan, kind, "sync") == await play(plan, kind, "async")


@needs_inline
@examples(30)
@given(plans(failing=False))
async def test_inline_is_the_same_as_quota_middleware(plan: Plan) -> None:
    """What runs, the answers, the counts, metrics, spans and messages are QuotaMiddleware's."""
    assert await play(plan, "inline", "async") == await play(plan, "quota", "async")


def in_a_loop(plan: Plan, seen: dict[str, Any]) -> dict[str, Any]:
    """What is the same in an agent and in a graph."""
    # A limit that ends the run leaves the calls that it stops out of the history of a graph.
    ends = any(each.exit_behavior != "continue" or each.give_up_after for each in plan.limits)
    return {
        **{name: seen[name] for name in ("ran", "raised", "last")},
        "requests": ends or [([m[2] for m in messages], t) for messages, t in seen["requests"]],
        "stored": [each for each in seen["stored"][1] if each[1] and each[0][1] != "root_run"],
        "metrics": {key: n for key, n in seen["metrics"].items() if key[0].endswith("_total")},
        "decisions": [
            (call, outcome, [(each.limit, each.count_of("run"), each.scope) for each in limits])
            for call, outcome, limits in seen["decisions"]
        ],
    }


@needs_inline
@examples(60)
@given(plan=plans(failing=False, loops=True), form=st.sampled_from(["sync", "async"]))
async def test_a_graph_and_an_agent_do_the_same(plan: Plan, form: Form) -> None:
    """Counts, decisions, signals, requests and what ran are equal in every shape."""
    in_agent = in_a_loop(plan, await play(plan, "inline", form))
    for shape in SHAPES:
        in_graph = in_a_loop(plan, await play(plan, shape, form))
        for what, found in in_agent.items():
            assert in_graph[what] == found, (shape, what)


async def test_the_plans_do_something() -> None:
    """A plan comes to calls that run, messages, counts, metrics and spans that are compared."""
    limits: list[Limit] = [ToolCallLimit("search", run_limit=1)]
    played = await play(Plan(limits, [TurnPlan([["search"] * 3])]), "quota", "sync")
    assert (played["ran"], played["counts"][1]) == (["search"], {"search": 1})
    assert [name for name, _ in played["spans"]] == ["check_quota tool search"] * 3
    assert [len(played[each]) for each in ("decisions", "messages", "requests")] == [3, 6, 2]
    assert sum(n for (name, *_), n in played["metrics"].items() if "calls_total" in name) == 3
