"""The rows of a store in Redis: a count is a hash, and what is remembered is a text.

The fields of a hash are those of `Count`; `at` is `changed_at`, and `expires` is when Redis removes
it. `limit` and `ends` are -1 or absent for none, and `next_end` so for no entry that ends. Each
entry is a field of its own, with its three numbers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any

from langchain_quota.core.admission import MAX_COUNT
from langchain_quota.stores.counts import Count, Entry
from langchain_quota.stores.keys import COUNT, NOTES, digest
from langchain_quota.stores.memory import ATTEMPT, RESULT, ROLLOVER
from langchain_quota.stores.rows import OLD_GRANTS, Name, Rows, check_count, plain, read_value

NUMBERS = ("used", "expires", "next_end", "raised", "fresh", "checked", "at", "limit", "ends")
"""The numbers of a count, of which acquire.lua reads the first seven."""
FIELDS = (*NUMBERS, ROLLOVER)
"""What is read of a count whose other entries do not matter."""
_ABSENT = {"next_end": inf, "raised": 0, "fresh": 0, "checked": 0}
"""What a number is that is not written, if it is not `None`."""
_ADDED = ("used", "raised", "fresh")
"""To what others change meanwhile, the difference is added, unless the count drains."""


@lru_cache(maxsize=4096)
def name_of(prefix: str, kind: str, key: str) -> bytes:
    """Return the name of what is kept of a kind for a key, which may begin with the prefix."""
    # The prefix is the hash tag, by which a cluster finds the node.
    return f"{{{prefix}}}:{kind}:{key.removeprefix(f'{prefix}/')}".encode(errors="surrogatepass")


def key_of(prefix: str, kind: str, name: bytes | str) -> str | None:
    """Return the key of a name in Redis, which may be decoded; `None` for another's name."""
    try:
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return None
    return text.removeprefix(f"{{{prefix}}}:{kind}:")


def pattern_of(prefix: str, kind: str, keys: str) -> bytes:
    """Return a pattern that finds all names whose keys match a glob, and maybe others."""
    # Redis reads character classes and escapes differently.
    simple, *rest = re.split(r"[\[\\]", keys, maxsplit=1)
    return name_of(prefix, kind, f"{simple}{'*' if rest else ''}")


def place_of(prefix: str, name: Name) -> bytes:
    """Return where a row is kept; other names than keys may have any length."""
    kind, text = name
    return name_of(prefix, kind, text if kind in (COUNT, NOTES, OLD_GRANTS) else digest(text))


class RedisRows(Rows):
    """Rows of Redis, as its scripts have them, too."""

    def decode(self, kind: str, row: Any) -> tuple[float, Any]:
        """Return what a row keeps; of what Redis forgets by itself it does not say when."""
        if kind == COUNT:
            return _read_count(row)
        if kind == NOTES:
            return super().decode(kind, row)
        return inf, read_value(kind, json.loads(row)) if kind == ATTEMPT else row

    def encode(self, kind: str, expires: float, value: Any) -> Any:
        """Return the fields of a count, or a text; only acquire.lua reads and writes results."""
        if kind == COUNT:
            return _write_count(value, expires)
        if kind == NOTES:
            return super().encode(kind, expires, value)
        if kind == ATTEMPT:
            return json.dumps(value)
        return value if kind == RESULT else "1"

    def changes(self, order: Sequence[Name]) -> list[list[Any]]:
        """Return what rows.lua is to write; others may not have written the texts meanwhile."""
        changes = []
        changed = {name: (row, expires) for name, row, expires in self.changed()}
        for number, name in enumerate(order, 1):
            old = self.read.get(name)
            new, expires = changed.get(name, (old, 0))
            last = int(min(expires, MAX_COUNT))
            if name[0] != COUNT:
                changes.append([number, False, last, ["", old or "", new or ""]])
            elif name in changed:
                parts = [*_parts(old or {}, new or {})]
                changes.append([number, name in self.odd, last, *parts])
        return changes if changed else []


def _parts(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[list[Any]]:
    """Return what changes in a count."""
    for field in dict.fromkeys([*old, *new]):
        before, after = old.get(field, ""), new.get(field, "")
        if field in _ADDED and before and after and "at" not in new:
            if before != after:
                yield [field, int(after) - int(before)]
        elif before != after or field == "used":
            yield [field, before, after]


def _read_count(fields: Mapping[str, str]) -> tuple[float, Count]:
    numbers = {name: int(fields[name]) for name in NUMBERS if name in fields}
    entries = {n: Entry(*map(int, text.split())) for n, text in fields.items() if " " in text}
    if max(map(abs, numbers.values())) > MAX_COUNT:
        raise ValueError("it is no count")
    expires, at = numbers.pop("expires"), numbers.pop("at", None)
    for name in ("limit", "ends", "next_end"):
        if numbers.get(name, 0) < 0:
            del numbers[name]
    return expires, check_count(Count(**numbers, entries=entries, changed_at=at))


def _write_count(count: Count, expires: float) -> dict[str, str]:
    kept = {**plain(count), "expires": expires, "at": count.changed_at}
    numbers = {name: kept[name] for name in NUMBERS if kept[name] != _ABSENT.get(name)}
    fields = {name: str(int(min(number, MAX_COUNT))) for name, number in numbers.items()}
    return fields | {name: " ".join(map(str, entry)) for name, entry in count.entries.items()}


def read_rows(reply: Any, order: Sequence[Name]) -> tuple[float, dict[Name, Any]]:
    """Return the time and the rows of a reply of rows.lua."""
    seconds, micros, *kept = reply
    rows = {name: _row(row) for name, row in zip(order, kept, strict=True)}
    time = int(seconds) + int(micros) / 10**6
    return time, {name: row for name, row in rows.items() if row not in (None, {}, [])}


def _row(kept: Any) -> Any:
    try:
        if isinstance(kept, list) and kept:
            words = [word.decode() if isinstance(word, bytes) else word for word in kept]
            if words[0] == "":
                fields = zip(FIELDS, words[1:], strict=True)
                return {field: text for field, text in fields if text is not None}
            return dict(zip(words[::2], words[1::2], strict=True))
        return kept.decode() if isinstance(kept, bytes) else kept
    except UnicodeDecodeError:
        return kept
