"""Processes that are killed at any moment, and started again: limits hold, and counts add up."""

import asyncio
import json
import os
import random
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest
from langchain.tools import ToolRuntime
from langchain_core.messages import BaseMessage
from langchain_core.messages.tool import tool_call
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from langchain_quota import ModelCallLimit, RedisStore, ToolCallLimit, usage
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.limits import Limit
from langchain_quota.testing import Turn
from tests.forked import ROOT, calling, start_python
from tests.scene import ABANDONED, Kind, Scene, check_history
from tests.server.redis import RedisServer
from tests.telemetry import needs_inline, telling

RUN_LIMIT, THREAD_LIMIT, MODEL_LIMIT = 5, 23, 6
CONCURRENCY = 2
"""How many tools the model asks for at once."""
DONE = "done"
STEP = 0.003
"""How long a tool takes at most, in seconds."""
KILLS = 14
"""How many of a thread's processes are killed."""
NEW_RUNS = 0.2
"""The share of processes that begin a new run though one waits to be resumed."""
PATIENCE = 60
"""Seconds after which a process that may come to its end would be killed, too."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What a process is to live; its folder has the thread's checkpoints and the diary."""

    durability: Literal["sync", "async"]
    latency: float  # of the checkpointer's database, in seconds, at most
    inline: bool = False
    redis: str | None = None
    prefix: str = ""
    folder: str = ""
    begin: bool = True  # a new run, even where one waits to be resumed

    def write(self, what: str, **entry: Any) -> None:
        """Write to the diary what happens as it happens; a kill takes nothing back."""
        with Path(self.folder, "diary").open("a") as diary:
            diary.write(json.dumps({"what": what, "pid": os.getpid(), **entry}) + "\n")


async def pause(most: float) -> None:
    await asyncio.sleep(random.uniform(0, most))  # noqa: S311 - no secret


class DistantSaver(AsyncSqliteSaver):
    """Checkpoints in a database that is some way off."""

    latency: float = 0

    async def aput(self, *args: Any, **options: Any) -> RunnableConfig:
        await pause(self.latency)
        return await super().aput(*args, **options)

    async def aput_writes(self, *args: Any, **options: Any) -> None:
        await pause(self.latency)
        await super().aput_writes(*args, **options)


class WritingStore(RedisStore):
    """A store that writes each request, and then what it has charged, to a diary."""

    order: Order

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        name, asked = request.idempotency_key, Counter[str]()
        for each in request.demands:
            asked.update(request.keyed(each.amounts))
        self.order.write("asks", id=name, charges=asked)
        result = await super().aacquire(request)
        charged = request.keyed(result.charged(request.demands))
        self.order.write("charged", id=name, charges=charged)
        return result


def agent_of(order: Order, saver: AsyncSqliteSaver) -> Any:
    """The agent; its model asks for tools for ever."""

    @tool
    async def act(runtime: ToolRuntime[Any, Any]) -> str:
        """Do something that cannot be undone."""
        state = runtime.state
        name = state["langchain_quota"].get("run")
        order.write("started", run=run_of(state["messages"]), call=runtime.tool_call_id, name=name)
        await pause(STEP)
        return DONE

    def ask(history: Sequence[BaseMessage]) -> Turn:
        try:
            check_history(history)
        except AssertionError as error:
            order.write("invalid", error=str(error))
        calls = [tool_call(name="act", args={}, id=uuid4().hex) for _ in range(CONCURRENCY)]
        order.write("asked", run=run_of(history), calls=[each["id"] for each in calls])
        return calls

    act_limit = ToolCallLimit("act", run_limit=RUN_LIMIT, thread_limit=THREAD_LIMIT)
    limits: list[Limit] = [ModelCallLimit(run_limit=MODEL_LIMIT), act_limit]
    store = None
    if order.redis is not None:
        store = WritingStore(order.redis, prefix=order.prefix, timeout=60)
        store.order = order
    kind: Kind = "inline" if order.inline else "quota"
    given: Any = {"tools": [act], "store": store, "checkpointer": saver}
    return Scene(telling(), ask, limits, kind=kind, **given).agent


async def live(given: str) -> None:
    """Go on with the thread's run, or begin one, to its end."""
    order = Order(**json.loads(given))
    random.seed()
    async with DistantSaver.from_conn_string(str(Path(order.folder, "checkpoints"))) as saver:
        assert isinstance(saver, DistantSaver)
        saver.latency = order.latency
        agent = agent_of(order, saver)
        config: RunnableConfig = {"configurable": {"thread_id": "7"}}
        found = await agent.aget_state(config)
        # Not `next`: what is there to do may have been done, and only its checkpoint be missing.
        waits = found.tasks and found.metadata["source"] != "input"
        print("born", flush=True)  # noqa: T201 - what the test waits for
        resumes = waits and not order.begin
        run = run_of(found.values["messages"]) if resumes else uuid4().hex
        order.write("lives", run=run)
        asked = None if resumes else {"messages": [("user", run)]}
        result = await agent.ainvoke(asked, config, durability=order.durability)
        tools = [each for each in result["messages"] if each.type == "tool"]
        answers = {each.tool_call_id: each.content for each in tools}
        used = usage(await agent.aget_state(config))
        order.write("ends", answers=answers, charged=used.tools.get("act", 0))


def run_of(history: Sequence[BaseMessage]) -> str:
    """The run that a history is in: it is named by the message that it began with."""
    return next(str(each.content) for each in reversed(history) if each.type == "human")


