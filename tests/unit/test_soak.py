"""The soak finds what grows, and its traffic does what it says."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from langchain_quota import MemoryStore
from langchain_quota.testing import captured_decisions
from tests.benchmarks import soak
from tests.benchmarks.soak import Sample, Traffic, grown, table

STEADY = Sample(memory=200, objects=100_000, series=5_000, files=15, tasks=10, threads=5)


def test_what_is_steady_has_not_grown() -> None:
    """What comes and goes is no growth, and neither is what comes before warm-up ends."""
    warming = [replace(STEADY, memory=each) for each in range(100, 130)]
    moving = [replace(STEADY, tasks=10 + each % 3, files=15 + each % 2) for each in range(70)]
    assert grown([*warming, *moving]) == []


@pytest.mark.parametrize(
    ("name", "each_time"),
    [
        *(("memory", 0.5), ("objects", 200), ("series", 4)),
        *(("files", 0.2), ("tasks", 0.2), ("threads", 0.2)),
    ],
)
def test_what_grows_is_found(name: str, each_time: float) -> None:
    """A value that goes up all the time is named, with its early and its late value."""
    samples = [
        replace(STEADY, **{name: getattr(STEADY, name) + each_time * index}) for index in range(100)
    ]
    [found] = grown(samples)
    assert found.startswith(f"{name} ")
    assert " -> " in found
    assert len(table(samples).rows) == 6


async def test_the_traffic_has_all_that_may_leave_something_behind() -> None:
    """Its runs invent tools, ask, get grants, and have agents of their own; nothing fails."""
    store = MemoryStore()
    traffic = Traffic([store])
    numbers = [1, soak.NEW_AGENT, soak.ASKS, soak.GRANTS, soak.CANCELS]
    with captured_decisions() as decisions:
        for index in numbers:
            await traffic.run(index)
    assert {f"invented-{index}" for index in numbers} >= {
        each.call.tool for each in decisions if each.call.tool not in {None, "search", "mail"}
    }
    assert {"shared-0", f"agent-{soak.NEW_AGENT}"} <= {each.call.agent for each in decisions}
    shown = generate_latest(traffic.registry).decode()
    assert 'langchain_quota_answers_total{agent="shared-0",answer="approve",' in shown
    assert "langchain_quota_errors_total{" not in shown
    assert list(store.grants())


async def test_a_soak_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its samples, and ends when the runs that go on have ended."""
    monkeypatch.setattr(soak, "SAMPLES", 2)
    traffic = Traffic([MemoryStore()])
    found: list[Sample] = []
    async with asyncio.timeout(60):
        samples = await soak.soak(traffic, 2, 0.2, found.append)
    assert samples == found
    assert len(found) == 2
    assert min(found[-1].series, found[-1].memory, found[-1].files) > 0
