"""Processes that are killed at any moment, and started again: limits hold, and counts add up."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import messages
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.redis import RedisStore
from tests.servers.lives import (
    DONE,
    MODEL_LIMIT,
    RUN_LIMIT,
    THREAD_LIMIT,
    Diary,
    Order,
    Zygote,
    zygote,
)
from tests.servers.redis import RedisServer
from tests.signals import needs_inline

KILLS = 14
"""How many of a thread's processes are killed."""
NEW_RUNS = 0.2
"""The share of processes that begin a new run though one waits to be resumed."""
PATIENCE = 60
"""Seconds after which a process that may come to its end would be killed, too."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Lived:
    """What became of a thread.

    Attributes:
        diary: All that its processes wrote.
        killed: The ids of those that were killed.
    """

    diary: list[Entry]
    killed: set[int]

    def entries(self, what: str) -> list[Entry]:
        return [each for each in self.diary if each["what"] == what]

    def by_run(self, what: str) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = defaultdict(list)
        for each in self.entries(what):
            found[each["run"]].append(each)
        return found

    @property
    def started(self) -> set[str]:
        """The calls that started; one that started twice is one call."""
        return {each["call"] for each in self.entries("started")}

    @property
    def answers(self) -> Mapping[str, str]:
        """The answers in the history, by call."""
        found: Mapping[str, str] = self.entries("ends")[-1]["answers"]
        return found

    def answered(self, *texts: str) -> set[str]:
        return {call for call, text in self.answers.items() if text in texts}


@pytest.fixture(scope="module")
def program() -> Iterator[Zygote]:
    """What starts the processes, and kills them."""
    with zygote() as program:
        yield program


def lived(program: Zygote, order: Order, folder: Path, threads: int) -> list[Lived]:
    """Kill the processes of threads again and again, and let the last of each come to its end.

    Args:
        program: What starts them.
        order: What they live; the folder is set here.
        folder: Where all is kept.
        threads: How many.
    """
    chance = random.Random()  # noqa: S311 - no secret
    found = []

    def live(name: str, *, begin: bool, seconds: float) -> Any:
        place = folder / name
        place.mkdir(exist_ok=True)
        given = replace(order, folder=str(place), prefix=f"{order.prefix}.{name}")
        return program.live(replace(given, begin=begin, seconds=seconds))

    span = live("measured", begin=True, seconds=PATIENCE).seconds
    for number in range(threads):
        killed: set[int] = set()
        while len(killed) < KILLS:
            begin = chance.random() < NEW_RUNS
            life = live(str(number), begin=begin, seconds=chance.uniform(0, span))
            killed |= {life.pid} if life.killed else set()
        assert not live(str(number), begin=True, seconds=PATIENCE).killed
        found.append(Lived(Diary(str(folder / str(number))).read(), killed))
    return found


def check(thread: Lived) -> None:
    """What holds wherever the counts are."""
    assert thread.entries("invalid") == []
    assert len(thread.started) <= THREAD_LIMIT
    for run, starts in thread.by_run("started").items():
        assert len({each["call"] for each in starts}) <= RUN_LIMIT, run
    lives = thread.by_run("lives")
    for run, requests in thread.by_run("asked").items():
        # The step in which a process was killed is made again by the next one.
        again = sum(each["pid"] in thread.killed for each in lives[run])
        assert len(requests) <= MODEL_LIMIT + again, run
    assert thread.answered(DONE) <= thread.started
    makers = {call: each["pid"] for each in thread.entries("asked") for call in each["calls"]}
    lost = makers.keys() - thread.answers.keys()
    assert {makers[call] for call in lost} <= thread.killed


def test_counts_in_the_state(program: Zygote, tmp_path: Path) -> None:
    """With durability="sync" the state exceeds no limit, and counts all that may have run."""
    order = Order(durability="sync", latency=0.002)
    for thread in lived(program, order, tmp_path, 2):
        check(thread)
        charged = thread.entries("ends")[-1]["charged"]
        assert len(thread.started) <= charged <= THREAD_LIMIT
        assert charged <= len(thread.answered(DONE, messages.ABANDONED))


@pytest.mark.parametrize(
    ("inline", "threads"), [(False, 2), pytest.param(True, 1, marks=needs_inline)]
)
def test_counts_in_redis(
    program: Zygote, tmp_path: Path, redis_server: RedisServer, *, inline: bool, threads: int
) -> None:
    """With durability="async" checkpoints are lost, and still the store exceeds no limit."""
    prefix = redis_server.prefix()
    order = Order(
        durability="async", latency=0.02, inline=inline, redis=redis_server.url, prefix=prefix
    )
    for number, thread in enumerate(lived(program, order, tmp_path, threads)):
        check(thread)
        own = f"{prefix}.{number}"
        with closing(RedisStore(redis_server.url, prefix=own, timeout=30)) as store:
            _check_counts(thread, {use.key: use.used for use in store.usages()})


def _check_counts(thread: Lived, counts: Mapping[str, int]) -> None:
    """That each run has one count, that none is below what ran, and that all is accounted for."""
    runs = {
        CountKey.parse(key).subject: used
        for key, used in counts.items()
        if key.startswith("act:run:")
    }
    assert len(thread.started) <= counts["act:thread:7"] == sum(runs.values()) <= THREAD_LIMIT
    started = thread.by_run("started")
    for starts in started.values():
        (name,) = {each["name"] for each in starts}
        assert len({each["call"] for each in starts}) <= runs[name] <= RUN_LIMIT
    assert len({each["name"] for each in thread.entries("started")}) == len(started)

    charged, asked = _by_id(thread.entries("charged")), _by_id(thread.entries("asks"))
    doubtful = asked.keys() - charged.keys()
    for key, used in counts.items():
        known = sum(each.get(key, 0) for each in charged.values())
        assert known <= used <= known + sum(asked[name].get(key, 0) for name in doubtful), key
    askers = {each["pid"] for each in thread.entries("asks") if each["id"] in doubtful}
    assert askers <= thread.killed


def _by_id(entries: Sequence[Entry]) -> dict[str, dict[str, int]]:
    """The charges of each request: made again, it is not charged again."""
    return {each["id"]: each["charges"] for each in entries}
