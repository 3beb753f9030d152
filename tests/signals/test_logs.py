"""The log lines about limits: when, how severe, and what they say."""

import logging
from collections.abc import Sequence

import pytest

from langchain_quota import ConcurrencyLimit, MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import Scene, asking
from tests.telemetry import Signals, attributes, telling

SEARCHES = asking(*["search"] * 4)
Log = pytest.LogCaptureFixture
ADA = {"user_id": "ada@example.org"}


@pytest.fixture
def log(caplog: Log) -> Log:
    """What is logged, also for developers."""
    caplog.set_level(logging.DEBUG, logger="langchain_quota")
    return caplog


def lines(log: Sequence[logging.LogRecord]) -> list[str]:
    """The level and text of each line, without what is the same in all."""
    same = "agent 'unnamed', thread 'thread-1', "
    return [f"{each.levelname} {each.getMessage().replace(same, '')}" for each in log]


NEAR = "limit 'tool:search' near:"
LINES: list[tuple[str, Limit, list[str]]] = [
    (
        "a run",
        ToolCallLimit("search", run_limit=3, near=0.5),
        [
            f"INFO {NEAR} 2 of 3 (run_limit)",
            "WARNING limit 'tool:search' exhausted: 3 of 3 (run_limit)",
            "DEBUG limit 'tool:search' refused: 3 of 3 (run_limit)",
        ],
    ),
    ("a thread", ToolCallLimit("search", thread_limit=5), [f"INFO {NEAR} 4 of 5 (thread_limit)"]),
    (
        "dry run",
        ToolCallLimit("search", run_limit=3, enforce=False, name="trial"),
        ["DEBUG limit 'trial' would refuse: 4 of 3 (run_limit)"],
    ),
    (
        "a quota",
        ToolCallLimit("search", quotas=[Quota(3, per="user_id")]),
        [
            "WARNING limit 'tool:search' exhausted: 3 of 3 (quota 'user_id')",
            "DEBUG limit 'tool:search' refused: 3 of 3 (quota 'user_id')",
        ],
    ),
    ("far away", ToolCallLimit("search", run_limit=99), []),
    (
        "at once",
        ConcurrencyLimit("search", max_concurrency=3, wait=0),
        ["DEBUG limit 'concurrency:search' refused: 4 of 3 (concurrency)"],
    ),
]


@pytest.mark.parametrize(
    ("limit", "told"), [row[1:] for row in LINES], ids=[row[0] for row in LINES]
)
async def test_lines(limit: Limit, told: list[str], log: Log, signals: Signals) -> None:
    """Near is INFO, used up is WARNING, a refusal is DEBUG; each names the limit, and no user."""
    await Scene(signals, SEARCHES, [limit], store=MemoryStore(), context=ADA).play()
    assert lines(log.records) == told
    assert not any("ada@" in repr(vars(each)) for each in log.records)


async def test_a_line_names_the_customer(log: Log) -> None:
    """With a label, what is near, exhausted or refused of a quota says whose it is."""
    signals = telling(subject_label={"user_id": lambda user: user[:3]})
    limits = [ToolCallLimit("search", quotas=[Quota(3, per="user_id")], near=0.5)]
    scene = Scene(signals, SEARCHES, limits, store=MemoryStore())
    for user in ("ada", "bob"):
        log.clear()
        await scene.play(context={"user_id": f"{user}@example.org"})
        ends = [f"{n} of 3 (quota 'user_id' of '{user}')" for n in (2, 3, 3)]
        assert [each.split(": ")[1] for each in lines(log.records)] == ends
        assert {vars(each)["quota_subject"] for each in log.records} == {user}


async def test_no_name_can_forge_a_line(log: Log, signals: Signals) -> None:
    """Line breaks in the name of a thread, a tool or an agent stay within the line."""
    forged = "x\nWARNING langchain_quota: all is well\u2028"
    call = {"name": forged, "args": {}, "id": "a", "type": "tool_call"}
    limits = [ToolCallLimit(forged, thread_limit=0)]
    await Scene(signals, asking(call), limits, name=forged, thread_id=forged).play()
    assert [len(each.getMessage().splitlines()) for each in log.records] == [1, 1]


async def test_logs_and_spans_name_every_agent(log: Log) -> None:
    """The bound on labels of agents bounds metrics; logs and spans name the agent itself."""
    signals = telling(max_agents=0)
    limits: list[Limit] = [ToolCallLimit("serach", run_limit=1), ModelCallLimit(run_limit=1)]
    await Scene(signals, asking("search"), limits, name="boss").play()
    assert len(log.records) >= 2
    assert all("agent 'boss'" in each.getMessage() for each in log.records)
    assert {attributes(each)["gen_ai.agent.name"] for each in signals.decision_spans()} == {"boss"}


async def test_a_store_that_is_nearly_full(log: Log, signals: Signals) -> None:
    """At 80% of what cannot be dropped there is one line, before a call is refused for it."""
    calls = ModelCallLimit(quotas=[Quota(9, per="user_id")])
    scene = Scene(signals, ["Hi!"] * 5, [calls], store=MemoryStore(max_keys=5))
    logged = []
    for user in range(5):
        await scene.play(context={"user_id": str(user)})
        logged.append(sum("nearly full" in each.message for each in log.records))
    assert logged == [0, 0, 0, 1, 1]
    line = "WARNING the store is nearly full: 4 of at most 5 counts cannot be dropped"
    assert line in lines(log.records)
