"""How costs grow: with limits, messages, calls in a message, and known threads."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry

from benchmarks.footprint import ask
from benchmarks.report import Ratio, Result, Size, Table, number
from benchmarks.scenes import REPORTED, UNREACHED, telemetry
from benchmarks.scrape import scraped, tracked
from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    QuotaMiddleware,
    RepeatLimit,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    metrics_app,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn

Work = Callable[[], Awaitable[object]]
Compared = tuple[Work, Work | None]
"""What is measured, and the same without limits, which is subtracted."""

HIGHEST = 1.1  # the power of an input with which a cost may grow; CPU time is not exact


def measure(size: Size) -> Result:
    """Measure."""
    rows, ratios = [], []
    for what, works in _growing(size.tracked):
        costs = asyncio.run(_costs(works, size.rounds // 2))
        (small, less), (large, more) = [*costs.items()][-2:]
        power = math.log(more / less) / math.log(large / small)
        cells = [", ".join(number(n, 0) for n in column) for column in (costs, costs.values())]
        rows.append((what, *cells, number(power)))
        ratios.append(Ratio(f"{what}: power with which the cost grows", HIGHEST, power))
    note = (
        "CPU time that limits add to a step, or of a whole scrape. *power* compares the two "
        "largest inputs: with 1 the cost is proportional to the input, with 0 it is constant."
    )
    table = Table("How costs grow", ("with", "inputs", "CPU µs", "power"), rows, note)
    return Result(table, ratios=ratios)


def _growing(tracked_threads: Sequence[int]) -> Iterator[tuple[str, Mapping[int, Compared]]]:
    """Yield what grows, and what is measured by the size of the input."""
    calls = [ToolCallLimit("search", run_limit=UNREACHED, name=f"limit-{n}") for n in range(64)]
    yield "limits on one tool", {n: _compared(calls[:n]) for n in (1, 4, 16, 64)}
    some: list[Limit] = [*calls[:2], ModelCallLimit(run_limit=UNREACHED), RepeatLimit(100)]
    some.append(TokenLimit(run_limit=UNREACHED))
    yield "messages of the run", {n: _compared(some, messages=n) for n in (0, 250, 1_000, 4_000)}
    yield "calls in a message", {n: _compared(some, calls=n) for n in (1, 4, 16, 64)}
    registries = {n: tracked(n) for n in (10, *tracked_threads)}
    yield "known threads, a step", {n: _on_threads(n, each) for n, each in registries.items()}
    yield "known threads, a scrape", {n: _scrapes(each) for n, each in registries.items()}


def _scrapes(registry: CollectorRegistry) -> Compared:
    return lambda: scraped(metrics_app(registry)), None


def _compared(
    limits: Sequence[Limit], messages: int = 0, calls: int = 1, config: Any = None, **options: Any
) -> Compared:
    """Return a step after so many messages, with limits and without."""
    quota = QuotaMiddleware(limits, **{"telemetry": telemetry("off"), **options})
    return _step([quota], messages, calls, config), _step([], messages, calls, config)


def _step(middleware: Sequence[Any], messages: int, calls: int, config: Any) -> Work:
    new_calls = [_call(f"new-{n}") for n in range(calls)]

    def script(history: Sequence[BaseMessage]) -> Turn:
        is_done = len(history) > messages + 1
        return AIMessage("", tool_calls=[] if is_done else new_calls, usage_metadata=REPORTED)

    async def search(call: str) -> str:
        return call

    tool = StructuredTool.from_function(coroutine=search, name="search", description="Search.")
    model = ScriptedChatModel(script=script, keep_calls=0)
    agent: Any = create_agent(model, [tool], middleware=middleware)
    history: list[BaseMessage] = [HumanMessage("Find it!", id="human")]
    for name in map(str, range(messages // 2)):
        history.append(AIMessage("", tool_calls=[_call(name)], id=f"ai-{name}"))
        history.append(ToolMessage(name, tool_call_id=name, id=f"tool-{name}"))
    return lambda: agent.ainvoke({"messages": history}, config)


def _call(name: str) -> ToolCall:
    return ToolCall(name="search", args={"call": name}, id=name, type="tool_call")


def _on_threads(threads: int, registry: CollectorRegistry) -> Compared:
    """Return a step on one of so many threads that telemetry and the store know."""
    store, observed = MemoryStore(), Telemetry(registry=registry, spans="off")
    for thread in range(threads):
        ask(store, thread, names=True)
    config = {"configurable": {"thread_id": "thread-0"}}
    limits = [ToolCallLimit("search", thread_limit=UNREACHED)]
    return _compared(limits, config=config, store=store, telemetry=observed)


async def _costs(works: Mapping[int, Compared], rounds: int) -> dict[int, float]:
    """Return what each costs in microseconds of CPU time; all take turns."""
    least: dict[Work | None, int] = {None: 0}
    for _ in range(rounds + 1):
        # Each twice: after a large input, the processor's caches have nothing of the next one.
        for work in filter(None, (work for pair in works.values() for work in pair * 2)):
            began = time.process_time_ns()
            await work()
            took = time.process_time_ns() - began
            least[work] = min(took, least.get(work, took))
    return {n: (least[work] - least[bare]) / 1_000 for n, (work, bare) in works.items()}
