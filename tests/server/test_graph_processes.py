"""A graph whose model and tools run in different processes, with one Redis and one checkpointer."""

import json
import subprocess
import sys
from pathlib import Path

from tests.server.redis import RedisServer

WORKER = """
import json, sys
from contextlib import closing
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import tools_condition
from langchain_quota import GraphQuota, ModelCallLimit, RedisStore, ToolCallLimit
from langchain_quota.testing import ScriptedChatModel

url, prefix, database, begins = sys.argv[1:]
ran = []

def search() -> str:
    "Search."
    ran.append("search")
    return "nothing"

saved = SqliteSaver.from_conn_string(database)
with closing(RedisStore(url, prefix=prefix)) as store, saved as saver:
    limits = GraphQuota([ToolCallLimit(run_limit=2), ModelCallLimit(run_limit=2)], store=store)
    llm = ScriptedChatModel(script=lambda messages: ["search"] * 3)
    model = limits.model(llm, [search])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", limits.tools([search]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    app = graph.compile(checkpointer=saver, interrupt_before=["tools"])
    given = {"messages": [("user", "hi")]} if begins == "begin" else None
    config = {"configurable": {"thread_id": "7"}}
    messages = app.invoke(given, config, durability="sync")["messages"]
    answers = [each.text for each in messages if each.type == "tool"]
    print(json.dumps([ran, len(llm.calls), answers, messages[-1].text]))
"""


def test_each_step_in_a_process_of_its_own(redis_server: RedisServer, tmp_path: Path) -> None:
    """What one process refuses another one does not run, and the run's counts go on."""
    given = [redis_server.url, redis_server.prefix(), str(tmp_path / "threads.sqlite")]

    def step(phase: str) -> list[object]:
        command = [sys.executable, "-c", WORKER, *given, phase]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found: list[object] = json.loads(done.stdout)
        return found

    refusal = "Tool call limit exceeded. Do not make additional tool calls."
    assert step("begin") == [[], 1, [], ""]
    ran, calls, answers, _ = step("resume")
    assert (ran, calls) == (["search"] * 2, 1)
    assert answers == ["nothing", "nothing", refusal]
    ran, calls, answers, last = step("resume")
    assert (ran, calls, answers) == ([], 0, ["nothing", "nothing", *[refusal] * 4])
    assert last == "Model call limits exceeded: run limit (2/2)"
