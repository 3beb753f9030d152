"""QuotaMiddleware: many limits judged together in one middleware."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit
from tests.agent.conftest import Form, Order, in_order, orders
from tests.agent.rules import Middleware, Scene, check_history
from tests.examples import examples
from tests.signals import Signals

TOOLS = ("search", "calc", "ask")


class ProviderError(Exception):
    """The model's provider fails."""


def quota(signals: Signals, *limits: Limit, **options: Any) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def scene_of(signals: Signals, script: Any, *limits: Limit, tools: Sequence[Any] = TOOLS) -> Scene:
    return Scene(signals, script, [quota(signals, *limits)], tools=tools)


def last_text(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content)


@orders(2)
async def test_a_refused_call_is_charged_to_none(order: Order, signals: Signals) -> None:
    """A call that one limit refuses leaves room in the other, for a later call of its batch."""
    scene = scene_of(
        signals,
        [["search", "search", "calc"], ["calc"], "done"],
        *in_order(order, ToolCallLimit(thread_limit=2), ToolCallLimit("search", run_limit=1)),
    )

    await scene.turn()

    assert sorted(scene.ran) == ["calc", "search"]
    assert sorted(scene.answers()) == [
        ("calc", "error"),
        ("calc", "success"),
        ("search", "error"),
        ("search", "success"),
    ]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 2, "search": 1}
    assert scene.metric("tool:search", "blocked", "run") == 1
    assert scene.metric("tool:*", "blocked", "thread") == 1
    assert scene.metric("tool:*", "refunded") == 0
    scene.check()


async def test_a_batch_over_two_limits_is_answered_once(signals: Signals) -> None:
    """A call that two limits refuse has one answer, which tells of both, and counts for both."""
    scene = scene_of(
        signals,
        [["search"], "done"],
        ToolCallLimit(thread_limit=0),
        ToolCallLimit("search", run_limit=0, message="No searching."),
    )

    await scene.turn()

    (answer,) = [each for each in scene.state()["messages"] if each.type == "tool"]
    assert answer.content == (
        "Tool call limit exceeded. Do not make additional tool calls. No searching."
    )
    assert scene.metric("tool:*", "blocked", "thread") == 1
    assert scene.metric("tool:search", "blocked", "run") == 1
    scene.check()


async def test_two_thresholds_over_one_count(signals: Signals) -> None:
    """Two limits on one tool count its calls once: the lower refuses, the higher ends."""
    scene = scene_of(
        signals,
        [["search"] * 3, "done", ["search"], ["search"]],
        ToolCallLimit("search", run_limit=2, name="soft"),
        ToolCallLimit("search", thread_limit=3, exit_behavior="end", name="hard"),
    )

    await scene.turn()
    assert scene.state()["thread_tool_call_count"] == {"search": 2}
    assert scene.metric("soft", "blocked", "run") == 1
    assert scene.metric("hard", "blocked", "thread") == 0
    scene.check()

    result = await scene.turn()
    assert scene.ran == ["search"] * 3
    assert scene.state()["thread_tool_call_count"] == {"search": 3}
    assert last_text(result) == (
        "'search' tool call limit reached: thread limit exceeded (4/3 calls)."
    )
    scene.check()


async def test_several_tools_under_one_limit(signals: Signals) -> None:
    """Tools named by one limit share its count; others are not counted."""
    scene = scene_of(
        signals,
        [["search", "ask", "calc"], ["search"], "done"],
        ToolCallLimit(["search", "calc"], run_limit=2, thread_limit=3),
    )

    await scene.turn()

    assert sorted(scene.ran) == ["ask", "calc", "search"]
    assert scene.state()["thread_tool_call_count"] == {"calc,search": 2}
    assert scene.metric("tool:calc,search", "blocked", "run") == 1
    assert "Do not call 'calc' or 'search' again." in str(scene.state()["messages"])
    scene.check()


async def test_excluded_tools(signals: Signals) -> None:
    """All tools but one: the one left out is neither counted nor refused, and always allowed."""
    scene = scene_of(
        signals,
        [["ask", "search", "ask", "calc", "ask"], "done"],
        ToolCallLimit(run_limit=1, exclude=["ask"]),
    )

    await scene.turn()

    assert sorted(scene.ran) == ["ask", "ask", "ask", "search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__-ask": 1}
    assert scene.metric("tool:*-ask", "allowed") == 1
    assert scene.metric("tool:*-ask", "blocked", "run") == 1
    scene.check()


