"""The four rules, on random limits, batches, interrupts, reviews, failures and crashes, in agents.

1. A call over a limit does not run.
2. Thread and run counts equal the calls that were allowed and not taken back.
3. Every tool call in the history has exactly one answer, behind the message that made it.
4. What the model is sent is a valid history at every turn, and a run ends with an answer.

The models leave out the ids of calls, repeat them, call tools that do not exist, fail, and are done
early. Runs are cut off.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langgraph.errors import GraphRecursionError
from langgraph.types import Command

from langchain_quota import Decision, ToolCallLimitExceededError
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.testing import captured_decisions
from tests import drawn
from tests.drawn import Batch, TurnPlan, World
from tests.examples import examples
from tests.scene import Form, Kind, Scene, check_history
from tests.telemetry import needs_inline, telling

RAN = {Outcome.ALLOWED, Outcome.WOULD_BLOCK}


class CrashedError(Exception):
    """The process dies."""


class Crashing(AgentMiddleware[Any, Any, Any]):
    """Dies where the model's step has been written, and goes on, when it is told to."""

    def __init__(self, crashes: list[bool]) -> None:
        super().__init__()
        self.crashes = [*crashes]

    def after_model(self, state: Any, runtime: Any) -> None:
        if self.crashes and self.crashes.pop(0):
            raise CrashedError


@dataclass(frozen=True)
class Scenario:
    """What holds an agent to which limits, and what happens on one thread.

    With `crashes` the process dies behind some steps of the inline one; the run then goes on.
    """

    kind: Kind
    limits: list[Limit]
    turns: list[TurnPlan]
    reviewing: str
    crashes: list[bool]
    form: Form


turn_plans = st.builds(
    TurnPlan,
    answers=st.lists(drawn.answers(*drawn.TOOLS), min_size=1, max_size=3),
    people=st.lists(
        st.sampled_from(["approve", "approve", "reject", "respond", "edit", "abandon"]), max_size=6
    ),
    steps=st.one_of(st.none(), st.none(), st.none(), st.integers(2, 12)),
)


def scenarios(kind: Kind) -> st.SearchStrategy[Scenario]:
    inline = kind == "inline"
    return st.builds(
        Scenario,
        kind=st.just(kind),
        limits=drawn.limit_lists(stacked=kind == "drop-in"),
        turns=st.lists(turn_plans, min_size=1, max_size=3),
        reviewing=st.sampled_from(["none", "batched", "per_call" if inline else "none"]),
        crashes=st.lists(st.booleans(), max_size=4) if inline else st.just([]),
        form=st.sampled_from(["sync", "async"]),
    )


@pytest.mark.parametrize("kind", ["drop-in", "quota", pytest.param("inline", marks=needs_inline)])
@examples(70)
@given(data=st.data())
def test_four_rules(kind: Kind, data: st.DataObject) -> None:
    """Under any limits, reviews, interrupts, failures and crashes the four rules hold."""
    with captured_decisions() as decisions:
        asyncio.run(Play(data.draw(scenarios(kind)), decisions).play())


