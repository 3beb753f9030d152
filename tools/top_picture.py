"""The picture of `langchain-quota top`: two processes with agents, read over HTTP, as SVG.

`make picture` writes docs/images/top.svg.
"""

import argparse
import asyncio
import io
import logging
import random
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry
from rich.console import Console

from langchain_quota import (
    CostLimit,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    Telemetry,
    ToolCallLimit,
    start_metrics_server,
)
from langchain_quota.cli import _parser
from langchain_quota.cli.top import Watch
from langchain_quota.cli.top_sources import sources
from langchain_quota.cli.top_table import View, screen
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tools.picture import IMAGES, svg

PICTURE = IMAGES / "top.svg"
TITLE = "langchain-quota top"
WIDTH, HEIGHT = 114, 22
THREADS = 16
A_TOKEN = Decimal("0.00001")
"""What a token costs, in dollars."""
SECONDS = 24
"""How long the traffic is watched."""


def search() -> str:
    """Search the web."""
    return "nothing found"


class Process:
    """A process with an agent.

    Args:
        store: Where all processes count together.
        seed: Decides what its users ask.
    """

    def __init__(self, store: MemoryStore, seed: int) -> None:
        self.registry = CollectorRegistry()
        self._random = random.Random(seed)  # noqa: S311 - traffic, no secret
        self._saver = InMemorySaver()
        limits: list[Limit] = [
            ToolCallLimit("search", thread_limit=20, quotas=[Quota(120, per="tenant")]),
            CostLimit(thread_limit="0.25", name="money"),
        ]
        self._quota = QuotaMiddleware(
            limits,
            store=store,
            prices=lambda used: used.total_tokens * A_TOKEN,
            telemetry=Telemetry(registry=self.registry, subject_label={"tenant": str}),
        )

    async def turn(self) -> None:
        """Answer a question on one of its threads."""
        number = int(THREADS * self._random.random() ** 2)
        calls = [{"name": "search", "args": {}, "id": f"s{each}"} for each in range(3)]
        script = [self._answer(calls[: self._random.randint(0, 3)]), self._answer(())]
        agent: Any = create_agent(
            ScriptedChatModel(script=script),
            [search],
            middleware=[self._quota],
            checkpointer=self._saver,
            name="support",
        )
        tenant = ("acme", "globex", "initech")[number % 3]
        await agent.ainvoke(
            {"messages": [("user", "And now?")]},
            {"configurable": {"thread_id": f"customer-{number + 1}"}},
            context={"tenant": tenant},
        )

    def _answer(self, calls: Sequence[dict[str, Any]]) -> AIMessage:
        tokens = self._random.randint(200, 1_500)
        return AIMessage(
            "Here it is.",
            usage_metadata={"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens},
            tool_calls=[*calls],
            response_metadata={"model_name": "gpt-5"},
        )


async def drawn() -> str:
    """The view, after the processes were watched at their work."""
    store = MemoryStore()
    processes = [Process(store, seed) for seed in range(2)]
    with (
        start_metrics_server(0, registry=processes[0].registry) as one,
        start_metrics_server(0, registry=processes[1].registry) as two,
    ):
        watch = Watch(sources(_parser().parse_args(["top", one.url, two.url])))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            await asyncio.gather(*(each.turn() for each in processes))
            await asyncio.to_thread(watch.ask_all)
            await asyncio.sleep(0.4)
    console = Console(width=WIDTH, height=HEIGHT, file=io.StringIO())
    shown = screen(
        watch.figures, View(), console=console, addresses=2, faults=watch.faults, now=time.time()
    )
    return svg(shown, title=TITLE, width=WIDTH, height=HEIGHT)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    logging.getLogger("langchain_quota").setLevel(logging.ERROR)
    arguments.to.parent.mkdir(parents=True, exist_ok=True)
    arguments.to.write_text(asyncio.run(drawn()), encoding="utf-8")


if __name__ == "__main__":
    main()
