"""An agent as one worker process after another runs it: a run that waits for a human, or resumes.

`python -m tests.servers.resumable URL PREFIX FOLDER begin|resume` prints how many searches
ran.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command
from prometheus_client import CollectorRegistry

from langchain_quota import RedisStore, Telemetry
from tests.agent import trees


async def main(arguments: Sequence[str]) -> None:
    """Run, or resume, thread 7."""
    url, prefix, folder, what = arguments
    telemetry = Telemetry(registry=CollectorRegistry(), spans="off")
    store = RedisStore(url, prefix=prefix, timeout=30)
    tree = trees.Tree(telemetry, store=store)
    async with AsyncSqliteSaver.from_conn_string(str(Path(folder, "threads.db"))) as saver:
        given: object = trees.ASKED if what == "begin" else Command(resume="yes")
        await trees.in_one_tool(tree, saver).ainvoke(given, trees.config())
    await store.aclose()
    print(len(tree.ran))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
