"""What limits add to a step: CPU time, and what a checkpointer in PostgreSQL or a store adds."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

from benchmarks.report import Ratio, Result, Size, Table, number, required
from benchmarks.scenes import BUDGETS, NONE, SETUPS, STORED, Spans, agent, run
from langchain_quota import MemoryStore

STEPS = 10
"""The number of steps of the runs that are measured."""

AT_ONCE = 20
"""The number of runs at once, where stores are also measured under load."""

RIVALS = {
    "QuotaMiddleware, tool": ("LangChain, tool", 2.0),
    "QuotaMiddleware, model": ("LangChain, model", 1.05),
    "QuotaMiddleware, 2": ("LangChain, 2", 1.12),
    "QuotaMiddleware, 8": ("LangChain, 8", 0.41),
    "Inline, 2": ("LangChain, 2", 0.75),
    "Inline, 8": ("LangChain, 8", 0.27),
    "drop-in, tool": ("LangChain, tool", 1.9),
    "drop-in, model": ("LangChain, model", 1.65),
    "drop-in, 2": ("LangChain, 2", 1.65),
}
"""Beside which set-up each of ours is measured, and the most that it may add, to what that adds."""

SIZES = """
    SELECT octet_length(checkpoint::text) + octet_length(metadata::text) AS size
    FROM checkpoints WHERE thread_id = %(thread)s
    UNION ALL SELECT octet_length(blob) FROM checkpoint_blobs WHERE thread_id = %(thread)s
    UNION ALL SELECT octet_length(blob) FROM checkpoint_writes WHERE thread_id = %(thread)s
"""
"""The bytes of each row that is stored of a thread."""


class Added(NamedTuple):
    """What a set-up adds to a step, in microseconds.

    Attributes:
        cpu: CPU time of all threads: the difference of the first quartiles of all rounds, because
            whatever else runs on the machine can only add to a round.
        middle: The median of the differences in each round.
        high: Their third quartile.
        clock: Time by the clock, a median.
    """

    cpu: float
    middle: float
    high: float
    clock: float


def measure(size: Size) -> Result:
    """Measure."""
    setups = [*SETUPS, *BUDGETS]
    added = asyncio.run(_added({setup: agent(setup) for setup in setups}, size.rounds))
    timed, stored = asyncio.run(_in_postgres(size.rounds))
    found = {}
    for setup, each in added.items():
        other, _ = RIVALS.get(setup, ("", 0))
        to = {kind: added.get(other.replace("LangChain", kind)) for kind in _PEERS}
        found[setup] = {
            "CPU µs a step": number(each.cpu, 0),
            "median, third quartile": f"{number(each.middle, 0)}, {number(each.high, 0)}",
            **{f"to {kind}": number(peer and each.cpu / peer.cpu) for kind, peer in to.items()},
            "ms a step, PostgreSQL": number(timed[setup].clock / 1_000 if timed else None),
            "bytes a step, PostgreSQL": number(stored[setup] - stored[NONE] if stored else None, 0),
        }
    ratios = [
        Ratio(f"{setup}: what it adds, to {other}", most, added[setup].cpu / added[other].cpu)
        for setup, (other, most) in RIVALS.items()
    ]
    columns = ["limits", *found[NONE]]
    rows = [
        [setup, *cells.values()]
        for setup, cells in found.items()
        # Columns compare with the others.
        if setup != NONE and not setup.startswith(_PEERS[1])
    ]
    return Result(Table("What limits add to a step", columns, rows, _NOTE), ratios=ratios)


_PEERS = ("LangChain", "LangChain and telemetry")
_NOTE = """\
- *CPU µs a step*: microseconds of CPU time of all threads, in runs of ten steps without a
  checkpointer: the first quartile of all rounds. *to LangChain* is this, divided by what
  LangChain's limiters add for these limits. *to LangChain and telemetry* is the same for those
  limiters with a span and a counter for each call, as a user would write them:
  `benchmarks/by_hand.py`.
- *ms* and *bytes a step*: elapsed time and stored bytes, with PostgreSQL as checkpointer. It does
  not wait for the disk.
