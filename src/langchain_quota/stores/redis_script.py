"""What the script in Redis is asked, and what it answers."""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha1, sha256
from importlib.resources import files
from typing import Any

from langchain_quota.errors import QuotaStoreError
from langchain_quota.reservation import Grant, Reservation, Settlement
from langchain_quota.stores import (
    GRACE,
    REMEMBERED,
    SETTLED,
    KeyUse,
    chargings,
    check_fits,
    idle_time,
    window_end,
)

SCRIPT = (files("langchain_quota.stores") / "reserve.lua").read_text("utf-8")
SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

MAX_COUNT = 2**53 - 1
"""The largest count, seed and amount: scripts compute in floating point."""

_NONE = -1
_ODD = -2


class Names:
    """The names of keys in Redis.

    Args:
        prefix: What all begin with, as a hash tag.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{{{prefix}}}:"
        self._counts = f"{self._prefix}count:"

    def count(self, key: str) -> bytes:
        """Where a count is kept."""
        return f"{self._counts}{key}".encode(errors="surrogatepass")

    def key(self, name: bytes | str) -> str:
        """The key of a count; the client may have decoded its name.

        Raises:
            UnicodeDecodeError: It is no name of ours.
        """
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
        return text.removeprefix(self._counts)

    def marker(self, kind: str, name: str) -> bytes:
        """Where something is remembered by a name of any length."""
        digest = sha256(name.encode(errors="surrogatepass")).hexdigest()
        return f"{self._prefix}{kind}:{digest}".encode()


class Question:
    """What the script is asked.

    Args:
        names: The names of keys.
        op: The operation.
        idle: How long a count without a window is kept, in seconds.
    """

    def __init__(self, names: Names, op: str, idle: int) -> None:
        self._names = names
        self._idle = idle
        self._keys: dict[bytes, int] = {}
        self._values: dict[str, Any] = {
            "op": op,
            "grace": GRACE,
            "remembered": REMEMBERED,
            "settled": SETTLED,
        }

    @classmethod
    def peek(cls, names: Names, keys: Iterable[str]) -> "Question":
        """What is kept under keys."""
        question = cls(names, "peek", 0)
        for key in keys:
            question._count(key)
        return question

    @classmethod
    def reset(cls, names: Names, keys: Sequence[str], idle: int) -> "Question":
        """That counts become 0."""
        question = cls(names, "reset", idle)
        for key in keys:
            question._count(key)
        question._values["keeps"] = [
            question._keep(key, window_end(key)) for key in dict.fromkeys(keys)
        ]
        return question

    @classmethod
    def reserve(cls, names: Names, reservation: Reservation, idle: int) -> "Question":
        """A reservation."""
        question = cls(names, "reserve", idle)
        stops = {name: number for number, name in enumerate(reservation.stops, 1)}
        question._values |= {
            "settlements": [question._settlement(each) for each in reservation.settlements],
            "attempt": question._marker("attempt", reservation.attempt),
            "answer": question._marker("answer", reservation.id),
            "slots": [
                {
                    "key": 0 if slot.key is None else question._count(slot.key),
                    "used": _exact(slot.used),
                    "caps": [
                        [_limit(cap.limit), stops.get(cap.name, 0)]
                        for cap in slot.caps
                        if cap.enforced
                    ],
                }
                for slot in reservation.slots
            ],
            "charges": [
                [[index + 1, _exact(amount)] for index, amount in charge.items()]
                for charge in reservation.charges
            ],
            "stops": [*reservation.stops.values()],
            "keeps": [
                [*question._keep(key, charging.ends), _limit(charging.limit)]
                for key, charging in chargings(reservation).items()
            ],
        }
        return question

    def arguments(self) -> tuple[int, *tuple[bytes, ...], str]:
        """The arguments of `EVALSHA` behind the script: number of keys, keys, values."""
        return (len(self._keys), *self._keys, json.dumps(self._values))

    def again(self, answer: Sequence[Any]) -> bool:
        """Whether the script must be asked again: there were keys that nobody knew of."""
        if _word(answer[0]) != "again":
            return False
        for name in answer[1:]:
            self._index(name if isinstance(name, bytes) else name.encode())
        return True

    def _settlement(self, settlement: Settlement) -> dict[str, Any]:
        return {
            "marker": self._index(self._names.marker("settled", settlement.id)),
            "attempt": self._marker("attempt", settlement.attempt),
            "answer": self._marker("answer", settlement.reservation),
            "amounts": [
                [
                    *self._keep(key, window_end(key)),
                    _exact(amount),
                    _exact(settlement.starts.get(key, 0)),
                ]
                for key, amount in settlement.amounts.items()
            ],
        }

    def _keep(self, key: str, ends: int | None) -> tuple[int, int, int]:
        return self._count(key), _ends(ends), idle_time(key, self._idle)

    def _count(self, key: str) -> int:
        return self._index(self._names.count(key))

    def _marker(self, kind: str, name: str | None) -> int:
        return self._index(self._names.marker(kind, name)) if name else 0

    def _index(self, name: bytes) -> int:
        return self._keys.setdefault(name, len(self._keys) + 1)


def grant(answer: Sequence[Any], reservation: Reservation) -> Grant:
    """The answer to a reservation.

    Raises:
        QuotaStoreError: It was refused in advance, or was granted to a batch of another form.
    """
    if _word(answer[0]) == "refused":
        raise QuotaStoreError("the attempt was settled before it arrived")
    known, stopped, slots, *numbers = answer[1:]
    admitted = tuple(each == 1 for each in numbers[slots:])
    granted = Grant(tuple(numbers[:slots]), admitted, stopped=stopped == 1, known=known == 1)
    check_fits(granted, reservation)
    return granted


def uses(keys: Iterable[str], answer: Sequence[int]) -> tuple[dict[str, KeyUse], list[str]]:
    """The answer to a peek, by key; without those under which nothing is kept.

    Returns:
        The counts, and the keys under which something else is kept.
    """
    found, odd = {}, []
    for number, key in enumerate(dict.fromkeys(keys)):
        used, limit, ends = (
            None if each == _NONE else each for each in answer[3 * number : 3 * number + 3]
        )
        if used == _ODD:
            odd.append(key)
        elif used is not None:
            found[key] = KeyUse(key, used, limit, ends)
    return found, odd


def _word(answer: bytes | str) -> str:
    return answer if isinstance(answer, str) else answer.decode()


def _exact(number: int) -> int:
    if abs(number) > MAX_COUNT:
        raise QuotaStoreError(f"Redis counts to {MAX_COUNT}, which {number} exceeds")
    return number


def _limit(limit: int | None) -> int:
    """A limit that no count reaches is one all the same."""
    return _NONE if limit is None else max(-1, min(limit, MAX_COUNT))


def _ends(ends: int | None) -> int:
    return _NONE if ends is None else min(ends, MAX_COUNT)
