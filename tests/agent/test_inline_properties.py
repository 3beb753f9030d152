"""Random agents, threads and failures under InlineQuotaMiddleware.

1. A call over a limit does not run.
2. Thread and run counts equal the calls that were let through, and no call runs that was not.
3. Every tool call in the history has exactly one answer, behind the message that made it.
4. What the model is sent is a valid history at every turn, and a run ends with an answer.

The models leave out the ids of calls, repeat them, call tools that do not exist, fail, and are done
early. Runs are cut off.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.types import Command
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Decision,
    InlineQuotaMiddleware,
    ModelCallLimitExceededError,
    Outcome,
    Telemetry,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.limits import Limit
from langchain_quota.resolved import ResolvedLimit
from langchain_quota.testing import ScriptedChatModel
from tests.agent import test_properties as four_rules
from tests.agent import test_shared_properties as shared_quotas
from tests.agent.test_forms import Plan, plans, play, possible
from tests.agent.test_properties import WORLD, ProviderError, TurnPlan, Unknown, World
from tests.examples import examples
from tests.scene import CONFIG, check_history
from tests.signals import needs_inline

pytestmark = needs_inline

LIMIT_ERRORS = (ToolCallLimitExceededError, ModelCallLimitExceededError)
RAN = {Outcome.ALLOWED, Outcome.WOULD_BLOCK}


class CrashedError(Exception):
    """The process dies."""


class Crashing(AgentMiddleware[Any, Any, Any]):
    """Dies where the step has been written and before its tools run, when it is told to."""

    name = "Crashing"

    def __init__(self) -> None:
        super().__init__()
        self.crashes: list[bool] = []

    def after_model(self, state: Any, runtime: Any) -> None:
        if self.crashes and self.crashes.pop(0):
            raise CrashedError

    async def aafter_model(self, state: Any, runtime: Any) -> None:
        self.after_model(state, runtime)


Reviewing = Literal["none", "batched", "per call"]


@dataclass(frozen=True)
class Scenario:
    """Limits, and what happens on one thread.

    Attributes:
        limits: The limits.
        turns: What the model does, and what people do at interrupts.
        reviewing: Whether and how a person is asked.
        crashes: Whether the process dies behind the steps, one by one; the run then goes on.
        is_async: Which methods run.
    """

    limits: list[Limit]
    turns: list[TurnPlan]
    reviewing: Reviewing
    crashes: list[bool]
    is_async: bool


scenarios = st.builds(
    Scenario,
    limits=four_rules.limit_lists(stacked=False),
    turns=st.lists(four_rules.turn_plans, min_size=1, max_size=3),
    reviewing=st.sampled_from(["none", "batched", "per call"]),
    crashes=st.lists(st.booleans(), max_size=4),
    is_async=st.booleans(),
)


@dataclass
class Admitted:
    """What was let through, as an observer sees it."""

    decisions: list[Decision] = field(default_factory=list)
    in_run: int = 0
    """Where the decisions of the newest run begin."""

    def count(self, limit: Limit, *, run: bool) -> int:
        decided = self.decisions[self.in_run if run else 0 :]
        return sum(limit.matches(each.call) for each in decided if each.outcome in RAN)

    def ids(self) -> set[str | None]:
        return {each.call.id for each in self.decisions if each.outcome in RAN}


@examples(60)
@given(scenarios)
def test_four_rules(scenario: Scenario) -> None:
    """Under any limits, reviews, interrupts, failures and crashes the four rules hold."""
    possible(scenario.limits)
    asyncio.run(_play(scenario))


async def _play(scenario: Scenario) -> None:
    world, admitted, crashing = World(), Admitted(), Crashing()
    WORLD.set(world)
    crashing.crashes = list(scenario.crashes)
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, spans="off")
    quota: Any = InlineQuotaMiddleware(
        scenario.limits, on_decision=admitted.decisions.append, telemetry=telemetry
    )
    model = ScriptedChatModel(script=world.answer)
    agent: Any = create_agent(
        model,
        four_rules.REAL_TOOLS,
        middleware=[quota, crashing, *_review(scenario), Unknown(world.start)],
        checkpointer=InMemorySaver(),
    )

    for turn in [*scenario.turns, TurnPlan([], [])]:
        world.new_run(turn.answers)
        admitted.in_run = len(admitted.decisions)
        finished = await _run(agent, scenario, turn)
        _check_limits(scenario, world, admitted)
        if finished:
            _check_counts(scenario, world, admitted, agent.get_state(CONFIG))
            messages = agent.get_state(CONFIG).values["messages"]
            check_history(messages)
            assert messages[-1].type == "ai"

    for call in model.calls:
        check_history(call.messages)
    for limit in scenario.limits:
        _check_charges(limit, admitted, registry)


def _review(scenario: Scenario) -> list[Any]:
    if scenario.reviewing == "none":
        return []
    mode: Any = "per_call" if scenario.reviewing == "per call" else "batched"
    reviewed: Any = {four_rules.REVIEWED: {"allowed_decisions": ["approve", "reject", "respond"]}}
    return [HumanInTheLoopMiddleware(reviewed, interrupt_mode=mode)]


async def _run(agent: Any, scenario: Scenario, turn: TurnPlan) -> bool:
    """Whether the run came to its end."""
    people = list(turn.people)
    config: Any = CONFIG if turn.steps is None else CONFIG | {"recursion_limit": turn.steps}
    given: Any = {"messages": [("user", "go on")]}
    try:
        while True:
            try:
                if scenario.is_async:
                    result = await agent.ainvoke(given, config)
                else:
                    result = await asyncio.to_thread(agent.invoke, given, config)
            except CrashedError:
                given = None
                continue
            interrupts = result.get("__interrupt__", ())
            given = _answered(interrupts, people)
            if given is None:
                return not interrupts
    except (*LIMIT_ERRORS, ProviderError, GraphRecursionError):
        return False


def _answered(interrupts: Sequence[Any], people: list[str]) -> Command[Any] | None:
    answers: dict[str, Any] = {}
    for each in interrupts:
        action = people.pop(0) if people else "approve"
        if action == "abandon":
            return None
        # An edit makes one tool's call another's: a difference with a test of its own.
        kind = action if action in {"reject", "respond"} else "approve"
        review = {"type": kind} if kind == "approve" else {"type": kind, "message": "no"}
        if not isinstance(each.value, dict):
            answers[each.id] = action
        elif "action_requests" in each.value:
            answers[each.id] = {"decisions": [review for _ in each.value["action_requests"]]}
        else:
            answers[each.id] = review
    return Command(resume=answers) if interrupts else None


def _check_limits(scenario: Scenario, world: World, admitted: Admitted) -> None:
    """Rule 1, and that nothing runs which was not let through."""
    assert {call_id for _, call_id in world.started.values()} <= admitted.ids()
    for limit in scenario.limits:
        if limit.enforce:
            terms = ResolvedLimit.of(limit)
            if limit.kind == "model":
                # One that raised is not charged.
                in_thread, in_run = world.model_returned, world.model_returned_in_run
            else:
                in_thread = admitted.count(limit, run=False)
                in_run = admitted.count(limit, run=True)
            if terms.run_limit is not None:
                assert in_run <= terms.run_limit
            if limit.kind == "tool" and terms.thread_limit is not None:
                assert in_thread <= terms.thread_limit


def _check_counts(scenario: Scenario, world: World, admitted: Admitted, snapshot: Any) -> None:
    """Rule 2."""
    used = usage(snapshot)
    for limit in scenario.limits:
        if limit.kind == "tool":
            kept = used.tools.get(limit.counter, 0), used.run_tools.get(limit.counter, 0)
            counted = admitted.count(limit, run=False), admitted.count(limit, run=True)
            assert kept == counted
        else:
            assert used.run_model == world.model_returned_in_run


def _check_charges(limit: Limit, admitted: Admitted, registry: CollectorRegistry) -> None:
    """Rule 2, as the metrics tell it."""

    def decisions(decision: str) -> float:
        labels = {"agent": "unnamed", "limit": limit.name, "decision": decision, "scope": "none"}
        name = "langchain_quota_limit_decisions_total"
        return registry.get_sample_value(name, labels) or 0

    charged = [
        each
        for each in admitted.decisions
        if each.outcome in RAN
        and any(status.limit == limit.name and status.charged for status in each.limits)
    ]
    assert decisions("allowed") == len(charged)
    assert decisions("refunded") == 0


@examples(30)
@given(plans(failing=False))
def test_the_same_as_quota_middleware(plan: Plan) -> None:
    """What runs, the answers, the counts, metrics, spans and messages are QuotaMiddleware's."""
    assert play(plan, "inline", "async") == play(plan, "quota", "async")


@examples(12)
@given(shared_quotas.scenarios)
def test_a_shared_store(scenario: shared_quotas.Scenario) -> None:
    """Of any runs of any users on any threads, the store counts what ran; limits hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_quotas, "QuotaMiddleware", InlineQuotaMiddleware)
        asyncio.run(shared_quotas._play(scenario))