- *LangChain, 2* is LangChain's `ModelCallLimitMiddleware` and `ToolCallLimitMiddleware`, and
  *LangChain, 8* adds one for each of six tools. *drop-in* uses this package's classes of the same
  names. *QuotaMiddleware* and *Inline* (`InlineQuotaMiddleware`) have the same limits. *model* is
  a limit on model calls only, *tool* one on all tools together. With *tokens* and *cost*, the model
  reports what it has used.
- Telemetry is on, and the SDK creates all spans without sampling. The garbage collector is on.
  Where deepagents or langchain-quickjs is installed, QuotaMiddleware needs a hook around the model,
  which adds 20 to 50 µs a step."""


async def _in_postgres(rounds: int) -> tuple[Mapping[str, Added] | None, dict[str, int] | None]:
    """Return what each set-up adds by the clock, and the bytes that are stored of a sixth step."""
    try:
        async with _postgres() as saver:
            agents = {setup: agent(setup, saver) for setup in [*SETUPS, *BUDGETS]}
            stored = {}
            for setup, each in agents.items():
                five, six = [await _size(saver, each, steps) for steps in (5, 6)]
                stored[setup] = six - five
            return await _added(agents, rounds, saver=saver), stored
    except LookupError:
        return None, None


async def _size(saver: Any, agent: Any, steps: int) -> int:
    """Return the bytes of a run of so many steps, which is deleted."""
    await run(agent, steps, "sized")
    cursor = await saver.conn.execute(SIZES, {"thread": "sized"})
    size = sum(row["size"] or 0 for row in await cursor.fetchall())
    await saver.adelete_thread("sized")
    return size


@asynccontextmanager
async def _postgres() -> AsyncIterator[Any]:
    """Yield a checkpointer in a PostgreSQL server on the loopback.

    Raises:
        LookupError: There is no such server.
    """
    with ExitStack() as running:
        with required():
            from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver  # noqa: PLC0415 - optional

            from tests.server.postgres import running_postgres  # noqa: PLC0415 - needs psycopg

            server = running.enter_context(running_postgres())
        async with AsyncPostgresSaver.from_conn_string(server.database()) as saver:
            await saver.setup()
            yield saver


def measure_spans(size: Size) -> Result:
    """Measure telemetry by what becomes of its spans."""
    by_hand, modes = _PEERS[1], get_args(Spans)[:3]
    setups = [f"{by_hand}, tool", "QuotaMiddleware, tool"]
    setups += [f"{by_hand}, 2", "QuotaMiddleware, 2", "Inline, 2"]
    rows: dict[str, list[str]] = {setup: [setup] for setup in setups}
    ratios = []
    for spans in modes:
        agents = {setup: agent(setup, spans=spans) for setup in (NONE, *rows)}
        added = asyncio.run(_added(agents, size.rounds))
        for setup, row in rows.items():
            to = added[setup].cpu / added[f"{by_hand}, {setup.rpartition(', ')[2]}"].cpu
            row += [number(added[setup].cpu, 0), number(to)]
            if (setup, spans) in _MOST:
                what = f"{setup}, spans {spans}: to {by_hand}"
                ratios.append(Ratio(what, _MOST[setup, spans], to))
    columns = ["limits", *(column for spans in modes for column in (spans, "to by hand"))]
    note = (
        "CPU µs a step, by what becomes of spans: the SDK records them, for a processor that does "
        "nothing; its sampler drops them, as in the first table; there is no SDK. *to by hand*: to "
        f"{by_hand}."
    )
    table = Table("What telemetry adds to a step", columns, [*rows.values()], note)
    return Result(table, ratios=ratios)


_MOST = {
    ("QuotaMiddleware, tool", "recorded"): 1.5,
    ("QuotaMiddleware, tool", "dropped"): 1.5,
    ("QuotaMiddleware, 2", "recorded"): 1.0,
    ("QuotaMiddleware, 2", "dropped"): 0.95,
}
"""The most that set-ups may add, to limiters with telemetry by hand."""


def measure_stores(size: Size) -> Result:
    """Measure limits whose counts a store keeps."""
    stores: dict[str, Any] = {"memory": MemoryStore()}
    missing = ""
    with ExitStack() as running:
        try:
            with required():
                from langchain_quota import PostgresStore, RedisStore  # noqa: PLC0415 - needs both
                from tests.server.postgres import running_postgres  # noqa: PLC0415 - needs psycopg
                from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis

                directory = Path(running.enter_context(TemporaryDirectory(prefix="benchmark-")))
                url = running.enter_context(running_redis(directory)).url
                stores["Redis"] = RedisStore(url, timeout=60)
                database = running.enter_context(running_postgres()).database()
                stores["PostgreSQL"] = PostgresStore(database, timeout=60)
        except LookupError as error:
            missing = f" Not measured: {error}."
        rows = asyncio.run(_in_stores(stores, size.rounds))
    columns = ["limits", "requests a step", "CPU µs a step", "to LangChain"]
    columns += [f"{AT_ONCE} at once", "to LangChain"]
    note = (
        "*in a store*: QuotaMiddleware's limits of a run; *per user*: quotas of a user's day; *at "
        f"once*: so many runs. The servers do not wait for the disk.{missing}"
    )
    return Result(Table("What limits in a store add to a step", columns, rows, note))


async def _in_stores(stores: Mapping[str, Any], rounds: int) -> Sequence[Sequence[str]]:
    asked: list[object] = []
    agents = {setup: agent(setup) for setup in (NONE, "LangChain, 2")}
    for where, store in stores.items():
        if where == "PostgreSQL":
            await store.asetup()

        def noted(request: Any, acquire: Any = store.aacquire) -> Any:
            asked.append(request)
            return acquire(request)

        store.aacquire = noted
        agents |= {f"{setup}: {where}": agent(setup, store=store) for setup in STORED}
    taken = [await _added(agents, rounds), await _added(agents, max(2, rounds // 10), AT_ONCE)]
    rows = []
    for name in [*agents][1:]:
        asked.clear()
        await run(agents[name], STEPS, "counted")
        row = [name.removeprefix("QuotaMiddleware, "), number(len(asked) / STEPS, 1)]
        for added in taken:
            row += [number(added[name].cpu, 0), number(added[name].cpu / added["LangChain, 2"].cpu)]
        rows.append(row)
    for store in [*stores.values()][1:]:
        await store.aclose()
    return rows


async def _added(
    agents: Mapping[str, Any], rounds: int, at_once: int = 1, saver: Any = None
) -> dict[str, Added]:
    """Return what each set-up adds to a step of so many runs at once; all take turns."""
    taken = await _taken(agents, rounds, at_once, saver)
    found = {}
    for setup, own in taken.items():
        pairs = [*zip(own, taken[NONE], strict=True)]
        cpu, clock = ([(mine[i] - bare[i]) / STEPS / 1_000 for mine, bare in pairs] for i in (0, 1))
        _, middle, high = quantiles(cpu, n=4)
        low, low_bare = (
            quantiles([each[0] / STEPS / 1_000 for each in turns], n=4)[0]
            for turns in (own, taken[NONE])
        )
        found[setup] = Added(low - low_bare, middle, high, median(clock))
    return found


async def _taken(
    agents: Mapping[str, Any], rounds: int, at_once: int, saver: Any
) -> dict[str, list[tuple[float, float]]]:
    """Return the nanoseconds of each run: CPU time of all threads, and time by the clock."""
    taken: dict[str, list[tuple[float, float]]] = {setup: [] for setup in agents}
    turns = [*agents.items()]
    order = random.Random(0)  # noqa: S311 - no secret
    for number_of in range(-1, rounds):
        # In one order, each would always find what the same other one left in the caches.
        order.shuffle(turns)
        for setup, each in turns:
            threads = [f"thread-{number_of}-{index}" for index in range(at_once)]
            began, started = time.process_time_ns(), time.perf_counter_ns()
            await asyncio.gather(*(run(each, STEPS, thread) for thread in threads))
            cpu, clock = time.process_time_ns() - began, time.perf_counter_ns() - started
            for thread in threads if saver is not None else ():
                await saver.adelete_thread(thread)
            # The first round warms up.
            if number_of >= 0:
                taken[setup].append((cpu / at_once, clock / at_once))
    return taken
