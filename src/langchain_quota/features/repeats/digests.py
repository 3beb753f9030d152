"""How calls and answers are compared: equal ones have equal digests."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from typing import Any

from langchain_quota.limits.repeats import RepeatLimit

_VOLATILE = re.compile(
    r"""
    \b(?=[0-9a-f])(?:
        \d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?  # a moment
        | \d{1,2}:\d\d:\d\d(?:[.,]\d+)?                    # a time of day
        | \d+(?:\.\d+)?[ ]?(?:ms|µs)\b                      # a duration
        | \d+\.\d+[ ]?s(?:ec(?:onds)?)?\b
        | [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b      # a UUID
        | 0x[0-9a-f]+\b                                     # an address
        | \d{10,}(?:\.\d+)?\b                              # a moment in seconds, an id
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""The parts of an answer that may change without saying anything new."""

MOST_COMPARED = 20_000
"""How much of a call or an answer is compared, in characters."""

_PER_VALUE = 16
"""How many characters a value in a list or a mapping counts for, beside its own."""

_LEAST_ID = 6
"""A shorter id of a call, such as `"1"`, is part of many texts that do not name it."""


def tool_digest(name: str, *, matches: bool) -> str:
    """A digest of a tool; begins with `-` if the limit never refuses its calls."""
    return ("" if matches else "-") + _digest(name, size=4)


def key_digest(limit: RepeatLimit, call: Mapping[str, Any], *, matches: bool) -> str | None:
    """A digest that equal calls share; `None` for a call that is ignored."""
    if not matches and not limit.tools:
        return None
    # The function does not get calls that are never refused.
    if limit.key is None or not matches:
        return _digest(_part([call["name"], call["args"]]))
    try:
        # A function that changes its argument must not change the call.
        key = limit.key(deepcopy(dict(call)))
    except Exception as error:
        error.add_note(f"raised by the key of limit {limit.name!r} for tool {call['name']!r}")
        raise
    return None if key is None else _digest(_part(key))


def answer_digest(content: object, call_id: str, args: object, *, failed: bool) -> str:
    """A digest of what an answer says."""
    text = _part(content, has_length=not failed)
    if len(call_id) >= _LEAST_ID:
        text = text.replace(call_id, "")
    if failed:
        text = _without_arguments(text)
    # What the arguments name must not be ignored as a moment or an id.
    named = {found[0] for found in _VOLATILE.finditer(_part(args))}
    # Of a moment that the arguments name, the answer may repeat the date alone.
    named |= {each[:10] for each in named}
    text = _VOLATILE.sub(lambda found: found[0] if found[0] in named else "", text)
    return ("!" if failed else "+") + _digest(text)


def _without_arguments(error: str) -> str:
    """An error without the call's arguments, which LangGraph's messages repeat."""
    before, begins, rest = error.partition(" with kwargs {")
    _, ends, after = rest.partition("} with error:")
    return before + after if begins and ends else error


def _part(value: object, *, has_length: bool = True) -> str:
    """What is compared of a value, as a text: equal values have equal texts, however long."""
    # Each text, list or mapping gets half of what is left at most, so that a short argument is
    # compared beside a long one.
    left, parts, values = MOST_COMPARED, list[str](), [value]
    while values:
        each = values.pop()
        inner: Sequence[object] = ()
        if isinstance(each, str):
            text, kind = each, '"'
        elif isinstance(each, list | tuple):
            text, kind = str(len(each)), "list "
            inner = each[: left // 2 // _PER_VALUE]
        elif isinstance(each, Mapping):
            text, kind = str(len(each)), "mapping "
            first = islice(each.items(), left // 4 // _PER_VALUE)
            pairs = sorted(((str(key), one) for key, one in first), key=itemgetter(0))
            inner = [one for pair in pairs for one in pair]
        else:
            # As JSON has only one kind of number, 1.0 is 1.
            is_whole = isinstance(each, float) and each.is_integer()
            text, kind = f"{each:.0f}" if is_whole else str(each), ""
        half = left // 4
        if len(text) > 2 * half:
            length = f"\0{len(text)}" if has_length else ""
            text = f"{text[:half]}\0{text[len(text) - half :]}{length}"
        left = max(0, left - len(text) - len(inner) * _PER_VALUE)
        parts.append(kind + text)
        values += reversed(inner)
    return "\0".join(parts)


def _digest(text: str, size: int = 8) -> str:
    return blake2b(text.encode(errors="backslashreplace"), digest_size=size).hexdigest()