class Play:
    """A scenario that is played, and what it came to."""

    def __init__(self, scenario: Scenario, decisions: list[Decision]) -> None:
        self.scenario, self.decisions, self.in_run = scenario, decisions, 0
        self.kind, self.reviewing, self.world = scenario.kind, scenario.reviewing, World()
        drawn.WORLD.set(self.world)
        review: list[Any] = []
        if self.reviewing != "none":
            asked: Any = {"allowed_decisions": ["approve", "reject", "respond"]}
            inline: Any = {"interrupt_mode": self.reviewing} if self.kind == "inline" else {}
            reviewed = {drawn.REVIEWED: asked if inline else True}
            review = [HumanInTheLoopMiddleware(reviewed, **inline)]
        beside = [Crashing(scenario.crashes), *review, drawn.Unknown(self.world.start)]
        self.scene = Scene(
            telling(spans="off"),
            self.world.answer,
            [*scenario.limits, *beside],
            kind=self.kind,
            form=scenario.form,
            tools=drawn.REAL_TOOLS,
        )
        self.agent = self.scene.agent

    async def play(self) -> None:
        for turn in [*self.scenario.turns, TurnPlan([])]:
            self.world.new_run([self._fair(each) for each in turn.answers])
            self.in_run = len(self.decisions)
            finished = await self._run(turn)
            self._check_limits()
            if finished:
                self._check_counts()
                messages = self.scene.state()["messages"]
                check_history(messages)
                assert messages[-1].type == "ai"
        self.scene.check_requests()
        for limit in self.scenario.limits:
            self._check_charges(limit)

    async def _run(self, turn: TurnPlan) -> bool:
        """Whether the run came to its end."""
        people = list(turn.people)
        self.scene.agent = self.agent.with_config(recursion_limit=turn.steps or 1000)
        given: Any = {"messages": [("user", "go on")]}
        try:
            while True:
                try:
                    result = await self.scene.invoke(given)
                except CrashedError:
                    given = None
                    continue
                interrupts = result.get("__interrupt__", ())
                given = self._answered(interrupts, people)
                if given is None:
                    return not interrupts
        except drawn.RAISED as error:
            is_refused = isinstance(error, ToolCallLimitExceededError)
            self.world.edited_calls += turn.people.count("edit") * is_refused
        except GraphRecursionError:
            self.world.cut_off(self.scene.state()["messages"])
        return False

    def _fair(self, batch: Batch | None) -> Batch | None:
        """The batch, with an id for each call where LangChain needs one before a limit gives it."""
        gives = self.kind == "inline" or (self.kind == "quota" and self.reviewing == "none")
        if batch is None or gives:
            return batch
        return [
            each["name"] if isinstance(each, dict) and not each["id"] else each for each in batch
        ]

    def _answered(self, interrupts: Sequence[Any], people: list[str]) -> Command[Any] | None:
        answers: dict[str, Any] = {}
        for each in interrupts:
            action = people.pop(0) if people else "approve"
            if action == "abandon":
                return None
            review = self._review(action)
            if not isinstance(each.value, dict):
                answers[each.id] = action
            elif "action_requests" in each.value:
                answers[each.id] = {"decisions": [review for _ in each.value["action_requests"]]}
            else:
                answers[each.id] = review
        return Command(resume=answers) if interrupts else None

    def _review(self, action: str) -> dict[str, Any]:
        # Behind the inline one an edit makes one tool's call another's: that has its own test.
        if action == "edit" and self.kind != "inline":
            return {"type": "edit", "edited_action": {"name": "search", "args": {}}}
        if action in ("reject", "respond"):
            return {"type": action, "message": "no"}
        return {"type": "approve"}

    def _counted(self, limit: Limit) -> tuple[int, int]:
        """The calls that count for a limit, in the thread and in the run."""
        world = self.world
        if limit.kind == "model":
            # QuotaMiddleware counts a call that was allowed, the others one that has returned.
            failed = (world.failed, world.failed_in_run) if self.kind == "quota" else (0, 0)
            return world.returned + failed[0], world.returned_in_run + failed[1]
        if self.kind == "inline":
            # Its calls are reviewed when they have been counted.
            passed = [each.outcome in RAN and limit.matches(each.call) for each in self.decisions]
            return sum(passed), sum(passed[self.in_run :])
        names = [
            [name for name, _ in started.values()]
            for started in (world.started, world.started_in_run)
        ]
        thread, run = (sum(limit.matches(Call("tool", name)) for name in each) for each in names)
        return thread, run

    def _astray(self, limit: Limit) -> tuple[int, int]:
        """The fewest and the most calls that cut-off runs may have counted beyond those."""
        world, stacked = self.world, self.kind == "drop-in"
        if limit.kind == "model":
            return (0, world.cut_models) if self.kind == "quota" else (-world.cut_models, 0)
        if self.kind == "inline":
            return 0, 0
        # What stacked limits before the one that raised have charged for an edited call stays.
        return 0, world.cut_calls + (world.edited_calls if stacked else 0)

    def _check_limits(self) -> None:
        """Rule 1."""
        checks_tools = any(limit.kind == "tool" for limit in self.scenario.limits)
        if self.kind == "inline" and checks_tools:
            passed = {each.call.id for each in self.decisions if each.outcome in RAN}
            assert {call_id for _, call_id in self.world.started.values()} <= passed
        for limit in self.scenario.limits:
            if limit.enforce:
                in_thread, in_run = self._counted(limit)
                missed = -self._astray(limit)[0]
                # A model call of the inline one that raised is not charged, nor one that was cut.
                if isinstance(limit.thread_limit, int):
                    assert in_thread <= limit.thread_limit + missed
                if isinstance(limit.run_limit, int):
                    assert in_run <= limit.run_limit

    def _check_counts(self) -> None:
        """Rule 2."""
        used = self.scene.usage()
        for limit in self.scenario.limits:
            if limit.kind == "model":
                thread, run = used.model, used.run_model
            else:
                thread = used.tools.get(limit.counter, 0)
                run = used.run_tools.get(limit.counter, 0)
            in_thread, in_run = self._counted(limit)
            least, most = self._astray(limit)
            assert least <= thread - in_thread <= most
            assert run == in_run

    def _check_charges(self, limit: Limit) -> None:
        """Rule 2, as the metrics tell it: charged = allowed - refunded."""

        def decided(decision: str, *scopes: str) -> float:
            return sum(self.scene.metric(limit.name, decision, each) for each in scopes)

        counted = decided("allowed", "none") - decided("refunded", "none")
        if self.kind == "inline":
            charged = [
                each
                for each in self.decisions
                if each.outcome in RAN
                and any(status.limit == limit.name and status.charged for status in each.limits)
            ]
            assert counted == len(charged)
            assert decided("refunded", "none") == 0
            return
        ran, _ = self._counted(limit)
        least, most = self._astray(limit)
        if limit.enforce:
            assert least <= counted - ran <= most
        else:
            # What it would have blocked ran all the same, unless another limit refused it.
            blocked = decided("would_block", "thread", "run")
            assert counted <= ran + most
            assert ran + least <= counted + blocked
