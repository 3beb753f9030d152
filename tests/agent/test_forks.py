"""Processes that are forked while threads judge: no child waits for what a thread held.

The parent is this file, run as a program: pytest's own threads are not forked.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import REGISTRY, generate_latest

from langchain_quota import (
    Decision,
    Limit,
    MemoryStore,
    ModelCallLimit,
    Outcome,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitMiddleware,
    start_metrics_server,
)
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.agent.rules import recording

ROOT = Path(__file__).parents[2]
MODULE = "tests.agent.test_forks"
CHILDREN = 20
THREADS = ("thread-1", "thread-2", "thread-3")
"""Few, so that a child goes on with what was just being changed."""
PATIENCE = 30.0
"""Seconds after which a child counts as hung."""


def observe(_decision: Decision) -> None:
    """Make the middlewares remember whom they have warned."""


class Judges:
    """All that judges in one process: hooks, called as densely as can be, and an agent."""

    def __init__(self) -> None:
        shared: list[Limit] = [
            ToolCallLimit("search", thread_limit=10**6, quotas=[Quota(10**6, name="all")]),
            ToolCallLimit(run_limit=2),
        ]
        self._quota: Any = QuotaMiddleware(shared, store=MemoryStore(), on_decision=observe)
        self._drop_in: Any = ToolCallLimitMiddleware(thread_limit=2)
        self._tasks = count()
        limits: list[Limit] = [ModelCallLimit(run_limit=2), ToolCallLimit("search", run_limit=2)]
        model = ScriptedChatModel(script=[["search"] * 3, "Done."] * (CHILDREN + 1))
        self._agent: Any = create_agent(
            model,
            [recording("search", [])],
            middleware=[QuotaMiddleware(limits)],
            checkpointer=InMemorySaver(),
            name="boss",
        )

    def judge(self) -> None:
        """Three searches, by the counts of the store and by those of the state, in both forms."""
        number = next(self._tasks)
        calls = [{"name": "search", "args": {}, "id": f"call-{each}"} for each in range(3)]
        state = {"messages": [AIMessage("", tool_calls=calls, id=f"message-{number}")]}
        thread = THREADS[number % len(THREADS)]
        info = {"thread_id": thread, "task_id": f"{os.getpid()}-{number}", "checkpoint_ns": ""}
        runtime = SimpleNamespace(context=None, execution_info=SimpleNamespace(**info))
        for each in (self._quota, self._drop_in):
            with captured_decisions() as sync:
                each.after_model(state, runtime)
            info["task_id"] += "a"
            runtime.execution_info = SimpleNamespace(**info)
            with captured_decisions() as asynchronous:
                asyncio.run(each.aafter_model(state, runtime))
            expected = [Outcome.ALLOWED, Outcome.ALLOWED, Outcome.BLOCKED]
            assert [decision.outcome for decision in sync] == expected
            assert [decision.outcome for decision in asynchronous] == expected

    def run(self) -> None:
        """A whole run of the agent."""
        config = {"configurable": {"thread_id": f"run-{os.getpid()}"}}
        with captured_decisions() as decisions:
            self._agent.invoke({"messages": [("user", "Find it!")]}, config)
        assert [each.call.kind for each in decisions] == ["model", "tool", "tool", "tool", "model"]
        assert sum(each.outcome is Outcome.BLOCKED for each in decisions) == 1


def child(judges: Judges) -> None:
    """Judge and tell, as the parent does; nothing fails on the way."""
    for _ in THREADS:
        judges.judge()
    judges.run()
    names = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    assert "langchain_quota_calls_total" in names
    assert "langchain_quota_thread_used" in names
    assert "langchain_quota_errors_total" not in names, generate_latest().decode()
    with start_metrics_server(port=0):
        pass


def main() -> int:
    """Fork children while threads judge; the number of those that failed."""
    logging.disable()
    judges = Judges()
    judges.judge()
    judges.run()
    over = Event()

    def work() -> None:
        while not over.is_set():
            judges.judge()

    threads = [Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(CHILDREN):
        time.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            # Where it hangs is told before it is killed.
            faulthandler.dump_traceback_later(PATIENCE / 2)
            try:
                child(judges)
            except BaseException:  # noqa: BLE001 - whatever it is, the child ends here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    over.set()
    for thread in threads:
        thread.join(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    failed = sum(ended(pid, deadline) != 0 for pid in children)
    # The parent's locks are free again.
    judges.judge()
    return failed + sum(thread.is_alive() for thread in threads)


def ended(pid: int, deadline: float) -> int:
    """How a child ends; one that hangs is killed."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.005)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that can fork")
@pytest.mark.parametrize("workers", [False, True], ids=["alone", "multi-process"])
def test_children_judge(workers: bool, tmp_path: Path) -> None:  # noqa: FBT001 - pytest's argument
    """Of children forked while threads judge and tell, each judges and tells without a failure."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    if workers:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    done = subprocess.run(
        # From 3.12 on Python warns of forks beside threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", MODULE],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")


if __name__ == "__main__":
    sys.exit(main())
