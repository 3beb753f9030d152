"""The counts that a store keeps in Redis: show them, reset them, grant more."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from langchain_quota.cli import grants
from langchain_quota.cli.command import (
    CommandError,
    complain,
    escaped,
    printable,
    say,
    say_table,
    when,
)
from langchain_quota.decision import ROOT_RUN, RUN
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limit_options import UNITS
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.keys import CountKey, dimension_of
from langchain_quota.stores.redis import PREFIX, RedisStore
from langchain_quota.stores.redis_clients import URL_VARIABLE
from langchain_quota.units import shown

_PASSWORD = re.compile(r"://.*:.*@|[?&]password=", re.DOTALL)
_AT_ONCE = 500
_TIMEOUT = 10.0
_HEADINGS = ("counted", "per", "subject", "used", "of", "until")
_DECLINED = 1
_RUNS = (":run:", ":root_run:")
"""The parts of a pattern that ask for the counts of runs."""
_ODD = 1
_NAMED = 20
_SHOWN = 200


def run(arguments: Namespace) -> int:
    """Show what is kept, set it to 0, or give more of it."""
    store = _store(arguments)
    try:
        return _ACTIONS[arguments.action](store, arguments)
    except QuotaStoreError as error:
        raise CommandError(_line(error)) from error


def _show_or_reset(store: RedisStore, arguments: Namespace) -> int:
    found, odd = _found(store, arguments.keys)
    say_table(_HEADINGS, [*map(_row, found)], right={"used", "of"}, empty="no counts")
    code = _name(odd)
    if arguments.action == "show" or not found:
        return code
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise CommandError("reset asks first, and there is no terminal: pass --yes")
        try:
            answer = input(f"Reset {len(found)} to 0? [y/N] ")
        except EOFError:
            say()
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            say("nothing was reset")
            return _DECLINED
    for first in range(0, len(found), _AT_ONCE):
        store.reset([use.key for use in found[first : first + _AT_ONCE]])
    say(f"{len(found)} reset to 0")
    return code


_ACTIONS: dict[str, Callable[[RedisStore, Namespace], int]] = {
    "show": _show_or_reset,
    "reset": _show_or_reset,
    "grant": grants.grant,
    "revoke": grants.revoke,
    "grants": grants.show,
}


def _store(arguments: Namespace) -> RedisStore:
    url, prefix = arguments.redis, arguments.prefix
    if url is not None and _PASSWORD.search(url):
        seen = "--redis has a password, which others on this machine can see"
        raise CommandError(f"{seen}: set {URL_VARIABLE} instead")
    try:
        return RedisStore(url, prefix=PREFIX if prefix is None else prefix, timeout=_TIMEOUT)
    except ValueError as error:
        raise CommandError(_line(error)) from error


def _found(store: RedisStore, patterns: Sequence[str]) -> tuple[list[QuotaUsage], list[bytes]]:
    """The counts, and the names of keys that hold no count."""
    uses: dict[str, QuotaUsage] = {}
    odd: set[bytes] = set()
    for pattern in patterns or ("*",):
        found, others = store.listing(pattern)
        # Every run of the last day has counts. Their names are ids that tell a reader nothing.
        asked = any(each in pattern for each in _RUNS)
        uses |= {
            use.key: use
            for use in found
            # A key without a counter holds the number of a thread's newest root run.
            if not use.key.startswith(":")
            and (asked or dimension_of(use.key) not in (RUN, ROOT_RUN))
        }
        odd.update(others)
    return [uses[key] for key in sorted(uses)], sorted(odd)


def _name(odd: Sequence[bytes]) -> int:
    """Print the names of keys that hold no count on stderr; the exit code."""
    for name in odd[:_NAMED]:
        more = "..." if len(name) > _SHOWN else ""
        complain("quotas", f"{name[:_SHOWN]!r}{more} holds no count, and is left as it is")
    if len(odd) > _NAMED:
        complain("quotas", f"{len(odd) - _NAMED} more hold no count, and are left as they are")
    return _ODD if odd else 0


def _row(use: QuotaUsage) -> tuple[str, ...]:
    try:
        key = CountKey.parse(use.key)
        names = (escaped(key.counter), escaped(key.dimension), repr(key.subject))
    except ValueError:  # another program's key
        names = (escaped(use.key), "-", "-")
    unit = UNITS.get(names[0], "calls")
    limit = "-" if use.limit is None else shown(use.limit + use.granted, unit)
    return (*names, shown(use.used, unit), limit, when(use.expires_at))


def _line(error: Exception) -> str:
    """An error's text on one line; what would move a terminal's cursor is escaped."""
    return printable(" ".join(str(error).split()))
