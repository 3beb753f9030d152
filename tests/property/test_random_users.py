"""Random runs of users on threads of two agents with one store, against what really ran.

1. An enforced limit is never exceeded, unless calls were allowed while the store was down.
2. The store's counts equal what ran, for each tool, subject and window, and in each run.
3. The metrics, charged - refunded, equal what ran; refusals by subject add up to the limit's.
4. Whatever the model was sent is a valid history.

The models leave out the ids of calls, repeat them, and fail.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import MemoryStore, Quota, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call
from tests import drawn
from tests.examples import examples
from tests.scene import Form, Kind, Scene, recording, tool_limiter
from tests.stores import Clock, FickleStore
from tests.telemetry import HAS_INLINE, Signals, telling
from tests.tokens import ProviderError

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
class World:
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
    world, signals = World(), telling(spans="off", subject_label={"user_id": str})
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


def expected(limits: list[Limit], world: World) -> Counter[str]:
    """What ran, by the store's keys."""
    found: Counter[str] = Counter()
    rows = {(each.counter, *row[:2]): each for each in limits for row in thresholds(each)}
    for (_, dimension, window), limit in rows.items():
        found.update(
            key_of(limit, dimension, window, each) for each in world.ran if limit.matches(each.call)
        )
    return found


def check_limits(limits: list[Limit], world: World) -> None:
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
