"""Agents that ask a person at a limit, as one worker process after another runs them.

`python -m tests.servers.asking ORDER`: the order is JSON, as of `Order`, and so is what is printed.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    ToolCallLimit,
    usage,
)
from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.limits import Limit
from langchain_quota.stores.grants import Grant
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.servers.lives import Diary

LIMIT = 2
GRANT = 3
CONTEXT = {"user_id": "ada"}
APPROVE: dict[str, Any] = {"decisions": [{"type": "approve"}]}

Moment = Literal["", "grants", "granted", "judged"]


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Attributes:
        folder: Where the diary is.
        text: The question that begins a run: how many searches the model asks for in each turn.
            Empty to go on with a run.
        resume: What the run is resumed with; `None` to let it go on.
        saver: Where the threads are: a path, the URL of PostgreSQL, or empty for this process.
        threads: Their names; all run at once.
        counts: What is limited: searches or model calls.
        approves: Whether every question is approved at once.
        redis: The URL of the store; empty to count threads in the state.
        prefix: The store's prefix.
        outage: What becomes of calls while the store cannot be asked.
        timeout: How long the store may take, in seconds.
        ahead: How much the clock of the process is ahead, in seconds.
        at: When something comes between: before it grants, after that, or when the calls have been
            judged after that.
        what: What then: it waits for the file `go`, is killed, or stops the store.
        store: The id of the store's process.
    """

    folder: str
    text: str = ""
    resume: Any = None
    saver: str = ""
    threads: tuple[str, ...] = ("7",)
    counts: Literal["search", "model"] = "search"
    approves: bool = False
    redis: str = ""
    prefix: str = ""
    outage: Literal["deny", "allow"] = "deny"
    timeout: float = 30
    ahead: int = 0
    at: Moment = ""
    what: Literal["waits", "is killed", "stops the store"] = "is killed"
    store: int = 0

    def json(self) -> str:
        """The order as the program reads it."""
        return json.dumps(asdict(self))


class DisturbedStore(RedisStore):
    """A store at which something comes between."""

    order: Order
    has_granted = False

    async def _agrant(self, asked: Grant) -> tuple[Grant | None, bool]:
        await self._reach("grants")
        found = await super()._agrant(asked)
        self.has_granted = True
        await self._reach("granted")
        return found

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        result = await super().aacquire(request)
        if self.has_granted:
            await self._reach("judged")
        return result

    async def _reach(self, moment: Moment) -> None:
        order = self.order
        if moment != order.at:
            return
        Diary(order.folder).write("reached")
        if order.what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order.what == "stops the store":
            os.kill(order.store, signal.SIGSTOP)
        else:
            while not Path(order.folder, "go").exists():  # noqa: ASYNC110, ASYNC240 - of another
                await asyncio.sleep(0.01)


def turns(messages: Sequence[BaseMessage]) -> Turn:
    """The searches that the newest question says, turn by turn."""
    newest = max(n for n, each in enumerate(messages) if isinstance(each, HumanMessage))
    numbers = [int(each) for each in str(messages[newest].content).split()]
    turn = sum(each.type == "ai" for each in messages[newest:])
    return ["search"] * numbers[turn] if turn < len(numbers) else "done"


def agent_of(order: Order, saver: BaseCheckpointSaver[Any], store: RedisStore | None) -> Any:
    """The agent: it writes to the diary which of its searches run."""
    diary = Diary(order.folder)

    @tool
    async def search(runtime: ToolRuntime[Any, Any]) -> str:
        """Search the web."""
        diary.write("ran", call=runtime.tool_call_id)
        return "found"

    options: dict[str, Any] = {"thread_limit": LIMIT}
    if store is not None:
        options = {"quotas": [Quota(LIMIT, per="user_id", window=timedelta(days=1))]}
    options |= {"exit_behavior": "ask", "grant": GRANT}
    limit: Limit = ModelCallLimit(**options)
    if order.counts == "search":
        limit = ToolCallLimit("search", **options)
    limits = QuotaMiddleware[Any, Any](
        [limit],
        store=store,
        on_store_error=order.outage,
        telemetry=Telemetry(registry=CollectorRegistry(), spans="off"),
    )
    model = ScriptedChatModel(script=turns)
    return create_agent(model, [search], middleware=[limits], checkpointer=saver)


@asynccontextmanager
async def saver_of(order: Order) -> AsyncGenerator[BaseCheckpointSaver[Any]]:
    """Where the threads are."""
    if not order.saver:
        yield InMemorySaver()
    elif order.saver.startswith("postgresql:"):
        async with AsyncPostgresSaver.from_conn_string(order.saver) as saver:
            await saver.setup()
            yield saver
    else:
        async with AsyncSqliteSaver.from_conn_string(order.saver) as saver:
            yield saver


async def live(order: Order, thread: str, agent: Any) -> dict[str, Any]:
    """Begin a run, or go on with it, until it ends or waits for a person: what became of it."""
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    given: Any = None
    if order.text:
        given = {"messages": [("user", order.text)]}
    elif order.resume is not None:
        given = Command(resume=order.resume)
    error = ""
    try:
        result = await agent.ainvoke(given, config, context=CONTEXT)
        while order.approves and "__interrupt__" in result:
            result = await agent.ainvoke(Command(resume=APPROVE), config, context=CONTEXT)
    except Exception as raised:  # noqa: BLE001 - what the test reads
        error = f"{type(raised).__name__}: {raised}"
    found = await agent.aget_state(config)
    messages = found.values["messages"]
    return {
        "asked": [each.value for each in found.interrupts],
        "answers": [str(each.content) for each in messages if each.type == "tool"],
        "last": str(messages[-1].content),
        "used": usage(found).tools.get("search", 0),
        "error": error,
    }


async def main(order: Order) -> None:
    """Do it, and print for each thread what became of it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    clock = time.time
    if order.ahead:
        time.time = lambda: clock() + order.ahead  # of this process
    store = None
    if order.redis:
        store = DisturbedStore(order.redis, prefix=order.prefix, timeout=order.timeout)
        store.order = order
    async with saver_of(order) as saver:
        agent = agent_of(order, saver, store)
        found = await asyncio.gather(*(live(order, each, agent) for each in order.threads))
    if store is not None:
        await store.aclose()
    print(json.dumps(found))  # noqa: T201 - what the test reads


def read(text: str) -> Order:
    """The order that a program was started with."""
    known: Mapping[str, Any] = json.loads(text)
    return Order(**{**known, "threads": tuple(known["threads"])})


def diary(folder: Path, what: str) -> list[dict[str, Any]]:
    """What has happened: calls that `ran`, one for each time, and moments that were `reached`."""
    known = Diary(str(folder)).read() if (folder / "diary").exists() else []
    return [each for each in known if each["what"] == what]


def ran(folder: Path) -> list[str]:
    """The calls that have run, one for each time."""
    return [each["call"] for each in diary(folder, "ran")]


if __name__ == "__main__":
    asyncio.run(main(read(sys.argv[1])))
