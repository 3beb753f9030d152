"""The four rules, on random limiters, batches, interrupts, reviews and failures, in real agents.

1. A call over a limit does not run.
2. Thread and run counts equal the calls that were let through and not taken back.
3. Every tool call in the history has exactly one answer, behind the message that made it.
4. What the model is sent is a valid history at every turn.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Call,
    ModelCallLimit,
    ModelCallLimitExceededError,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit, Terms
from langchain_quota.testing import ScriptedChatModel

TOOLS = ("search", "calc", "ask")
REVIEWED = "calc"


class ProviderError(Exception):
    """The model's provider fails."""


@dataclass(frozen=True)
class TurnPlan:
    """What the model does in a turn, and what people do at its interrupts.

    Attributes:
        answers: A batch of tool names for each model call; `None` for a provider that fails.
        people: What is done at each interrupt, in turn; `"abandon"` begins the next turn instead.
    """

    answers: list[list[str] | None]
    people: list[str]


@dataclass(frozen=True)
class Scenario:
    """Limits, as a stack of drop-ins or in one QuotaMiddleware, and the turns of one thread."""

    limits: list[Limit]
    stacked: bool
    turns: list[TurnPlan]
    reviewed: bool
    is_async: bool


@dataclass
class World:
    """What really happened."""

    started: dict[str, str] = field(default_factory=dict)
    """Tool call id -> the tool that started."""
    started_in_run: dict[str, str] = field(default_factory=dict)
    model_returned: int = 0
    model_returned_in_run: int = 0
    failed: int = 0
    failed_in_run: int = 0
    queue: list[list[str] | None] = field(default_factory=list)

    def new_run(self, answers: list[list[str] | None]) -> None:
        self.queue = list(answers)
        self.started_in_run = {}
        self.model_returned_in_run = 0
        self.failed_in_run = 0

    def start(self, name: str, call_id: str) -> None:
        self.started[call_id] = name
        self.started_in_run[call_id] = name

    def answer(self, _messages: Sequence[BaseMessage]) -> Any:
        batch = self.queue.pop(0) if self.queue else []
        if batch is None:
            self.failed += 1
            self.failed_in_run += 1
            return ProviderError("overloaded")
        self.model_returned += 1
        self.model_returned_in_run += 1
        return list(batch) or "done"


@st.composite
def limit_lists(draw: st.DrawFn, *, stacked: bool) -> list[Limit]:
    limits: list[Limit] = []
    for index in range(draw(st.integers(1, 3 if stacked else 5))):
        target = draw(st.sampled_from(["search", "calc", "ask", None, None, "model"]))
        thread, run = draw(st.tuples(st.integers(0, 5), st.integers(0, 4)))
        options: Any = {"name": f"limit-{index}"}
        scopes = draw(st.sampled_from(["thread", "run", "both"]))
        options["thread_limit"] = None if scopes == "run" else thread
        options["run_limit"] = None if scopes == "thread" else min(run, thread)
        if not stacked:
            options["enforce"] = draw(st.sampled_from([True, True, True, False]))
        enforced = options.get("enforce", True)
        if target == "model":
            exits = ["end", "error"] if stacked or not enforced else ["end", "error", "finalize"]
            limits.append(ModelCallLimit(exit_behavior=draw(st.sampled_from(exits)), **options))
            continue
        options["exit_behavior"] = draw(st.sampled_from(["continue", "continue", "end", "error"]))
        tools: Any = target
        if not stacked:
            if enforced and options["exit_behavior"] == "continue":
                options["give_up_after"] = draw(st.sampled_from([None, None, 1, 3]))
            if target == "ask":
                tools = ["ask", "search"]
            elif target is None:
                options["exclude"] = draw(st.sampled_from([(), ("calc",)]))
        limits.append(ToolCallLimit(tools, **options))
    return limits


turn_plans = st.builds(
    TurnPlan,
    answers=st.lists(
        st.one_of(
            st.lists(st.sampled_from(TOOLS), min_size=1, max_size=4),
            st.lists(st.sampled_from(TOOLS), min_size=1, max_size=4),
            st.none(),
        ),
        max_size=4,
    ),
    people=st.lists(
        st.sampled_from(["approve", "approve", "reject", "respond", "edit", "abandon"]),
        max_size=6,
    ),
)


def scenarios(*, stacked: bool) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        limits=limit_lists(stacked=stacked),
        stacked=st.just(stacked),
        turns=st.lists(turn_plans, min_size=1, max_size=3),
        reviewed=st.booleans(),
        is_async=st.booleans(),
    )


PATIENT = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@PATIENT
@given(scenarios(stacked=True))
def test_four_rules_of_a_stack(scenario: Scenario) -> None:
    """Drop-ins in any order: counts equal what ran, and every history is valid."""
    asyncio.run(_play(scenario))


@PATIENT
@given(scenarios(stacked=False))
def test_four_rules_of_a_quota(scenario: Scenario) -> None:
    """QuotaMiddleware with any limits: counts equal what ran, and every history is valid."""
    asyncio.run(_play(scenario))


