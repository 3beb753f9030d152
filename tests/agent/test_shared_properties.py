"""Random runs of users on threads of two agents with one store, against what really ran.

1. An enforced limit is never exceeded, unless calls were allowed while the store was down.
2. The store's counts equal what ran, for each tool, subject and window, and in each run.
3. The metrics, charged - refunded, equal what ran.
4. Whatever the model was sent is a valid history.

The models leave out the ids of calls, repeat them, call tools that do not exist, and fail.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import (
    Call,
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    ToolCallLimitExceededError,
    ToolCallLimitMiddleware,
)
from langchain_quota.limits import Limit, check_together
from langchain_quota.quotas import Quota
from langchain_quota.stores.keys import CountKey, dimension_of
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.testing import ScriptedChatModel
from tests.agent.test_properties import Batch, ProviderError, Unknown, answers
from tests.examples import examples
from tests.scene import check_history
from tests.stores import Clock, FickleStore

TOOLS = ("search", "calc")
AGENTS = ("first", "second")
USERS = ("ann", "bob")
THREADS = ("one", "two", "three")
WINDOW = timedelta(minutes=1)
SETTLES = ToolCallLimit(name="settles", quotas=[Quota(999, per="global")])
"""Every batch of tool calls asks the store."""


@dataclass(frozen=True)
class RunPlan:
    """One run.

    Attributes:
        agent, user, thread: Who makes it, for whom, where.
        batches: The tool calls that the model makes; `None` for a provider that fails.
        passes: How many seconds pass before it.
        down: Whether the store is down.
    """

    agent: str
    user: str
    thread: str
    batches: list[Batch | None]
    passes: float
    down: bool


@dataclass(frozen=True)
class Scenario:
    """Limits of two agents with one store, and the runs.

    Attributes:
        limits: The limits, the same for both.
        drop_in: Whether a drop-in limiter stands beside, in front of or behind.
        on_store_error: What becomes of calls while the store is down.
        hears: Whether the store hears of what it does not answer.
        runs: The runs.
        is_async: Which hooks run.
    """

    limits: list[Limit]
    drop_in: str
    on_store_error: Any
    hears: bool
    runs: list[RunPlan]
    is_async: bool


@dataclass(frozen=True)
class Ran:
    """A call that ran."""

    kind: str
    tool: str | None
    agent: str
    user: str
    thread: str
    run: int
    time: float


@dataclass
class World:
    """What really happened."""

    ran: list[Ran] = field(default_factory=list)
    current: RunPlan | None = None
    clock: Clock = field(default_factory=Clock)
    queue: list[Batch | None] = field(default_factory=list)
    runs: int = 0

    def record(self, kind: str, tool: str | None) -> None:
        now = self.current
        assert now is not None
        self.ran.append(Ran(kind, tool, now.agent, now.user, now.thread, self.runs, self.clock.now))

    def answer(self, _: Sequence[BaseMessage]) -> Any:
        self.record("model", None)
        batch = self.queue.pop(0) if self.queue else []
        return ProviderError("overloaded") if batch is None else list(batch) or "done"

    def start(self, name: str, *_: Any) -> None:
        self.record("tool", name)


SUBJECTS: dict[str, Any] = {
    "user_id": lambda ran: ran.user,
    "thread": lambda ran: ran.thread,
    "agent": lambda ran: ran.agent,
    "global": lambda ran: "",
    "run": lambda ran: str(ran.run),
}
PERS = sorted(SUBJECTS.keys() - {"run"})
"""What a quota may be per."""


@st.composite
def quota_lists(draw: st.DrawFn) -> list[Quota]:
    pers = draw(st.lists(st.sampled_from(PERS), max_size=3, unique=True))
    return [
        Quota(draw(st.integers(0, 4)), per=per, window=draw(st.sampled_from([None, WINDOW])))
        for per in pers
    ]


@st.composite
def limit_lists(draw: st.DrawFn) -> list[Limit]:
    limits: list[Limit] = []
    for index in range(draw(st.integers(1, 4))):
        target: Any = draw(st.sampled_from(["search", "calc", None, ["calc", "search"], "model"]))
        quotas = draw(quota_lists())
        options: Any = {
            "name": f"limit-{index}",
            "quotas": quotas,
            "enforce": draw(st.sampled_from([True, True, True, False])),
        }
        if "thread" not in {each.per for each in quotas}:
            options["thread_limit"] = draw(st.one_of(st.none(), st.integers(0, 4)))
        if not quotas and options.get("thread_limit") is None:
            options["run_limit"] = draw(st.integers(0, 4))
        elif options.get("thread_limit") is None:
            options["run_limit"] = draw(st.sampled_from([None, None, 1, 3]))
        if target == "model":
            exits = ["end", "error", *(["finalize"] if options["enforce"] else [])]
            limits.append(ModelCallLimit(exit_behavior=draw(st.sampled_from(exits)), **options))
            continue
        exit_behavior: Any = draw(st.sampled_from(["continue", "continue", "end", "error"]))
        if exit_behavior == "continue" and options["enforce"]:
            options["give_up_after"] = draw(st.sampled_from([None, None, 2]))
        limits.append(ToolCallLimit(target, exit_behavior=exit_behavior, **options))
    return limits


runs = st.builds(
    RunPlan,
    agent=st.sampled_from(AGENTS),
    user=st.sampled_from(USERS),
    thread=st.sampled_from(THREADS),
    batches=st.lists(answers(*TOOLS), min_size=1, max_size=2),
    passes=st.sampled_from([0, 0, 0, 20, 60, -20]),
    down=st.sampled_from([False, False, False, True]),
)

scenarios = st.builds(
    Scenario,
    limits=limit_lists(),
    drop_in=st.sampled_from(["none", "none", "first", "last"]),
    on_store_error=st.sampled_from(["deny", "allow"]),
    hears=st.booleans(),
    runs=st.lists(runs, min_size=2, max_size=6),
    is_async=st.booleans(),
)


@examples(25)
@given(scenarios)
def test_shared_quotas(scenario: Scenario) -> None:
    """Of any runs of any users on any threads, the store counts what ran; limits hold."""
    asyncio.run(_play(scenario))


async def _play(scenario: Scenario) -> None:
    world = World()
    store = FickleStore(MemoryStore(clock=world.clock))
    store.hears = scenario.hears
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry, spans="off")
    models = {name: ScriptedChatModel(script=world.answer) for name in AGENTS}
    agents: dict[str, Any] = {
        name: create_agent(
            models[name],
            tools=[_tool(tool, world) for tool in TOOLS],
            middleware=[
                *_limiters(scenario, store, telemetry, world.clock),
                Unknown(world.start),
            ],
            checkpointer=InMemorySaver(),
            name=name,
        )
        for name in AGENTS
    }

    for run in scenario.runs:
        await _run(scenario, run, agents, store, world)
    if not any(each.down for each in scenario.runs):
        _check_limits(scenario, world)
    # Every thread of both agents asks the store once more: pending refunds are made.
    for agent in AGENTS:
        for thread in THREADS:
            last = RunPlan(agent, "ann", thread, [list(TOOLS)], 0, down=False)
            await _run(scenario, last, agents, store, world)

    _check_counts(scenario, world, store)
    for limit in scenario.limits:
        if limit.enforce:
            assert _charged(registry, limit) == sum(_matches(limit, each) for each in world.ran)
    for model in models.values():
        for call in model.calls:
            check_history(call.messages)


async def _run(
    scenario: Scenario, run: RunPlan, agents: dict[str, Any], store: FickleStore, world: World
) -> None:
    world.current = run
    world.runs += 1
    world.queue = list(run.batches)
    world.clock.now += run.passes
    store.down = run.down
    given: Any = {"messages": [("user", "go on")]}
    config: Any = {"configurable": {"thread_id": run.thread}}
    context = {"user_id": run.user}
    try:
        if scenario.is_async:
            await agents[run.agent].ainvoke(given, config, context=context)
        else:
            agents[run.agent].invoke(given, config, context=context)
    except (ToolCallLimitExceededError, ModelCallLimitExceededError, ProviderError):
        pass


def _tool(name: str, world: World) -> BaseTool:
    def run() -> str:
        world.record("tool", name)
        return "ran"

    async def arun() -> str:
        return run()

    return StructuredTool.from_function(run, arun, name=name, description=name)


def _limiters(scenario: Scenario, store: Any, telemetry: Telemetry, clock: Clock) -> list[Any]:
    limits = [*scenario.limits, SETTLES]
    try:
        check_together(limits)
    except ValueError:
        reject()  # a limit that can never be reached
    quota: Any = QuotaMiddleware(
        limits, store=store, on_store_error=scenario.on_store_error, telemetry=telemetry
    )
    quota._clock = clock
    drop_in: Any = ToolCallLimitMiddleware(
        tool_name="search", run_limit=1, limit_name="drop-in", telemetry=telemetry
    )
    return {"none": [quota], "first": [drop_in, quota], "last": [quota, drop_in]}[scenario.drop_in]


def _matches(limit: Limit, ran: Ran) -> bool:
    return limit.matches(Call("model") if ran.kind == "model" else Call("tool", ran.tool))


def _own(limit: Limit) -> dict[str, Any]:
    """The limit's own numbers, by scope."""
    return {"thread": limit.thread_limit, "run": limit.run_limit}