async def test_all_tools_and_all_but_one_stand_apart(signals: Signals) -> None:
    """A limit on all tools and one on all but some keep two counts."""
    scene = scene_of(
        signals,
        [["ask", "search"], ["ask", "search"], "done"],
        ToolCallLimit(run_limit=3),
        ToolCallLimit(run_limit=1, exclude=["ask"]),
    )

    await scene.turn()

    assert sorted(scene.ran) == ["ask", "ask", "search"]
    assert scene.state()["thread_tool_call_count"] == {"__all__": 3, "__all__-ask": 1}
    scene.check()


EXITS = ["continue", "end", "error"]


@pytest.mark.parametrize("exits", list(permutations(EXITS)), ids="-".join)
@pytest.mark.parametrize("hit", [(0, 1), (0, 1, 2)], ids=str)
async def test_the_strongest_exit(
    exits: Sequence[Any], hit: Sequence[int], signals: Signals
) -> None:
    """A batch over several limits does the strongest of what they ask, and names every one."""
    scene = scene_of(
        signals,
        [[TOOLS[index] for index in hit], "done"],
        *(
            ToolCallLimit(tool, run_limit=0, exit_behavior=exit_behavior)
            for tool, exit_behavior in zip(TOOLS, exits, strict=True)
        ),
    )
    strongest = max((exits[index] for index in hit), key=EXITS.index)

    if strongest == "error":
        with pytest.raises(ToolCallLimitExceededError) as raised:
            await scene.turn()
        told = str(raised.value)
        assert raised.value.tool_name == TOOLS[exits.index("error")]
    else:
        told = last_text(await scene.turn())

    if strongest != "continue":
        for index, tool in enumerate(TOOLS):
            assert (f"'{tool}' tool call limit reached" in told) == (index in hit)
    assert scene.ran == []
    assert len(scene.model.calls) == (2 if strongest == "continue" else 1)
    for index in hit:
        assert scene.metric(f"tool:{TOOLS[index]}", "blocked", "run") == 1
    scene.check(answered=strongest != "error")


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_a_stopped_batch_is_charged_to_none(exit_behavior: Any, signals: Signals) -> None:
    """Where one limit stops the batch, no call of it runs or is charged, whatever it matches."""
    scene = scene_of(
        signals,
        [["calc", "ask", "search"], "done"],
        ToolCallLimit("search", run_limit=0, exit_behavior=exit_behavior),
        ToolCallLimit("calc", thread_limit=5),
        ToolCallLimit(thread_limit=9),
    )

    if exit_behavior == "error":
        with pytest.raises(ToolCallLimitExceededError):
            await scene.turn()
        await scene.turn()  # answers what was left without an answer
    else:
        await scene.turn()

    assert scene.ran == []
    assert sorted(scene.answers()) == [("ask", "error"), ("calc", "error"), ("search", "error")]
    assert scene.metric("tool:calc", "allowed") == 0
    assert scene.metric("tool:*", "allowed") == 0
    skipped = scene.signals.value(
        "langchain_quota_calls_total",
        agent="unnamed",
        kind="tool",
        tool="ask",
        decision="skipped",
    )
    assert skipped == 1
    scene.check()


@pytest.mark.parametrize("exits", [("end", "end"), ("end", "error"), ("error", "end")], ids=str)
async def test_several_model_limits_are_all_named(exits: tuple[Any, Any], signals: Signals) -> None:
    """Two model limits reached by one call: the stronger exit, and both in its message."""
    scene = scene_of(
        signals,
        [["search"], "never"],
        ModelCallLimit(run_limit=1, exit_behavior=exits[0], name="per run"),
        ModelCallLimit(thread_limit=1, exit_behavior=exits[1], name="per thread"),
    )

    if "error" in exits:
        with pytest.raises(ModelCallLimitExceededError) as raised:
            await scene.turn()
        told = str(raised.value)
    else:
        told = last_text(await scene.turn())

    assert "run limit (1/1)" in told
    assert "thread limit (1/1)" in told
    assert scene.metric("per run", "blocked", "run") == 1
    assert scene.metric("per thread", "blocked", "thread") == 1
    scene.check()


def three_limits(**options: Any) -> list[Limit]:
    return [
        ModelCallLimit(thread_limit=8, **options),
        ToolCallLimit("search", thread_limit=3, **options),
        ToolCallLimit(thread_limit=5, **options),
    ]


def three_drop_ins(signals: Signals) -> list[Middleware]:
    return [
        ModelCallLimitMiddleware(thread_limit=8, telemetry=signals.telemetry),
        ToolCallLimitMiddleware(tool_name="search", thread_limit=3, telemetry=signals.telemetry),
        ToolCallLimitMiddleware(thread_limit=5, telemetry=signals.telemetry),
    ]


