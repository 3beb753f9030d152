"""Processes that are forked while threads check: no child waits for what a thread held.

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
from itertools import count, product
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
    MemoryStore,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    ToolCallLimitMiddleware,
    start_metrics_server,
)
from langchain_quota.core.admission import Correction
from langchain_quota.middleware.corrections import CorrectionQueue
from langchain_quota.testing import ScriptedChatModel, captured_decisions
from tests.forked import ROOT
from tests.scene import recording

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that can fork")

CHILDREN = 20
PATIENCE = 30.0
"""Seconds after which a child counts as hung."""


class Checks:
    """All that checks in one process: hooks, called as densely as can be, and an agent."""

    def __init__(self) -> None:
        seen: list[Any] = []
        shared = ToolCallLimit(
            "search", thread_limit=10**6, quotas=[Quota(10**6, per="thread", name="all")]
        )
        # An observer makes it remember whom it has warned.
        options: Any = {"store": MemoryStore(), "on_decision": seen.append}
        drop_in = ToolCallLimitMiddleware[Any, Any](thread_limit=2)
        limits = [shared, ToolCallLimit(run_limit=2)]
        self._quotas: list[Any] = [QuotaMiddleware(limits, **options), drop_in]
        self._tasks = count()
        self._agent: Any = create_agent(
            ScriptedChatModel(script=[["search"] * 3, "Done."] * (CHILDREN + 1)),
            [recording("search", [])],
            middleware=[QuotaMiddleware([ToolCallLimit("search", run_limit=2)])],
            checkpointer=InMemorySaver(),
            name="boss",
        )

    def check(self) -> None:
        """Three searches, by the counts of the store and by those of the state, in both forms."""
        number = next(self._tasks)
        calls = [{"name": "search", "args": {}, "id": f"call-{each}"} for each in range(3)]
        state = {"messages": [AIMessage("", tool_calls=calls, id=f"message-{number}")]}
        # Few threads, so that a child goes on with what was just being changed.
        info = {"thread_id": f"thread-{number % 3}", "checkpoint_ns": ""}
        for form, each in product(("sync", "async"), self._quotas):
            execution = SimpleNamespace(**info, task_id=f"{os.getpid()}-{number}-{form}")
            runtime = SimpleNamespace(context=None, execution_info=execution)
            with captured_decisions() as decisions:
                if form == "sync":
                    each.after_model(state, runtime)
                else:
                    asyncio.run(each.aafter_model(state, runtime))
            assert [str(each.outcome) for each in decisions] == ["allowed", "allowed", "blocked"]

    def run(self) -> None:
        """A whole run of the agent."""
        config = {"configurable": {"thread_id": f"run-{os.getpid()}"}}
        with captured_decisions() as decisions:
            self._agent.invoke({"messages": [("user", "Find it!")]}, config)
        assert [str(each.outcome) for each in decisions] == ["allowed", "allowed", "blocked"]


def child(checks: Checks) -> None:
    """Check and tell, as the parent does; nothing fails on the way."""
    for _ in range(3):
        checks.check()
    checks.run()
    names = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    assert {"langchain_quota_calls_total", "langchain_quota_thread_used"} <= names
    assert "langchain_quota_errors_total" not in names, generate_latest().decode()
    with start_metrics_server(port=0):
        pass


def main() -> int:
    """Fork children while threads check; the number of those that failed."""
    logging.disable()
    checks = Checks()
    checks.check()
    checks.run()
    over = Event()

    def work() -> None:
        while not over.is_set():
            checks.check()

    threads = [Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(CHILDREN):
        time.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            # Where it hangs is told before it is ended.
            faulthandler.dump_traceback_later(PATIENCE / 2)
            signal.alarm(int(PATIENCE))
            try:
                child(checks)
            except BaseException:  # noqa: BLE001 - whatever it is, the child ends here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    over.set()
    for thread in threads:
        thread.join(PATIENCE)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    # The parent's locks are free again.
    checks.check()
    return failed + sum(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("workers", [False, True], ids=["alone", "multi-process"])
def test_children_check(workers: bool, tmp_path: Path) -> None:  # noqa: FBT001 - pytest's argument
    """Of children forked while threads check and tell, each checks and tells without a failure."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if workers:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    done = subprocess.run(
        # From 3.12 on Python warns of forks beside threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.server.test_forks"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_while_corrections_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child sends what waits: no answer to the request of its parent reaches it."""
    queue = CorrectionQueue()
    queue.add([Correction("undo", {"a:run:1": 0})])
    with queue.carried("") as sent, queue.carried("") as meanwhile, monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        with queue.carried("") as of_child:
            assert [bool(each) for each, _ in (sent, meanwhile, of_child)] == [True, False, True]


if __name__ == "__main__":
    sys.exit(main())
