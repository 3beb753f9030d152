"""A process of the service: it answers the questions that it reads, until there are no more."""

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from prometheus_client import CollectorRegistry, ProcessCollector

from benchmarks.traffic.agents import Question, build_agents
from benchmarks.traffic.truth import Journal
from langchain_quota import (
    Decision,
    PostgresStore,
    RedisStore,
    Telemetry,
    start_metrics_server,
    usage,
)
from langchain_quota.telemetry import capturing


class _Written(list[Decision]):
    """Writes down the decisions of a drop-in when they are made, not when the run has ended."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def extend(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._journal.decided(decision)


async def main(order: Mapping[str, Any]) -> None:
    """Serve metrics and answer questions until standard input ends."""
    journal = Journal(Path(order["journal"]))
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    store = RedisStore(order["redis"], timeout=order["timeout"])
    postgres = order["postgres"]
    second = PostgresStore(postgres, timeout=order["timeout"]) if postgres else None

    async def answer(number: int, question: Question) -> None:
        config: RunnableConfig = {"configurable": {"thread_id": question.thread}}
        agent = agents[question.agent]
        if question.text is None:
            await quotas[question.agent].areset(agent, config)
            journal.write("reset", agent=question.agent, thread=question.thread)
        else:
            # Without what was said before: so a run costs the same however long the test is.
            said = [RemoveMessage(REMOVE_ALL_MESSAGES), HumanMessage(question.text)]
            context = {"user_id": question.user, "tenant": question.tenant}
            with nullcontext() if question.agent in quotas else capturing(_Written(journal)):
                await agent.ainvoke({"messages": said}, config, context=context, durability="exit")
            used = usage(await agent.aget_state(config))
            journal.spent(question.agent, question.thread, used)
        print(number, flush=True)  # noqa: T201 - an answer to the driver

    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with AsyncSqliteSaver.from_conn_string(order["checkpoints"]) as saver:
        await saver.setup()
        telemetry = Telemetry(registry=registry, subject_label={"tenant": str})
        agents, quotas = build_agents(
            store,
            second,
            saver,
            telemetry,
            on_decision=journal.decided,
            speed=order["speed"],
        )
        with start_metrics_server(port=order["port"], registry=registry) as server:
            print(server.port, flush=True)  # noqa: T201 - the same
            async with asyncio.TaskGroup() as answering:
                while line := await reader.readline():
                    number, *question = json.loads(line)
                    answering.create_task(answer(number, Question(*question)))
    await store.aclose()
    if second is not None:
        await second.aclose()
    journal.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