COUNTS = (
    "thread_tool_call_count",
    "run_tool_call_count",
    "thread_model_call_count",
    "run_model_call_count",
)


async def test_the_drop_ins_state_keys(signals: Signals) -> None:
    """The same turns leave the same counts under the same state keys as three drop-ins do."""
    kept = []
    for middleware in (three_drop_ins(signals), [quota(signals, *three_limits())]):
        scene = Scene(signals, [["search", "calc"], ["search"], "done"], middleware)
        await scene.turn()
        state = scene.state()
        kept.append(({key: state.get(key) for key in COUNTS}, set(state)))
        assert state["thread_tool_call_count"] == {"__all__": 3, "search": 2}
        assert state["thread_model_call_count"] == 3

    assert kept[0] == kept[1]


@pytest.mark.parametrize("back", [False, True], ids=["to quota", "to drop-ins"])
async def test_swapping_on_a_running_thread(back: bool, signals: Signals) -> None:  # noqa: FBT001 - a parameter of the test
    """A thread goes on with its counts when drop-ins become one QuotaMiddleware, and back."""
    saver = InMemorySaver()
    stacks: list[list[Middleware]] = [three_drop_ins(signals), [quota(signals, *three_limits())]]
    if back:
        stacks.reverse()
    ran: list[str] = []
    first = Scene(signals, [["search", "calc"], "done"], stacks[0], ran=ran, checkpointer=saver)
    await first.turn()
    second = Scene(
        signals,
        [["search", "search", "search"], ["calc", "calc"], "done"],
        stacks[1],
        ran=ran,
        checkpointer=saver,
    )

    await second.turn()

    # Of three more searches two fit under search's 3, and then one calc under the 5 of all.
    assert sorted(ran) == ["calc", "calc", "search", "search", "search"]
    state = second.state()
    assert state["thread_tool_call_count"] == {"__all__": 5, "search": 3}
    assert state["thread_model_call_count"] == 5
    check_history(state["messages"])


@pytest.mark.parametrize("exit_behavior", ["end", "error"])
async def test_a_provider_that_fails_every_turn_is_stopped(
    exit_behavior: Any, signals: Signals
) -> None:
    """A model call that raises has been charged: the thread's limit stops a failing provider."""
    scene = scene_of(
        signals,
        [ProviderError("overloaded")] * 9,
        ModelCallLimit(thread_limit=3, exit_behavior=exit_behavior),
    )

    for turn in range(1, 4):
        with pytest.raises(ProviderError):
            await scene.turn()
        assert scene.state()["thread_model_call_count"] == turn
        scene.check()

    if exit_behavior == "end":
        assert last_text(await scene.turn()) == "Model call limits exceeded: thread limit (3/3)"
    else:
        with pytest.raises(ModelCallLimitExceededError):
            await scene.turn()
    assert len(scene.model.calls) == 3
    assert scene.metric("model", "allowed") == 3
    assert scene.metric("model", "blocked", "thread") == 1
    scene.check()


async def test_a_failed_run_that_goes_on(signals: Signals) -> None:
    """Going on with one failed run repeats the model's step under the charge of its first try."""
    scene = scene_of(signals, [ProviderError("overloaded"), "done"], ModelCallLimit(thread_limit=3))

    with pytest.raises(ProviderError):
        await scene.turn()
    await scene.go_on()

    assert len(scene.model.calls) == 2
    assert scene.state()["thread_model_call_count"] == 1
    assert scene.metric("model", "allowed") == 1
    scene.check(models=1, models_in_run=1)


