"""What a store in Redis keeps: a table of it, and a way back to 0."""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime

from langchain_quota.cli.command import CommandError, complain, say
from langchain_quota.decision import ROOT_RUN, RUN
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limit_options import UNITS
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.keys import CountKey, dimension_of
from langchain_quota.stores.redis import PREFIX, RedisStore
from langchain_quota.stores.redis_clients import URL_VARIABLE
from langchain_quota.telemetry.units import shown

_PASSWORD = re.compile(r"://.*:.*@|[?&]password=", re.DOTALL)
_AT_ONCE = 500
_TIMEOUT = 10.0
_HEADINGS = ("counted", "per", "subject", "used", "of", "until")
_DECLINED = 1
_RUNS = (":run:", ":root_run:")
"""What a pattern has in it that asks for runs."""
_ODD = 1
_NAMED = 20
_SHOWN = 200


def run(arguments: Namespace) -> int:
    """Show what is kept, or set it to 0.

    Raises:
        CommandError: Redis cannot be asked, or nobody can be asked whether to reset.
    """
    store = _store(arguments)
    found, odd = _found(store, arguments.keys or ("*",))
    _print_table(found)
    code = _name(odd)
    if arguments.action == "show" or not found:
        return code
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise CommandError("reset asks first, and there is no terminal: pass --yes")
        if not _agreed(f"Reset {len(found)} to 0? [y/N] "):
            say("nothing was reset")
            return _DECLINED
    try:
        for first in range(0, len(found), _AT_ONCE):
            store.reset([use.key for use in found[first : first + _AT_ONCE]])
    except QuotaStoreError as error:
        raise CommandError(_line(error)) from error
    say(f"{len(found)} reset to 0")
    return code


def _store(arguments: Namespace) -> RedisStore:
    url, prefix = arguments.redis, arguments.prefix
    if url is not None and _PASSWORD.search(url):
        raise CommandError(
            "--redis has a password, which others on this machine can see: set "
            f"{URL_VARIABLE} instead"
        )
    try:
        return RedisStore(url, prefix=PREFIX if prefix is None else prefix, timeout=_TIMEOUT)
    except ValueError as error:
        raise CommandError(_line(error)) from error


def _found(store: RedisStore, patterns: Sequence[str]) -> tuple[list[QuotaUsage], list[bytes]]:
    """The counts, and the names of what is none.

    Raises:
        CommandError: Redis cannot be asked.
    """
    uses: dict[str, QuotaUsage] = {}
    odd: set[bytes] = set()
    try:
        for pattern in patterns:
            found, others = store.listing(pattern)
            # Each run of the last day has counts, under a name that says nothing to anybody.
            asked = any(each in pattern for each in _RUNS)
            uses |= {
                use.key: use
                for use in found
                # Without a counter it is the number of a thread's newest root run.
                if not use.key.startswith(":")
                and (asked or dimension_of(use.key) not in (RUN, ROOT_RUN))
            }
            odd.update(others)
    except QuotaStoreError as error:
        raise CommandError(_line(error)) from error
    return [uses[key] for key in sorted(uses)], sorted(odd)


def _name(odd: Sequence[bytes]) -> int:
    """Name what is no count, on stderr; the exit code."""
    for name in odd[:_NAMED]:
        more = "..." if len(name) > _SHOWN else ""
        complain("quotas", f"{name[:_SHOWN]!r}{more} holds no count, and is left as it is")
    if len(odd) > _NAMED:
        complain("quotas", f"{len(odd) - _NAMED} more hold no count, and are left as they are")
    return _ODD if odd else 0


def _print_table(uses: Sequence[QuotaUsage]) -> None:
    if not uses:
        say("no counts")
        return
    rows = [_HEADINGS, *map(_row, uses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if heading in {"used", "of"} else cell.ljust(width)
            for heading, cell, width in zip(_HEADINGS, row, widths, strict=True)
        ]
        say("  ".join(cells).rstrip())


def _row(use: QuotaUsage) -> tuple[str, ...]:
    try:
        key = CountKey.parse(use.key)
        names = (_escaped(key.counter), _escaped(key.dimension), repr(key.subject))
    except ValueError:  # another program's key
        names = (_escaped(use.key), "-", "-")
    unit = UNITS.get(names[0], "calls")
    limit = "-" if use.limit is None else shown(use.limit, unit)
    return (*names, shown(use.used, unit), limit, _until(use.expires_at))


def _until(expires_at: float | None) -> str:
    if expires_at is None:
        return "reset"
    try:
        return f"{datetime.fromtimestamp(expires_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OSError, OverflowError, ValueError):
        return "the end of time"


def _escaped(text: str) -> str:
    """A text that cannot forge a line, nor change how others are shown."""
    return repr(text)[1:-1]


def _line(error: Exception) -> str:
    """An error's text on one line; what would move a terminal's cursor is escaped."""
    text = " ".join(str(error).split())
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in {"y", "yes"}
    except EOFError:
        say()
        return False
