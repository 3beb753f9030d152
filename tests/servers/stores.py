"""Stores for tests: both kinds, each in its sync and its async form, and what they are asked."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_quota.reservation import Cap, Grant, Reservation, Settlement, Slot
from langchain_quota.stores import KeyUse
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore

_numbers = itertools.count()


@dataclass(frozen=True)
class Ledger:
    """A store in one of its forms."""

    store: MemoryStore | RedisStore
    is_async: bool

    async def reserve(self, reservation: Any) -> Grant:
        if self.is_async:
            return await self.store.areserve(reservation)
        return self.store.reserve(reservation)

    async def peek(self, keys: Any) -> tuple[KeyUse | None, ...]:
        if self.is_async:
            return await self.store.apeek(keys)
        return self.store.peek(keys)

    async def reset(self, keys: Any) -> None:
        if self.is_async:
            await self.store.areset(keys)
        else:
            self.store.reset(keys)

    async def used(self, *keys: str) -> list[int | None]:
        """The counts under keys; `None` where there is none."""
        return [None if use is None else use.used for use in await self.peek(keys)]


def fresh(what: str) -> str:
    """A name that was not given before."""
    return f"{what}-{next(_numbers)}"


def slot(key: str | None, limit: int | None = None, used: int = 0, **cap: Any) -> Slot:
    """A slot with one cap, or none."""
    caps = () if limit is None else (Cap(cap.pop("name", "limit"), limit, **cap),)
    return Slot(key, used, None, caps)


def batch(
    slots: Sequence[Slot],
    *charges: Mapping[int, int],
    id: str | None = None,  # noqa: A002 - the reservation's field
    attempt: str | None = None,
    stops: Mapping[str, int] | None = None,
    settlements: Sequence[Settlement] = (),
) -> Reservation:
    """A reservation, with an id and an attempt of its own."""
    return Reservation(
        id=fresh("id") if id is None else id,
        attempt=fresh("attempt") if attempt is None else attempt,
        slots=tuple(slots),
        charges=charges,
        stops=stops or {},
        settlements=tuple(settlements),
    )


def calls(key: str, number: int, limit: int = 100, **options: Any) -> Reservation:
    """A number of calls, each charged to one key."""
    return batch([slot(key, limit)], *[{0: 1}] * number, **options)


def settling(*settlements: Settlement) -> Reservation:
    """Settlements, and nothing else."""
    return batch([], settlements=settlements)
