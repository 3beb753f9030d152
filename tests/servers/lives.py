"""Lives of a real agent, each in a process of its own that may be killed at any moment.

Run as a program, it imports everything once, and forks a process for each order that it reads.
"""

import asyncio
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from uuid import uuid4

from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langchain_core.messages import BaseMessage
from langchain_core.messages.tool import tool_call
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from prometheus_client import CollectorRegistry

from langchain_quota import (
    InlineQuotaMiddleware,
    ModelCallLimit,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    ToolCallLimit,
    usage,
)
from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import check_history

RUN_LIMIT = 5
THREAD_LIMIT = 23
MODEL_LIMIT = 6
AT_ONCE = 2
"""How many tools the model asks for at once."""
DONE = "done"
STEP = 0.003
"""How long a tool or the model takes at most, in seconds."""


@dataclass(frozen=True)
class Order:
    """What a process is to live.

    Attributes:
        durability: As LangGraph knows it.
        latency: How long the checkpointer's database takes to answer at most, in seconds.
        inline: Whether the limits are judged in the model's own step.
        redis: The URL of the store, if there is one.
        prefix: The store's prefix.
        folder: Where the thread's checkpoints and the diary are.
        begin: Whether it begins a new run, even where one waits to be resumed.
        seconds: After how long it is killed.
    """

    durability: Literal["sync", "async"]
    latency: float
    inline: bool = False
    redis: str | None = None
    prefix: str = ""
    folder: str = ""
    begin: bool = True
    seconds: float = 0


class Diary:
    """A file that what happens is written to as it happens; a kill takes nothing back."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "diary"

    def write(self, what: str, **entry: Any) -> None:
        line = json.dumps({"what": what, "pid": os.getpid(), **entry}) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]


async def _pause(most: float) -> None:
    await asyncio.sleep(random.uniform(0, most))  # noqa: S311 - no secret


class DistantSaver(AsyncSqliteSaver):
    """Checkpoints in a database that is some way off."""

    latency: float = 0

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        await _pause(self.latency)
        return await super().aput(config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        await _pause(self.latency)
        await super().aput_writes(config, writes, task_id, task_path)


class WritingStore(RedisStore):
    """A store that writes each request, and then what it has charged, to a diary."""

    diary: Diary

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        name = request.idempotency_key
        asked: dict[str, int] = {}
        for each in request.hits:
            for key, amount in request.keyed(each.amounts).items():
                asked[key] = asked.get(key, 0) + amount
        self.diary.write("asks", id=name, charges=asked)
        result = await super().aacquire(request)
        charged = request.keyed(result.charged(request.hits))
        self.diary.write("charged", id=name, charges=charged)
        return result


def agent_of(order: Order, saver: AsyncSqliteSaver) -> Any:
    """The agent; its model asks for tools for ever."""
    diary = Diary(order.folder)

    @tool
    async def act(runtime: ToolRuntime[Any, Any]) -> str:
        """Do something that cannot be undone."""
        state = runtime.state
        name = state["langchain_quota"].get("run")
        diary.write("started", run=run_of(state["messages"]), call=runtime.tool_call_id, name=name)
        await _pause(STEP)
        return DONE

    def ask(messages: Sequence[BaseMessage]) -> Turn:
        try:
            check_history(messages)
        except AssertionError as error:
            diary.write("invalid", error=str(error))
        calls = [tool_call(name="act", args={}, id=uuid4().hex) for _ in range(AT_ONCE)]
        diary.write("asked", run=run_of(messages), calls=[each["id"] for each in calls])
        return calls

    limits: list[Limit] = [
        ModelCallLimit(run_limit=MODEL_LIMIT),
        ToolCallLimit("act", run_limit=RUN_LIMIT, thread_limit=THREAD_LIMIT),
    ]
    store = None
    if order.redis is not None:
        store = WritingStore(order.redis, prefix=order.prefix, timeout=60)
        store.diary = diary
    kind = InlineQuotaMiddleware if order.inline else QuotaMiddleware
    telemetry = Telemetry(registry=CollectorRegistry())
    quota: Any = kind(limits, store=store, telemetry=telemetry)
    model = ScriptedChatModel(script=ask)
    return create_agent(model, [act], middleware=[quota], checkpointer=saver)


async def live(order: Order, ready: int) -> None:
    """Go on with the thread's run, or begin one, to its end."""
    async with DistantSaver.from_conn_string(str(Path(order.folder) / "checkpoints")) as saver:
        assert isinstance(saver, DistantSaver)
        saver.latency = order.latency
        agent = agent_of(order, saver)
        config: RunnableConfig = {"configurable": {"thread_id": "7"}}
        found = await agent.aget_state(config)
        # Not `next`: what is there to do may have been done, and only its checkpoint be missing.
        waits = found.tasks and found.metadata["source"] != "input"
        os.write(ready, b".")
        diary = Diary(order.folder)
        if waits and not order.begin:
            diary.write("lives", run=run_of(found.values["messages"]))
            result = await agent.ainvoke(None, config, durability=order.durability)
        else:
            run = uuid4().hex
            diary.write("lives", run=run)
            given = {"messages": [("user", run)]}
            result = await agent.ainvoke(given, config, durability=order.durability)
        answers = {
            each.tool_call_id: each.content for each in result["messages"] if each.type == "tool"
        }
        used = usage(await agent.aget_state(config))
        diary.write("ends", answers=answers, charged=used.tools.get("act", 0))


def run_of(messages: Sequence[BaseMessage]) -> str:
    """The run that a history is in: it is named by the message that it began with."""
    return next(str(each.content) for each in reversed(messages) if each.type == "human")


class Life(NamedTuple):
    """A process as it was: its id, whether it was killed, and how long it lived, in seconds."""

    pid: int
    killed: bool
    seconds: float


class Zygote:
    """Starts processes, one after the other, and kills each when its time is over."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.lives"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )

    def live(self, order: Order) -> Life:
        """Let a process live.

        Raises:
            RuntimeError: It failed.
        """
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        stdin.flush()
        pid, code, seconds = json.loads(stdout.readline())
        if code not in {0, -signal.SIGKILL}:
            raise RuntimeError(f"a process ended with {code}: see what it wrote to stderr")
        return Life(pid, code != 0, seconds)

    def end(self) -> None:
        """End the program; it is between two lives."""
        self._program.communicate()


@contextmanager
def zygote() -> Iterator[Zygote]:
    """A program that has imported everything, and forks."""
    program = Zygote()
    try:
        yield program
    finally:
        program.end()


def main(orders: IO[str], ends: IO[str]) -> None:
    """Fork a process for each order, and tell its id, how it ended, and how long it lived."""
    gc.freeze()  # or the first collection of each fork would copy all that is shared
    for line in orders:
        order = Order(**json.loads(line))
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_born(order, writable)
        os.close(writable)
        os.read(readable, 1)
        born = time.monotonic()
        if not select.select([readable], [], [], order.seconds)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(readable)
        _, status = os.waitpid(pid, 0)
        lived = time.monotonic() - born
        ends.write(json.dumps([pid, os.waitstatus_to_exitcode(status), lived]) + "\n")
        ends.flush()


def _be_born(order: Order, ready: int) -> None:
    code = 1
    try:
        random.seed()
        asyncio.run(live(order, ready))
        code = 0
    except Exception:  # noqa: BLE001 - the parent's loop is not to go on here
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
