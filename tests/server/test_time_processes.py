"""A run that another process resumes goes on with the time that it has worked."""

import json
from pathlib import Path

import pytest

from tests.forked import run_python

WORKER = """
import asyncio, json, sys, time
from langchain.agents import create_agent
from langchain_quota import QuotaMiddleware, TimeLimit, usage
from langchain_quota.testing import ScriptedChatModel
from langgraph.types import Command, interrupt

saver_of, database, said = sys.argv[1:]
minutes = [0]
time.monotonic_ns = lambda: minutes[0] * 60 * 10**9

def script(messages):
    minutes[0] += 1
    return ["search", "ask"] if messages[-1].type == "human" else "done"

async def search() -> str:
    "Search."
    minutes[0] += 2
    return "nothing"

async def ask() -> str:
    "Ask a person."
    said = interrupt("Really?")
    minutes[0] += 1
    return said

async def main():
    if saver_of == "sqlite":
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver as Saver
    else:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver as Saver
    async with Saver.from_conn_string(database) as saver:
        await saver.setup()
        limit = TimeLimit(run_limit="5m", thread_limit="1h")
        model = ScriptedChatModel(script=script)
        agent = create_agent(
            model, [search, ask], middleware=[QuotaMiddleware([limit])], checkpointer=saver
        )
        config = {"configurable": {"thread_id": "7"}}
        given = Command(resume=said) if said else {"messages": [("user", "hi")]}
        result = await agent.ainvoke(given, config, durability="sync")
        used = usage(await agent.aget_state(config))
        answers = [each.text for each in result["messages"] if each.type == "tool"]
        spent = {**used.spent}, {**used.run_spent}
        print(json.dumps([answers, result["messages"][-1].text, *spent]))

asyncio.run(main())
"""


@pytest.mark.parametrize("saver", ["sqlite", "postgres"])
def test_a_run_that_another_process_resumes(
    saver: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What the model and the answered tools have worked counts on; the wait does not count."""
    database = str(tmp_path / "threads.sqlite")
    if saver == "postgres":
        database = request.getfixturevalue("postgres_server").database()

    def run(said: str) -> list[object]:
        done = run_python(WORKER, saver, database, said)
        assert done.returncode == 0, done.stderr
        found: list[object] = json.loads(done.stdout)
        return found

    run("")
    answers, text, *spent = run("yes")
    assert answers == ["nothing", "yes"]
    assert text == "done"
    # A minute of the model, two of `search`, one of `ask`, and one of the last answer.
    assert spent == [{"model.milliseconds": 300_000}] * 2
