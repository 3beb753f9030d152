"""Observers of decisions, sync and async; checked by mypy and pyright, never run."""

import functools
import queue
from collections.abc import Awaitable, Callable

from langchain_quota import Decision, ModelCallLimit, QuotaMiddleware

limits = [ModelCallLimit(run_limit=10)]
seen: list[Decision] = []
jobs: queue.Queue[Decision] = queue.Queue()


def sync(decision: Decision) -> None:
    seen.append(decision)


async def awaited(decision: Decision) -> None:
    sync(decision)


async def with_note(note: str, decision: Decision) -> None:
    sync(decision)


class Billing:
    async def __call__(self, decision: Decision) -> None:
        sync(decision)

    def charge(self, decision: Decision) -> None:
        sync(decision)


def either(decision: Decision) -> Awaitable[None] | None:
    return None if decision.refused_by else awaited(decision)


# One.
QuotaMiddleware(limits, on_decision=sync)
QuotaMiddleware(limits, on_decision=awaited)
QuotaMiddleware(limits, on_decision=either)
QuotaMiddleware(limits, on_decision=Billing())
QuotaMiddleware(limits, on_decision=Billing().charge)
QuotaMiddleware(limits, on_decision=functools.partial(with_note, "note"))
QuotaMiddleware(limits, on_decision=seen.append)
QuotaMiddleware(limits, on_decision=jobs.put_nowait)
QuotaMiddleware(limits, on_decision=lambda decision: print(decision.outcome))

# Several.
QuotaMiddleware(limits, on_decision=())
QuotaMiddleware(limits, on_decision=[sync, awaited, Billing(), seen.append])
QuotaMiddleware(limits, on_decision=(sync, awaited))
several: list[Callable[[Decision], None]] = [sync, seen.append]
QuotaMiddleware(limits, on_decision=several)


def of_outcome(outcome: str) -> None:
    """Takes no decision."""


def with_answer(decision: Decision) -> str:
    return decision.outcome


# Not these.
QuotaMiddleware(limits, on_decision=of_outcome)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=with_answer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=with_note)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=[sync, "log"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
