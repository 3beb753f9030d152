"""The four rules, on random limits, batches, interrupts, reviews, failures and crashes, in agents.

1. A call over a limit does not run.
2. Thread and run counts equal the calls that were allowed and not taken back.
3. Every tool call in the history has exactly one answer, behind the message that made it.
4. What the model is sent is a valid history at every turn, and a run ends with an answer.

The models leave out the ids of calls, repeat them, call tools that do not exist, fail, and are done
early. Runs are cut off. Of users on threads of two agents, a store that may be down counts all.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langgraph.errors import GraphRecursionError
from langgraph.types import Command

from langchain_quota import Decision, MemoryStore, Quota, ToolCallLimit, ToolCallLimitExceededError
from langchain_quota.core.decision import Outcome
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from langchain_quota.testing import captured_decisions
from tests import drawn
from tests.drawn import Batch, TurnPlan, World
from tests.examples import examples
from tests.scene import Form, Kind, Scene, check_history, recording, tool_limiter
from tests.stores import Clock, FickleStore
from tests.telemetry import HAS_INLINE, Signals, needs_inline, telling
from tests.tokens import ProviderError

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
        gives = self.kind == "quota" and self.reviewing == "none"
        # A middleware without a limit on tools has no node behind the model.
        gives = gives and any(limit.kind == "tool" for limit in self.scenario.limits)
        if batch is None or gives or self.kind == "inline":
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


AGENTS = ("first", "second")
THREADS = ("one", "two", "three")
SETTLES = ToolCallLimit(name="settles", quotas=[Quota(999, per="global")])
"""Every batch of tool calls asks the store."""


@dataclass(frozen=True)
class Run:
    """One run: where, by whom, the batches that the model asks for, and what happens meanwhile.

    `None` in the place of a batch is a provider that fails; `passes` are seconds before the run.
    """

    agent: str
    user: str
    thread: str
    batches: list[Any]
    passes: float
    down: bool


class Ran(NamedTuple):
    """A call that ran."""

    call: Call
    run: Run
    number: int
    time: float


@dataclass
class Reality:
    """What really happened."""

    ran: list[Ran] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    queue: list[Any] = field(default_factory=list)

    def record(self, call: Call) -> None:
        self.ran.append(Ran(call, self.runs[-1], len(self.runs), self.clock.now))

    def answer(self, _: object) -> Any:
        self.record(Call("model"))
        batch = self.queue.pop(0) if self.queue else []
        return ProviderError("overloaded") if batch is None else list(batch) or "done"

    async def play(self, scene: Scene, run: Run, store: FickleStore) -> None:
        self.runs.append(run)
        self.queue = list(run.batches)
        self.clock.now += run.passes
        store.down = run.down
        with suppress(*drawn.RAISED):
            await scene.play(context={"user_id": run.user}, thread_id=run.thread)


SUBJECTS: dict[str, Any] = {
    "user_id": lambda ran: ran.run.user,
    "thread": lambda ran: ran.run.thread,
    "agent": lambda ran: ran.run.agent,
    "global": lambda ran: "",
    "run": lambda ran: str(ran.number),
}


plain = st.sampled_from(drawn.TOOLS)
batches = st.lists(st.one_of(plain, plain, drawn.odd_calls(*drawn.TOOLS)), max_size=4)
runs = st.builds(
    Run,
    agent=st.sampled_from(AGENTS),
    user=st.sampled_from(("ann", "bob")),
    thread=st.sampled_from(THREADS),
    batches=st.lists(st.one_of(*[batches] * 5, st.none()), min_size=1, max_size=2),
    passes=st.sampled_from([0, 0, 0, 20, 60, -20]),
    down=st.sampled_from([False, False, False, True]),
)


@examples(120)
@given(
    limits=drawn.limit_lists(stored=True),
    drop_in=st.sampled_from(["none", "none", "first", "last"]),
    exits=st.sampled_from(["continue", "end"]),
    outage=st.sampled_from(["block", "allow"]),
    hears=st.booleans(),
    planned=st.lists(runs, min_size=2, max_size=6),
    form=st.sampled_from(["sync", "async"]),
    kind=st.sampled_from(["quota", "quota", "inline"] if HAS_INLINE else ["quota"]),
)
def test_shared_quotas(
    limits: list[Limit],
    drop_in: str,
    exits: Any,
    outage: Any,
    *,
    hears: bool,
    planned: list[Run],
    form: Form,
    kind: Kind,
) -> None:
    """Of any runs of any users on any threads, the store counts what ran; limits hold."""
    drawn.possible([*limits, SETTLES])
    world, signals = Reality(), telling(spans="off", subject_label={"user_id": str})
    store = FickleStore(MemoryStore(clock=world.clock))
    store.hears = hears
    options: Any = {"run_limit": 1, "limit_name": "drop-in", "exit_behavior": exits}
    beside: list[Any] = [tool_limiter(signals, "search", **options)]
    tools = [recording(name, [], partial(world.record, Call("tool", name))) for name in drawn.TOOLS]
    made = {
        name: Scene(
            signals,
            world.answer,
            [*beside * (drop_in == "first"), *limits, SETTLES, *beside * (drop_in == "last")],
            form=form,
            kind=kind,
            name=name,
            store=store,
            on_store_error=outage,
            tools=tools,
        )
        for name in AGENTS
    }
    # In the end every thread of both agents asks the store: pending refunds are made.
    pairs = product(AGENTS, THREADS)
    last = [Run(agent, "ann", thread, [[*drawn.TOOLS]], 0, down=False) for agent, thread in pairs]

    async def play() -> None:
        for run in planned:
            await world.play(made[run.agent], run, store)
        if not any(each.down for each in planned):
            check_limits(limits, world)
        for run in last:
            await world.play(made[run.agent], run, store)

    asyncio.run(play())
    found = {each.key: each.used for each in store.usages() if each.used}
    assert nameless(found) == nameless(expected([*limits, SETTLES], world))
    for limit in limits:
        if limit.enforce:
            ran = sum(limit.matches(each.call) for each in world.ran)
            assert charged(signals, limit) == ran, limit.name
    assert of_quotas(signals, "subject_blocked_total") == of_quotas(
        signals, "limit_decisions_total", decision="blocked"
    )
    for scene in made.values():
        scene.check_requests()


def thresholds(limit: Limit) -> Iterator[tuple[str, Any, Any]]:
    """What a limit counts by, in which window, and how much of it is admitted."""
    for quota in limit.quotas:
        yield quota.dimension, quota.period, quota.limit
    for scope, number in (("thread", limit.thread_limit), ("run", limit.run_limit)):
        if number is not None:
            yield scope, None, number


def key_of(limit: Limit, dimension: str, window: Any, ran: Ran) -> str:
    minute = f":60:{int(ran.time // 60)}" if window else ""
    return f"{limit.counter}:{dimension}:{SUBJECTS[dimension](ran)}{minute}"


def expected(limits: list[Limit], world: Reality) -> Counter[str]:
    """What ran, by the store's keys."""
    found: Counter[str] = Counter()
    rows = {(each.counter, *row[:2]): each for each in limits for row in thresholds(each)}
    for (_, dimension, window), limit in rows.items():
        found.update(
            key_of(limit, dimension, window, each) for each in world.ran if limit.matches(each.call)
        )
    return found


def check_limits(limits: list[Limit], world: Reality) -> None:
    """Rule 1."""
    found = expected(limits, world)
    for limit in limits:
        for dimension, window, number in thresholds(limit) if limit.enforce else ():
            for each in world.ran:
                assert found[key_of(limit, dimension, window, each)] <= number, limit.name


def nameless(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Counts by key, in which those of runs do not say which."""
    return sorted(
        (key.rpartition(":")[0] if ":run:" in key else key, used) for key, used in counts.items()
    )


def of_quotas(signals: Signals, name: str, **labels: str) -> Counter[tuple[str, ...]]:
    """Rule 3: refusals by agent, limit and scope, at the quotas of others than threads."""
    found: Counter[tuple[str, ...]] = Counter()
    for of, value in signals.samples(f"langchain_quota_{name}", **labels).items():
        if of[2] in ("user_id", "agent", "global"):
            found[of[:3]] += int(value)
    return +found


def charged(signals: Signals, limit: Limit) -> float:
    """Rule 3: charged, less refunded."""

    def total(decision: str) -> float:
        name = "langchain_quota_limit_decisions_total"
        found = signals.samples(name, limit=limit.name, decision=decision, scope="none")
        return sum(found.values())

    return total("allowed") - total("refunded")