class Watching(AgentMiddleware[Any, Any, Any]):
    """Reads the model's counts, of thread and run, where the model is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def _look(self, request: ModelRequest[Any]) -> None:
        state: Any = request.state
        self.seen.append((state["thread_model_call_count"], state["langchain_quota"]["run_model"]))

    def wrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        self._look(request)
        return handler(request)

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        self._look(request)
        return await handler(request)


async def test_a_charge_is_in_the_state_before_the_call(signals: Signals) -> None:
    """While the model is being called its call is counted, in the thread and in the run."""
    watching = Watching()
    scene = Scene(
        signals,
        [["search"], "done", ["search"], "done"],
        [quota(signals, ModelCallLimit(thread_limit=9)), watching],
    )

    await scene.turn()
    await scene.turn()

    assert watching.seen == [(1, 1), (2, 2), (3, 1), (4, 2)]
    scene.check()


async def test_calls_that_match_no_limit(signals: Signals) -> None:
    """Every call is seen: what matches no limit is `allowed` in the metrics and has a span."""
    scene = scene_of(signals, [["calc", "search"], "done"], ToolCallLimit("search", run_limit=0))

    await scene.turn()

    def calls(decision: str, **labels: str) -> float | None:
        return signals.value(
            "langchain_quota_calls_total", agent="unnamed", decision=decision, **labels
        )

    assert calls("allowed", kind="tool", tool="calc") == 1
    assert calls("blocked", kind="tool", tool="calc") == 0
    assert calls("blocked", kind="tool", tool="search") == 1
    assert calls("allowed", kind="model", tool="none") == 2
    spans = [
        (
            span.name,
            (span.attributes or {})["langchain_quota.decision"],
            (span.attributes or {})["langchain_quota.limits"],
        )
        for span in signals.spans()
    ]
    assert spans == [
        ("check_quota model", "allowed", ()),
        ("check_quota tool calc", "allowed", ()),
        ("check_quota tool search", "blocked", ("tool:search",)),
        ("check_quota model", "allowed", ()),
    ]
    scene.check()


def eight_limits() -> list[Limit]:
    return [
        ModelCallLimit(run_limit=90),
        ModelCallLimit(thread_limit=900, name="model of the thread"),
        *(ToolCallLimit(tool, run_limit=90) for tool in TOOLS),
        ToolCallLimit(["search", "calc"], run_limit=90),
        ToolCallLimit(thread_limit=900, exclude=["ask"]),
        ToolCallLimit(thread_limit=900),
    ]


@pytest.mark.parametrize("steps", [1, 2, 5])
async def test_supersteps(steps: int, signals: Signals) -> None:
    """Eight limits add two supersteps to each step of the agent, and one to the run."""
    script = [["search"]] * (steps - 1) + ["done"]
    counted = []
    for middleware in ([], [quota(signals, *eight_limits())]):
        scene = Scene(signals, script, middleware, tools=TOOLS)
        assert len(eight_limits()) == 8
        given: dict[str, Any] = {"messages": [("user", "hi")]}
        config: Any = {"configurable": {"thread_id": "thread-1"}}
        events = [each async for each in scene.agent.astream(given, config, stream_mode="debug")]
        supersteps = {event["step"] for event in events if event["type"] == "task"}
        # The checkpoints agree, but for those of the input.
        checkpoints = [
            each
            for each in scene.agent.get_state_history(config)
            if (each.metadata or {})["source"] == "loop" and (each.metadata or {})["step"] > 0
        ]
        assert len(checkpoints) == len(supersteps)
        counted.append(len(supersteps))

    bare, limited = counted
    assert limited == bare + 2 * steps + 1


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ([ToolCallLimit(run_limit=1), ToolCallLimit(thread_limit=2)], "'tool:*'"),
        ([ModelCallLimit(run_limit=1), ModelCallLimit(thread_limit=2)], "'model'"),
        (
            [ToolCallLimit("search", run_limit=1), ToolCallLimit(run_limit=2, name="tool:search")],
            "'tool:search'",
        ),
        (
            [
                ToolCallLimit("search", run_limit=3, name="loose"),
                ToolCallLimit("search", run_limit=2, name="tight"),
            ],
            "'loose' can never be reached: limit 'tight'",
        ),
    ],
    ids=["all tools", "model", "given name", "unreachable"],
)
def test_limits_that_cannot_stand_together(limits: list[Limit], named: str) -> None:
    """Limits with one name, or of which one can never be reached: an error that says which."""
    with pytest.raises(ValueError, match="limit") as raised:
        QuotaMiddleware(limits)

    assert named in str(raised.value)


@dataclass(frozen=True)
class Plan:
    """Limits, and the batches that the model asks for in each turn of one thread."""

    limits: list[Limit]
    turns: list[list[list[str]]]
    form: Form


counts = st.integers(0, 3)
turns = st.lists(
    st.lists(st.lists(st.sampled_from(TOOLS), min_size=1, max_size=4), min_size=1, max_size=2),
    min_size=1,
    max_size=2,
)
forms: st.SearchStrategy[Form] = st.sampled_from(["sync", "async"])


@st.composite
def overlapping(draw: st.DrawFn) -> Plan:
    """Refusals that let the run go on; by run, by thread, or both in a single run."""
    scopes = draw(
        st.sampled_from([("thread_limit",), ("run_limit",), ("thread_limit", "run_limit")])
    )
    names = draw(st.permutations([None, *TOOLS]))
    limits: list[Limit] = []
    for name in names[: draw(st.integers(2, 4))]:
        numbers = sorted((draw(counts) for _ in scopes), reverse=True)
        thresholds: Any = dict(zip(scopes, numbers, strict=True))
        limits.append(ToolCallLimit(name, **thresholds))
    asked = draw(turns)
    return Plan(limits, asked[:1] if len(scopes) > 1 else asked, draw(forms))


@st.composite
def disjoint(draw: st.DrawFn) -> Plan:
    """Limits of which no two match one call, with every exit behaviour and both scopes."""
    limits: list[Limit] = []
    for tool in draw(st.permutations(["model", *TOOLS]))[: draw(st.integers(2, 4))]:
        thread, run = sorted([draw(counts), draw(counts)], reverse=True)
        numbers: Any = {"thread_limit": thread, "run_limit": run}
        if draw(st.booleans()):
            del numbers[draw(st.sampled_from(sorted(numbers)))]
        if tool == "model":
            limits.append(ModelCallLimit(**numbers, exit_behavior=draw(st.sampled_from(EXITS[1:]))))
        else:
            exit_behavior: Any = draw(st.sampled_from(EXITS))
            limits.append(ToolCallLimit(tool, **numbers, exit_behavior=exit_behavior))
    return Plan(limits, draw(turns), draw(forms))


@dataclass
class Played:
    """What a plan came to."""

    ran: list[list[str]]
    """The tools that ran, in each turn."""
    state: dict[str, Any]
    requests: list[int]
    """The model calls of each turn."""


def stack_of(limits: Sequence[Limit], telemetry: Telemetry) -> list[Middleware]:
    stack: list[Middleware] = []
    for limit in limits:
        options: Any = {
            "thread_limit": limit.thread_limit,
            "run_limit": limit.run_limit,
            "exit_behavior": limit.exit_behavior,
            "telemetry": telemetry,
        }
        if limit.kind == "model":
            stack.append(ModelCallLimitMiddleware(**options))
        else:
            assert isinstance(limit, ToolCallLimit)
            name: Any = limit.tool_name
            stack.append(ToolCallLimitMiddleware(tool_name=name, **options))
    return stack


def play(plan: Plan, *, stacked: bool) -> Played:
    """Play a plan, and then a turn in which the model asks for nothing."""
    registry = CollectorRegistry()
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    telemetry = Telemetry(registry=registry, tracer_provider=provider, spans="off")
    signals = Signals(telemetry, registry, provider, exporter)
    batches: list[list[str]] = []

    def answer(_messages: Sequence[BaseMessage]) -> Any:
        return batches.pop(0) if batches else "done"

    middleware: list[Middleware] = (
        stack_of(plan.limits, telemetry) if stacked else [quota(signals, *plan.limits)]
    )
    scene = Scene(signals, answer, middleware, tools=TOOLS, form=plan.form)
    played = Played([], {}, [])
    for turn in [*plan.turns, []]:
        batches[:] = turn
        ran, requests = len(scene.ran), len(scene.model.calls)
        with suppress(ToolCallLimitExceededError, ModelCallLimitExceededError):
            asyncio.run(scene.turn())
        played.ran.append(sorted(scene.ran[ran:]))
        played.requests.append(len(scene.model.calls) - requests)
    scene.check()
    played.state = scene.state()
    return played


patient = examples(20)


@patient
@given(overlapping())
def test_a_stack_never_runs_more(plan: Plan) -> None:
    """Limits on overlapping tools that refuse: a stack of drop-ins runs as much or less."""
    together, stack = play(plan, stacked=False), play(plan, stacked=True)

    assert together.requests == stack.requests
    if plan.limits[0].thread_limit is None:
        for ours, theirs in zip(together.ran, stack.ran, strict=True):
            assert len(theirs) <= len(ours)
    assert sum(map(len, stack.ran)) <= sum(map(len, together.ran))


@patient
@given(disjoint())
def test_a_stack_agrees_where_no_call_matches_two_limits(plan: Plan) -> None:
    """Limits on different tools, with any exits: a stack of drop-ins does and counts the same."""
    together, stack = play(plan, stacked=False), play(plan, stacked=True)

    assert together.ran == stack.ran
    assert together.requests == stack.requests
    for limit in plan.limits:
        if limit.kind == "model":
            key = "thread_model_call_count"
            assert together.state[key] == stack.state[key]
        else:
            counts_of = [
                each.state.get("thread_tool_call_count", {}).get(limit.counter, 0)
                for each in (together, stack)
            ]
            assert counts_of[0] == counts_of[1]