def life(order: Order, seconds: float) -> tuple[int | None, float]:
    """Start a process, and kill it after a while: its id if that was needed, and its seconds."""
    readable, writable = os.pipe()
    given: Any = {"stdout": writable, "stderr": 2, "cwd": ROOT, "imported": [__name__]}
    program = start_python(calling(live), json.dumps(asdict(order)), **given)
    os.close(writable)
    with os.fdopen(readable) as written, program:
        written.readline()
        born = time.monotonic()
        try:
            code = program.wait(seconds)
        except subprocess.TimeoutExpired:
            program.kill()
            code = program.wait()
        assert code in {0, -9}, "see what it wrote to stderr"
        return program.pid if code else None, time.monotonic() - born


@dataclass(frozen=True)
class Lived:
    """What became of a thread: all that its processes wrote, and the ids of those killed."""

    diary: list[Entry]
    killed: set[int]

    def entries(self, what: str) -> list[Entry]:
        return [each for each in self.diary if each["what"] == what]

    def by_run(self, what: str) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = defaultdict(list)
        for each in self.entries(what):
            found[each["run"]].append(each)
        return found

    def by_id(self, what: str) -> dict[str, dict[str, int]]:
        """The charges of each request: made again, it is not charged again."""
        return {each["id"]: each["charges"] for each in self.entries(what)}

    @property
    def started(self) -> set[str]:
        """The calls that started; one that started twice is one call."""
        return {each["call"] for each in self.entries("started")}

    @property
    def answers(self) -> Mapping[str, str]:
        """The answers in the history, by call."""
        found: Mapping[str, str] = self.entries("ends")[-1]["answers"]
        return found

    def answered(self, *texts: str) -> set[str]:
        return {call for call, text in self.answers.items() if text in texts}


def lived(order: Order, folder: Path) -> Lived:
    """Kill the processes of a thread again and again, and let the last come to its end."""
    chance = random.Random()  # noqa: S311 - no secret
    order = replace(order, folder=str(folder))
    measured = folder / "measured"
    measured.mkdir()
    _, span = life(replace(order, folder=str(measured), prefix=f"{order.prefix}.m"), PATIENCE)
    killed: set[int] = set()
    while len(killed) < KILLS:
        begin = chance.random() < NEW_RUNS
        pid, _ = life(replace(order, begin=begin), chance.uniform(0, span))
        killed |= {pid} if pid else set()
    assert life(order, PATIENCE)[0] is None
    thread = Lived([*map(json.loads, (folder / "diary").read_text().splitlines())], killed)

    # What holds wherever the counts are.
    assert thread.entries("invalid") == []
    assert len(thread.started) <= THREAD_LIMIT
    for run, starts in thread.by_run("started").items():
        assert len({each["call"] for each in starts}) <= RUN_LIMIT, run
    lives = thread.by_run("lives")
    for run, requests in thread.by_run("asked").items():
        # The step in which a process was killed is made again by the next one.
        again = sum(each["pid"] in thread.killed for each in lives[run])
        assert len(requests) <= MODEL_LIMIT + again, run
    assert thread.answered(DONE) <= thread.started
    makers = {call: each["pid"] for each in thread.entries("asked") for call in each["calls"]}
    lost = makers.keys() - thread.answers.keys()
    assert {makers[call] for call in lost} <= thread.killed
    return thread


def test_counts_in_the_state(tmp_path: Path) -> None:
    """With durability="sync" the state exceeds no limit, and counts all that may have run."""
    thread = lived(Order(durability="sync", latency=0.002), tmp_path)
    charged = thread.entries("ends")[-1]["charged"]
    assert len(thread.started) <= charged <= THREAD_LIMIT
    assert charged <= len(thread.answered(DONE, ABANDONED))


@pytest.mark.parametrize("inline", [False, pytest.param(True, marks=needs_inline)])
def test_counts_in_redis(tmp_path: Path, redis_server: RedisServer, *, inline: bool) -> None:
    """With durability="async" checkpoints are lost, and still the store exceeds no limit."""
    url, prefix = redis_server.url, redis_server.prefix()
    order = Order(durability="async", latency=0.02, inline=inline, redis=url, prefix=prefix)
    thread = lived(order, tmp_path)
    with closing(RedisStore(url, prefix=prefix, timeout=30)) as store:
        counts = {use.key: use.used for use in store.usages()}

    # Each run has one count, and none is below what ran.
    of_runs = {key: used for key, used in counts.items() if key.startswith("act:run:")}
    runs = {key.rpartition(":")[2]: used for key, used in of_runs.items()}
    assert len(thread.started) <= counts["act:thread:7"] == sum(runs.values()) <= THREAD_LIMIT
    started = thread.by_run("started")
    for starts in started.values():
        (name,) = {each["name"] for each in starts}
        assert len({each["call"] for each in starts}) <= runs[name] <= RUN_LIMIT
    assert len({each["name"] for each in thread.entries("started")}) == len(started)

    # All is accounted for.
    charged, asked = thread.by_id("charged"), thread.by_id("asks")
    doubtful = asked.keys() - charged.keys()
    for key, used in counts.items():
        known = sum(each.get(key, 0) for each in charged.values())
        assert known <= used <= known + sum(asked[name].get(key, 0) for name in doubtful), key
    askers = {each["pid"] for each in thread.entries("asks") if each["id"] in doubtful}
    assert askers <= thread.killed