async def _play(scenario: Scenario) -> None:
    world = World()
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, spans="off")
    model = ScriptedChatModel(script=world.answer)
    limiters = _limiters(scenario, telemetry)
    review: list[Any] = (
        [HumanInTheLoopMiddleware(interrupt_on={REVIEWED: True})] if scenario.reviewed else []
    )
    agent: Any = create_agent(
        model, _tools(world), middleware=[*limiters, *review], checkpointer=InMemorySaver()
    )
    config = {"configurable": {"thread_id": "thread"}}

    for turn in [*scenario.turns, TurnPlan([], [])]:
        world.new_run(turn.answers)
        people = list(turn.people)
        graph_input: Any = {"messages": [("user", "go on")]}
        try:
            while graph_input is not None:
                if scenario.is_async:
                    result = await agent.ainvoke(graph_input, config)
                else:
                    result = await asyncio.to_thread(agent.invoke, graph_input, config)
                graph_input = _resume(result.get("__interrupt__", ()), people)
            finished = not result.get("__interrupt__")
        except (ToolCallLimitExceededError, ModelCallLimitExceededError, ProviderError):
            finished = False
        _check_limits(scenario, world)
        if finished:
            _check_counts(scenario, world, agent.get_state(config).values)
            _check_history(agent.get_state(config).values["messages"])

    for call in model.calls:
        _check_history(call.messages)
    for limit in scenario.limits:
        _check_charges(scenario, limit, world, registry)


def _limiters(scenario: Scenario, telemetry: Telemetry) -> list[Any]:
    if not scenario.stacked:
        try:
            return [QuotaMiddleware(scenario.limits, telemetry=telemetry)]
        except ValueError as error:
            if "can never be reached" not in str(error):
                raise
            reject()
    return [_drop_in(limit, telemetry) for limit in scenario.limits]


def _drop_in(limit: Limit, telemetry: Telemetry) -> Any:
    options: Any = {
        "thread_limit": limit.thread_limit,
        "run_limit": limit.run_limit,
        "exit_behavior": limit.exit_behavior,
        "limit_name": limit.name,
        "telemetry": telemetry,
    }
    if isinstance(limit, ModelCallLimit):
        return ModelCallLimitMiddleware(**options)
    tool_name: Any = limit.tool_name
    return ToolCallLimitMiddleware(tool_name=tool_name, **options)


def _tools(world: World) -> list[Any]:
    @tool
    def search(call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Search."""
        world.start("search", call_id)
        return "found"

    @tool
    async def calc(call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Calculate."""
        world.start("calc", call_id)
        return "42"

    @tool
    def ask(call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Ask a human."""
        world.start("ask", call_id)
        return str(interrupt("what?"))

    def calc_now(call_id: Annotated[str, InjectedToolCallId]) -> str:
        world.start("calc", call_id)
        return "42"

    calc.func = calc_now
    return [search, calc, ask]


def _resume(interrupts: Sequence[Any], people: list[str]) -> Command[Any] | None:
    if not interrupts:
        return None
    answers: dict[str, Any] = {}
    for each in interrupts:
        action = people.pop(0) if people else "approve"
        if action == "abandon":
            return None
        if isinstance(each.value, dict):
            requests = each.value["action_requests"]
            answers[each.id] = {"decisions": [_review(action) for _ in requests]}
        else:
            answers[each.id] = action
    return Command(resume=answers)


def _review(action: str) -> dict[str, Any]:
    match action:
        case "edit":
            return {"type": "edit", "edited_action": {"name": "search", "args": {}}}
        case "reject" | "respond":
            return {"type": action, "message": "no"}
    return {"type": "approve"}


def _ran(scenario: Scenario, limit: Limit, world: World) -> tuple[int, int]:
    """The calls that count for a limit, in the thread and in the run."""
    if limit.kind == "model":
        # A drop-in counts a call that has returned, QuotaMiddleware one that was let through.
        failed = (0, 0) if scenario.stacked else (world.failed, world.failed_in_run)
        return world.model_returned + failed[0], world.model_returned_in_run + failed[1]
    return _matching(limit, world.started), _matching(limit, world.started_in_run)


def _matching(limit: Limit, started: dict[str, str]) -> int:
    return sum(limit.matches(Call("tool", name)) for name in started.values())


def _check_limits(scenario: Scenario, world: World) -> None:
    """Rule 1."""
    for limit in scenario.limits:
        if limit.enforce:
            in_thread, in_run = _ran(scenario, limit, world)
            terms = Terms.of(limit)
            assert terms.thread_limit is None or in_thread <= terms.thread_limit
            assert terms.run_limit is None or in_run <= terms.run_limit


def _check_counts(scenario: Scenario, world: World, state: dict[str, Any]) -> None:
    """Rule 2."""
    ledger = state["langchain_quota"]
    for limit in scenario.limits:
        if limit.kind == "model":
            kept = state.get("thread_model_call_count", 0), ledger["run_model"]
        else:
            thread = state.get("thread_tool_call_count", {})
            kept = thread.get(limit.counter, 0), ledger["run_tools"].get(limit.counter, 0)
        assert kept == _ran(scenario, limit, world)


def _check_charges(
    scenario: Scenario, limit: Limit, world: World, registry: CollectorRegistry
) -> None:
    """Rule 2, as the metrics tell it: charged = allowed - refunded."""

    def decisions(decision: str, *scopes: str) -> float:
        labels = {"agent": "unnamed", "limit": limit.name, "decision": decision}
        name = "langchain_quota_limit_decisions_total"
        return sum(
            registry.get_sample_value(name, {**labels, "scope": scope}) or 0 for scope in scopes
        )

    counted = decisions("allowed", "none") - decisions("refunded", "none")
    ran, _ = _ran(scenario, limit, world)
    if limit.enforce:
        assert counted == ran
    else:
        # What it would have blocked ran all the same, unless another limit refused it.
        assert counted <= ran <= counted + decisions("would_block", "thread", "run")


def _check_history(messages: Sequence[AnyMessage | BaseMessage]) -> None:
    """Rules 3 and 4."""
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        assert not isinstance(message, ToolMessage), "an answer without a call"
        if not isinstance(message, AIMessage):
            continue
        answers = Counter[str]()
        while index < len(messages) and isinstance(each := messages[index], ToolMessage):
            answers[each.tool_call_id] += 1
            index += 1
        assert answers == Counter(str(call["id"]) for call in message.tool_calls)
