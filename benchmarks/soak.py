"""`python -m benchmarks.soak --minutes 30`: agents run for a long time, and nothing may grow.

The exit code is 1 if something has grown, and a line names it. `make soak` runs this.
"""

import argparse
import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.checked import unreached, verdict
from benchmarks.report import Table, number, required
from langchain_quota import (
    ConcurrencyLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
)
from langchain_quota.telemetry import recorder_of
from langchain_quota.testing import ScriptedChatModel

Store = MemoryStore | RedisStore

THREADS = 100_000
"""How many threads metrics know before the first run: as many as they remember."""

WORKERS = 8
USERS = 500
NEW_AGENT, ASKS, GRANTS, CANCELS = 21, 25, 39, 31
"""One run in so many has a new agent, asks a person, gets a grant, is cancelled.

The numbers are odd: every second run has the other store, so both get all of them.
"""

SAMPLES = 100
WARM_UP = 0.3
"""The share of the time that is warm-up: after it, nothing may grow."""


Sample = dict[str, float]
"""What there is at one moment, by name."""

ALLOWED = {
    "MiB of memory": (1.03, 2),
    "Python objects": (1.02, 2_000),
    "series": (1.01, 5),
    "files": (1, 2),
    "tasks": (1, WORKERS),
    "threads": (1, 2),
}
"""How many times its early value each late one may be, and how much more beyond that.

Connections, worker threads and tasks come and go.
"""


def sample(registry: CollectorRegistry) -> Sample:
    """What there is now."""
    lines = generate_latest(registry).decode().splitlines()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB of memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "Python objects": len(gc.get_objects()),
        "series": sum(not line.startswith("#") for line in lines),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }


def thirds(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """The medians of the first and of the last third of the samples after warm-up, by name."""
    warm = samples[int(len(samples) * WARM_UP) :]
    third = len(warm) // 3 or 1
    early, late = warm[:third], warm[-third:]
    return {
        name: (median(each[name] for each in early), median(each[name] for each in late))
        for name in ALLOWED
    }


def grown(samples: Sequence[Sample]) -> list[str]:
    """What has grown after warm-up: nothing, if all is well."""
    return [
        f"{name} {number(early, 0)} -> {number(late, 0)}"
        for name, (early, late) in thirds(samples).items()
        if late > early * ALLOWED[name][0] + ALLOWED[name][1]
    ]


def table(samples: Sequence[Sample]) -> Table:
    """What there was early and late."""
    rows = [[name, *(number(each, 0) for each in both)] for name, both in thirds(samples).items()]
    note = "Medians of the first and of the last third of the time after warm-up."
    return Table("A soak", ("measure", "first third", "last third"), rows, note)


class Traffic:
    """Runs of agents, each on a thread of its own, with all that may leave something behind.

    Args:
        stores: The stores, which runs use by turns.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.registry = CollectorRegistry()
        self.runs = 0
        self.is_over = False
        self._stores = stores
        # Small bounds, so that warm-up reaches all of them.
        self._telemetry = Telemetry(
            registry=self.registry, max_tools=10, max_agents=50, subject_label={"user": str}
        )
        self._saver = InMemorySaver()
        self._agents = [self._agent(f"shared-{index}", store) for index, store in enumerate(stores)]

    async def remember(self, threads: int) -> None:
        """Let metrics know so many threads, as after a long time."""
        await self.run(1)
        recorder, told = recorder_of(self._telemetry), verdict(unreached(2))
        for index in range(threads):
            call = told.call._replace(thread_id=f"old-{index}")
            recorder.record([replace(told, call=call)], started=time.time_ns())
            if index % 5_000 == 0:
                generate_latest(self.registry)

    async def work(self) -> None:
        """Run agents until it is over."""
        while not self.is_over:
            self.runs += 1
            await self.run(self.runs)

    async def run(self, index: int) -> None:
        """Run an agent once on a new thread; the number says what is special about it."""
        which = index % len(self._stores)
        agent, store = self._agents[which], self._stores[which]
        if index % NEW_AGENT == 0:
            agent = self._agent(f"agent-{index}", store)
        user = f"user-{index % USERS}"
        if index % GRANTS == 0:
            until = datetime.now(UTC) + timedelta(minutes=1)
            await store.agrant(f"search:user_id:{user}", 1, window=None, until=until)
        thread = f"thread-{index}"
        config: Any = {"configurable": {"thread_id": thread}}
        context = {"user_id": user, "most": index % 7}
        running = asyncio.ensure_future(
            agent.ainvoke({"messages": [("user", str(index))]}, config, context=context)
        )
        if index % CANCELS == 0:
            await asyncio.sleep(0.002)
            running.cancel()
        try:
            found = await running
            if "__interrupt__" in found:
                answer = {"decisions": [{"type": "approve"}], "by": "ada"}
                await agent.ainvoke(Command(resume=answer), config, context=context)
        except asyncio.CancelledError:
            if not running.cancelled():
                raise
        finally:
            await self._saver.adelete_thread(thread)

    def _agent(self, name: str, store: Store) -> Any:
        def most(_state: Any, runtime: Any) -> int:
            return int(runtime.context["most"])

        quota = QuotaMiddleware(
            [
                ToolCallLimit("search", thread_limit=most, run_limit=3),
                ConcurrencyLimit("search", max_concurrency=4),
                ToolCallLimit(
                    "search",
                    quotas=[
                        Quota(100_000, per="user_id", window=timedelta(days=1), name="user"),
                        Quota(100_000_000, per="user_id", name="ever"),
                    ],
                    name="searches",
                ),
                ToolCallLimit("mail", run_limit=1, exit_behavior="ask", grant=1),
                ToolCallLimit(thread_limit=20),
                ModelCallLimit(run_limit=10),
                TokenLimit(run_limit=1_000_000, thread_limit=1_000_000),
            ],
            store=store,
            telemetry=self._telemetry,
        )
        return create_agent(
            ScriptedChatModel(script=script, keep_calls=0),
            [search, mail],
            middleware=[quota],
            checkpointer=self._saver,
            context_schema=dict,
            name=name,
        )


async def search() -> str:
    """Search the web."""
    await asyncio.sleep(0)
    return "found"


async def mail() -> str:
    """Send a mail."""
    return "sent"


def script(messages: Sequence[BaseMessage]) -> AIMessage:
    """One step of tool calls, one of them of a tool that there is not, and an answer."""
    index = int(str(messages[0].content))
    calls = []
    if len(messages) == 1:
        names = ["search", f"invented-{index}", *(["mail"] * 2 if index % ASKS == 0 else [])]
        calls = [
            {"name": name, "args": {}, "id": f"call-{index}-{place}", "type": "tool_call"}
            for place, name in enumerate(names)
        ]
    return AIMessage(
        "" if calls else "Done.",
        tool_calls=calls,
        usage_metadata=UsageMetadata(input_tokens=100, output_tokens=10, total_tokens=110),
        response_metadata={"model_name": f"model-{index % 1000}"},
    )


async def soak(
    traffic: Traffic, threads: int, seconds: float, note: Callable[[Sample], None]
) -> list[Sample]:
    """Let metrics know so many threads, and the traffic go on for so long."""
    await traffic.remember(threads)
    working = [asyncio.create_task(traffic.work()) for _ in range(WORKERS)]
    samples = []
    try:
        for _ in range(SAMPLES):
            done, _ = await asyncio.wait(
                working, timeout=seconds / SAMPLES, return_when=asyncio.FIRST_EXCEPTION
            )
            for each in done:
                each.result()
            samples.append(sample(traffic.registry))
            note(samples[-1])
    finally:
        traffic.is_over = True
        await asyncio.gather(*working, return_exceptions=True)
    return samples


@contextmanager
def stores() -> Iterator[list[Store]]:
    """A store in memory and, where there is a server, one in Redis."""
    found: list[Store] = [MemoryStore(max_keys=5_000)]
    with ExitStack() as running:
        directory = running.enter_context(TemporaryDirectory(prefix="soak-"))
        try:
            with required():
                from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis

                server = running.enter_context(running_redis(Path(directory)))
                found.append(RedisStore(server.url, timeout=30))
        except LookupError as error:
            print(f"without Redis: {error}", file=sys.stderr)  # noqa: T201 - a command: it prints
        yield found


def main() -> int:
    """Let agents work for as long as was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=THREADS, help="threads in metrics at first")
    arguments = parser.parse_args()
    # Refusals are wanted here.
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)

    def note(found: Sample) -> None:
        shown = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
        print(f"runs {traffic.runs}, {shown}", file=sys.stderr, flush=True)  # noqa: T201

    with stores() as opened:
        traffic = Traffic(opened)
        seconds = arguments.minutes * 60
        samples = asyncio.run(soak(traffic, arguments.threads, seconds, note))
    print(table(samples))  # noqa: T201 - a command: it prints
    print(f"{traffic.runs:,} runs in {arguments.minutes:g} minutes")  # noqa: T201 - the same
    found = grown(samples)
    if found:
        print(f"grown: {', '.join(found)}", file=sys.stderr)  # noqa: T201 - the same
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