def _expected(scenario: Scenario, world: World) -> Counter[str]:
    """What ran, by the store's keys."""
    found: Counter[str] = Counter()
    dimensions = {
        (limit.counter, quota.dimension, quota.window): limit
        for limit in [*scenario.limits, SETTLES]
        for quota in limit.quotas
    }
    dimensions |= {
        (limit.counter, scope, None): limit
        for limit in scenario.limits
        for scope, number in _own(limit).items()
        if number is not None
    }
    for (counter, dimension, window), limit in dimensions.items():
        for ran in world.ran:
            if _matches(limit, ran):
                subject = SUBJECTS[dimension](ran)
                found[str(CountKey.at(counter, dimension, subject, window, ran.time))] += 1
    return found


def _check_limits(scenario: Scenario, world: World) -> None:
    """Rule 1."""
    counts = _expected(scenario, world)
    for limit in scenario.limits:
        thresholds = [(quota.dimension, quota.window, quota.limit) for quota in limit.quotas]
        thresholds += [
            (scope, None, number) for scope, number in _own(limit).items() if number is not None
        ]
        for dimension, window, number in thresholds:
            for ran in world.ran if limit.enforce else ():
                subject = SUBJECTS[dimension](ran)
                key = CountKey.at(limit.counter, dimension, subject, window, ran.time)
                assert isinstance(number, int)
                assert counts[str(key)] <= number, (limit.name, str(key))


def _check_counts(scenario: Scenario, world: World, store: FickleStore) -> None:
    """Rule 2."""
    assert nameless_counts(store) == _nameless(_expected(scenario, world))


def nameless_counts(store: FickleStore) -> list[tuple[str, int]]:
    """What a store counts, by key; those of runs do not say which."""
    return _nameless({each.key: each.used for each in store.usages() if each.used})


def _nameless(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Counts by key, in which those of runs do not say which."""
    return sorted(
        (key.rpartition(":")[0] if dimension_of(key) == "run" else key, used)
        for key, used in counts.items()
    )


def _charged(registry: CollectorRegistry, limit: Limit) -> float:
    """Rule 3: charged, less refunded."""

    def total(decision: str) -> float:
        name = "langchain_quota_limit_decisions_total"
        labels = {"limit": limit.name, "decision": decision, "scope": "none"}
        return sum(
            registry.get_sample_value(name, {**labels, "agent": agent}) or 0 for agent in AGENTS
        )

    return total("allowed") - total("refunded")
