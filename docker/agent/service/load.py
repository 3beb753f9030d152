"""Play many threads against the service: `python -m service.load --help`."""

import argparse
import asyncio
import os
import random
import signal
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import uuid4

import httpx

from langchain_quota import RedisStore
from langchain_quota.errors import QuotaStoreError

WORDS = ("oak", "ash", "elm", "pine", "birch", "larch", "rowan", "alder", "7", "42")
SHORT, LONG = (1, 5), (9, 12)
"""How many words are in a question: each is looked up, so a long one is a loop."""

LONG_SHARE = 0.15
LOOP_SHARE = 0.05
"""How many questions have the same word five times: looking it up again finds nothing new."""

USERS_SHARE = 4
"""How many threads a user has."""

TIMEOUT_SECONDS = 30.0
ANSWERED = 200
MOST = 1_000_000
USED_UP = 403
WAIT = 429

USER_LIMIT = "user"
"""The limit of a user's model calls in an hour."""

MORE = 10
"""How many more calls a user without any left is granted, once."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the load.

    Attributes:
        urls: The services' addresses.
        threads: Threads at the same time; each has one request at a time.
        rate: Requests a second, at most.
        seconds: When no more requests are made.
        seed: Repeats the questions.
    """

    urls: tuple[str, ...]
    threads: int
    rate: float
    seconds: float
    seed: int


@dataclass(slots=True)
class Summary:
    """The results.

    Attributes:
        statuses: Answers by HTTP status, or by the error without one.
        refusals: Refusals by limit and scope.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        rows = [("answers by status", self.statuses), ("refusals by limit", self.refusals)]
        return "\n".join(f"{name}: {_listed(counts)}" for name, counts in rows)


@dataclass(frozen=True, slots=True)
class Thread:
    """A conversation."""

    thread_id: str
    user_id: str


class Load:
    """Plays threads until the time is over.

    Args:
        options: What is played.
        store: Where users are granted more; `None` for nowhere.
    """

    def __init__(self, options: Options, store: RedisStore | None) -> None:
        self._options = options
        self._store = store
        self._granted: set[str] = set()
        self._random = random.Random(options.seed)  # noqa: S311 - questions, no secrets
        self._name = uuid4().hex[:6]
        self._made = 0
        self._idle = deque(self._new_thread() for _ in range(options.threads))
        self.summary = Summary()

    async def run(self, stop: asyncio.Event) -> None:
        """Play until the time is over or `stop` is set; requests that are running end first."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._options.seconds
        due = loop.time()
        # The services are asked directly, without a proxy.
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            while due < end and not stop.is_set():
                if self._idle:
                    group.create_task(self._ask(client, self._idle.popleft()))
                # A question that could not be asked in time is left out.
                due = max(due + 1 / self._options.rate, loop.time())
                await _sleep_until(min(due, end), stop)

    async def _ask(self, client: httpx.AsyncClient, thread: Thread) -> None:
        url = f"{self._random.choice(self._options.urls)}/threads/{thread.thread_id}/messages"
        question = {"text": self._question(), "user_id": thread.user_id}
        try:
            response = await client.post(url, json=question)
        except httpx.HTTPError as failed:
            self.summary.statuses[type(failed).__name__] += 1
            self._idle.append(thread)
            return
        self.summary.statuses[str(response.status_code)] += 1
        ended_by = self._count(response)
        # A user who has to wait, or whose conversation is over, leaves, and another one comes.
        waits = response.status_code == WAIT
        if waits and ended_by.get("limit") == USER_LIMIT:
            waits = not await self._grant(thread.user_id)
        over = response.status_code == USED_UP and ended_by.get("scope") == "thread"
        self._idle.append(self._new_thread() if waits or over else thread)

    async def _grant(self, user_id: str) -> bool:
        """Grant a user more calls of this hour, if that is new; whether they are granted."""
        if self._store is None or user_id in self._granted:
            return False
        self._granted.add(user_id)
        key, hour = f"model:user_id:{user_id}", timedelta(hours=1)
        try:
            await self._store.agrant(
                key, MORE, window=hour, reason="asked for more", by="load driver", id="load"
            )
        except QuotaStoreError as failed:
            self.summary.statuses[type(failed).__name__] += 1
            return False
        return True

    def _count(self, response: httpx.Response) -> dict[str, object]:
        """Count the refusals in an answer, and return what ended the run, if anything did."""
        try:
            body = response.json()
        except ValueError:
            return {}
        error: dict[str, object] = body.get("error") or {}
        for refusal in [*body.get("refusals", []), error]:
            if refusal.get("type") == "quota_exceeded":
                self.summary.refusals[f"{refusal['limit']} ({refusal['scope']})"] += 1
        return error

    def _question(self) -> str:
        kind = self._random.random()
        if kind < LOOP_SHARE:
            return " ".join([self._random.choice(WORDS)] * 5)
        bounds = LONG if kind < LOOP_SHARE + LONG_SHARE else SHORT
        return " ".join(self._random.choices(WORDS, k=self._random.randint(*bounds)))

    def _new_thread(self) -> Thread:
        self._made += 1
        user = self._made // USERS_SHARE
        return Thread(f"load-{self._name}-{self._made}", f"user-{self._name}-{user}")


async def _sleep_until(moment: float, stop: asyncio.Event) -> None:
    seconds = moment - asyncio.get_running_loop().time()
    try:
        await asyncio.wait_for(stop.wait(), max(0, seconds))
    except TimeoutError:
        return


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m service.load", description=__doc__)
    parser.add_argument("urls", nargs="*", metavar="url", help="of the service's replicas")
    parser.add_argument("--threads", type=_positive, default=20, help="at the same time")
    parser.add_argument("--rate", type=_positive, default=5, help="most requests a second")
    parser.add_argument("--seconds", type=_positive, default=60, help="when it stops")
    parser.add_argument("--seed", type=int, default=1, help="repeats the questions")
    given = parser.parse_args(arguments)
    urls = tuple(url.rstrip("/") for url in given.urls or ["http://127.0.0.1:8000"])
    return Options(urls, given.threads, given.rate, given.seconds, given.seed)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {MOST}")
    return int(text)


async def _main(options: Options) -> Summary:
    stop = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    url = os.environ.get("LANGCHAIN_QUOTA_REDIS_URL")
    store = RedisStore(url) if url else None
    load = Load(options, store)
    try:
        await load.run(stop)
    finally:
        if store is not None:
            await store.aclose()
    return load.summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, and print the summary; the exit code is 1 if nothing was answered."""
    options = _options(arguments)
    sys.stdout.write(
        f"{options.threads} threads, at most {options.rate} requests a second for "
        f"{options.seconds} s: {', '.join(options.urls)}\n"
    )
    sys.stdout.flush()
    summary = asyncio.run(_main(options))
    sys.stdout.write(f"{summary}\n")
    return 0 if summary.statuses[str(ANSWERED)] else 1


if __name__ == "__main__":
    sys.exit(main())
