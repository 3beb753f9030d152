"""Quotas per root run in a real Redis: many trees of agents at once, and workers that take over."""

import asyncio
import subprocess
import sys
from pathlib import Path

from langchain_quota.stores.redis import RedisStore
from tests.agent.trees import Tree, ask, config
from tests.servers.redis import RedisServer
from tests.signals import Signals


async def test_many_trees_at_once(redis_server: RedisServer, signals: Signals) -> None:
    """Fifty runs at once, three levels deep with parallel agents, have exactly their budgets."""
    store = RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=30)
    tree = Tree(signals.telemetry, store=store)
    leaves = [ask(tree.agent(2), f"leaf_{n}") for n in range(2)]
    top = tree.agent(3, ask(tree.agent(1, *leaves)))
    names = [f"run {n}" for n in range(50)]

    await asyncio.gather(
        *(
            top.ainvoke({"messages": [("user", name)]}, config(n % 25))
            for n, name in enumerate(names)
        )
    )
    await store.aclose()

    assert len(tree.ran) == 50 * 5


def test_resumed_by_another_process(redis_server: RedisServer, tmp_path: Path) -> None:
    """A run that waits for a human goes on with its budget in another process."""
    program = (sys.executable, "-m", "tests.servers.resumable")
    arguments = (redis_server.url, redis_server.prefix(), str(tmp_path))

    ran = []
    for what in ("begin", "resume", "begin"):
        command = (*program, *arguments, what)
        worker = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        ran.append(int(worker.stdout))

    assert ran == [2, 3, 2]
