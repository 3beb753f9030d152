"""Play many threads against the service: `python -m service.load --help`."""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from uuid import uuid4

import httpx

WORDS = ("oak", "ash", "elm", "pine", "birch", "larch", "rowan", "alder", "7", "42")
THREADS_OF_A_USER = 4
MORE_CALLS = 10
"""How many more model calls a user without any left is granted, once."""


def _question() -> str:
    """Return words to look up: a few, more than a run may, or the same one in a loop."""
    kinds = [(WORDS, random.randint(1, 5)), (WORDS, random.randint(9, 12)), (WORDS[:1], 5)]
    words, count = random.choices(kinds, (80, 15, 5))[0]
    return " ".join(random.choices(words, k=count))


async def _play(options: argparse.Namespace) -> Counter[str]:
    """Ask on threads, one question at a time on each, and return the answers by status."""
    # Whoever gives wrong options need not wait for LangChain.
    from langchain_quota import QuotaMiddleware, QuotaStoreError, RedisStore  # noqa: PLC0415
    from service.agent import user_limit  # noqa: PLC0415

    quota = None
    if os.environ.get("LANGCHAIN_QUOTA_REDIS_URL"):
        quota = QuotaMiddleware([user_limit(1)], store=RedisStore())
    answers, granted, name, numbers = Counter[str](), set[str](), uuid4().hex[:6], itertools.count()

    async def play(delay: float) -> None:
        """Ask on a thread until it is over, and then on a new one."""
        await asyncio.sleep(delay)
        number = next(numbers)
        while True:
            user = f"user-{name}-{number // THREADS_OF_A_USER}"
            if not await ask(f"load-{name}-{number}", user):
                number = next(numbers)
            await asyncio.sleep(options.threads / options.rate)

    async def ask(thread: str, user: str) -> bool:
        """Ask a question, and return whether the user has another one on this thread."""
        url = f"{random.choice(options.urls)}/threads/{thread}/messages"
        body, headers = {"text": _question()}, {"x-forwarded-user": user}
        try:
            response = await client.post(url, json=body, headers=headers)
            answers[str(response.status_code)] += 1
            if response.status_code == httpx.codes.FORBIDDEN:
                return bool(response.json()["detail"]["scope"] != "thread")
            return response.status_code != httpx.codes.TOO_MANY_REQUESTS or await grant(user)
        except (httpx.HTTPError, QuotaStoreError) as error:
            answers[type(error).__name__] += 1
            return True

    async def grant(user: str) -> bool:
        """Grant a user more calls of this hour, if that is new; return whether it is."""
        if quota is None or user in granted:
            return False
        granted.add(user)
        why = "asked for more"
        await quota.agrant("user", MORE_CALLS, user_id=user, reason=why, by="load driver")
        return True

    # The services are asked directly, without a proxy.
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        plays = (play(number / options.rate) for number in range(options.threads))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*plays), options.seconds)
    return answers


def main() -> None:
    """Play, and print the answers by status; the exit code is 1 if nothing was answered."""
    parser = argparse.ArgumentParser(prog="python -m service.load", description=__doc__)
    local = ["http://127.0.0.1:8000"]
    parser.add_argument("urls", nargs="*", metavar="url", default=local, help="of the replicas")
    parser.add_argument("--threads", type=int, default=20, help="at the same time")
    parser.add_argument("--rate", type=float, default=5, help="most questions a second")
    parser.add_argument("--seconds", type=float, default=60, help="when it stops")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the exit code of a stop is 0
    answers = asyncio.run(_play(parser.parse_args()))
    sys.stdout.write(f"answers by status: {dict(sorted(answers.items()))}\n")
    sys.exit(not answers["200"])


if __name__ == "__main__":
    main()
