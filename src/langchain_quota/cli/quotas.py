"""The counts that a store keeps in a server: show them, reset them, grant more."""

import re
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from uuid import uuid4

from langchain_quota.cli.printing import CommandError, one_line, printable, say, table
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits.call import ROOT_RUN, RUN
from langchain_quota.limits.options import UNITS
from langchain_quota.runtime.units import PER_BASE_UNIT, UNIT_LABELS, shown
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.grants import Grant, in_utc, unit_of
from langchain_quota.stores.keys import (
    CountKey,
    dimension_of,
    parsed,
    read_emission_interval,
    window_end,
)
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.stores.server import PREFIX

Store = RedisStore | PostgresStore
_PASSWORD = re.compile(r"://.*:.*@|[?&]password=", re.DOTALL)
_TIMEOUT = 10.0
_AT_ONCE = 500
"""How many counts are reset in one step."""
_DECLINED = 1


def run(arguments: Namespace) -> int:
    """Show what is kept, set it to 0, or give more of it."""
    url, prefix = arguments.store, arguments.prefix
    in_postgres = str(url).startswith(("postgres://", "postgresql://"))
    if url is not None and _PASSWORD.search(url):
        seen = "--store has a password, which others on this machine can see"
        remedy = "PGPASSWORD" if in_postgres else "LANGCHAIN_QUOTA_REDIS_URL"
        raise CommandError(f"{seen}: set {remedy} instead")
    try:
        prefix = PREFIX if prefix is None else prefix
        kind = PostgresStore if in_postgres else RedisStore
        with closing(kind(url, prefix=prefix, timeout=_TIMEOUT)) as store:
            return _ACTIONS[arguments.action](store, arguments)
    except (QuotaStoreError, ValueError, ModuleNotFoundError) as error:
        raise CommandError(one_line(error)) from error


def _show(store: Store, arguments: Namespace) -> int:
    _print(_found(store, arguments.key))
    return 0


def _print(found: Sequence[QuotaUsage]) -> None:
    headings = ("counted", "per", "subject", "used", "of", "until")
    lines = table(headings, [*map(_row, found)], right={"used", "of"}) if found else ["no counts"]
    for line in lines:
        say(line)


def _reset(store: Store, arguments: Namespace) -> int:
    found = _found(store, arguments.key)
    for pattern in arguments.key:
        if not any(fnmatchcase(use.key, pattern) for use in found):
            raise CommandError(f"no count matches --key {pattern!r}: see quotas show")
    _print(found)
    if found and not arguments.yes:
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
    return 0


def _found(store: Store, patterns: Sequence[str]) -> list[QuotaUsage]:
    uses: dict[str, QuotaUsage] = {}
    for pattern in patterns or ("*",):
        # Every run of the last day has counts. Their names are ids that tell a reader nothing.
        asked = ":run:" in pattern or ":root_run:" in pattern
        uses |= {
            use.key: use
            for use in store.usages(pattern)
            # A key without a counter holds the number of a thread's newest root run.
            if not use.key.startswith(":")
            # Other programs may keep keys of other forms.
            and parsed(use.key)
            and (asked or dimension_of(use.key) not in (RUN, ROOT_RUN))
        }
    return [uses[key] for key in sorted(uses)]


def _row(use: QuotaUsage) -> tuple[str, ...]:
    key = CountKey.parse(use.key)
    names = (printable(key.counter), printable(key.dimension), repr(key.subject))
    unit = UNITS.get(names[0], "calls")
    limit = "-" if use.limit is None else shown(use.limit + use.granted, unit)
    until = "it drains" if read_emission_interval(use.key) else _when(use.expires_at, use.key)
    return (*names, shown(use.used, unit), limit, until)


def _grant(store: Store, arguments: Namespace) -> int:
    key = arguments.key
    if _base(key) == key:
        key = _key_now(store, key)
    text, unit = arguments.amount, unit_of(key)
    if not text.isascii() or (unit not in PER_BASE_UNIT and not text.isdecimal()):
        number = "a number" if unit in PER_BASE_UNIT else "a whole number"
        raise CommandError(f"amount must be {number} of {UNIT_LABELS[unit]}, not {text!r}")
    amount = text if unit in PER_BASE_UNIT else int(text)
    until = arguments.for_time and datetime.now(UTC) + arguments.for_time
    name = uuid4().hex if arguments.id is None else arguments.id
    of: Any = {"reason": arguments.reason, "by": arguments.by, "id": name, "window": None}
    try:
        given = store.grant(key, amount, until=until, **of)
    except QuotaStoreError as error:
        again = f"to try again without granting twice add --id {name}"
        raise QuotaStoreError(f"{error}; {again}") from error
    if (given.ends or 0) <= time.time():
        raise CommandError(f"over already: {_line(given)}; for another grant give another --id")
    say(f"granted {_line(given)}")
    return 0


def _revoke(store: Store, arguments: Namespace) -> int:
    key = arguments.key
    for each in store.grants(_glob(key) + "*"):
        if each.id == arguments.id and key in {each.key, _base(each.key)}:
            ended = store.revoke(each.key, each.id)
            if ended is not None:
                say(f"revoked {_line(ended)}")
                return 0
    raise CommandError(f"nothing is granted under {key!r} with the id {arguments.id!r}")


def _grants(store: Store, arguments: Namespace) -> int:
    patterns = arguments.key or ("*",)
    found = {(each.key, each.id): each for one in patterns for each in store.grants(one)}
    rows = [
        (
            printable(each.key),
            shown(each.amount, each.unit),
            _when(each.ends, each.key),
            *(repr(each.by), repr(each.reason), printable(each.id)),
        )
        for each in sorted(found.values(), key=lambda grant: (grant.key, grant.given_at))
    ]
    headings = ("key", "granted", "until", "by", "reason", "id")
    for line in table(headings, rows, right={"granted"}) if rows else ["no grants"]:
        say(line)
    return 0


_ACTIONS = {"show": _show, "reset": _reset, "grant": _grant, "revoke": _revoke, "grants": _grants}


def _key_now(store: Store, text: str) -> str:
    """The key of the count that is kept now under a key without its window."""
    pattern = _glob(text) + "*"
    kept = {each.key for each in store.usages(pattern)}
    kept.update(each.key for each in store.grants(pattern))
    found = [
        each
        for each in sorted(kept)
        if _base(each) == text and (window_end(each) or time.time() + 1) > time.time()
    ]
    if not found:
        raise CommandError(f"nothing is counted under {text!r} now: use store.grant in a program")
    if len(found) > 1 and text not in found:
        several = "several counts are meant: give one of them, --key"
        raise CommandError(f"{several} {' or '.join(found)}")
    return text if text in found else found[0]


def _base(text: str) -> str:
    """A key's text without its window."""
    return ":".join(text.split(":")[:3])


def _glob(text: str) -> str:
    """A pattern that only the text itself matches."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _line(grant: Grant) -> str:
    """A grant in one line, for an audit log."""
    amount = shown(grant.amount, grant.unit) + (" calls" if grant.unit == "calls" else "")
    key, name = printable(grant.key), printable(grant.id)
    why = f"by {grant.by!r}, reason {grant.reason!r}"
    return f"{amount} under {key} until {_when(grant.ends, grant.key)}, {why}, id {name}"


def _when(seconds: float | None, key: str) -> str:
    """A time in UTC, and before that in the zone of a key's window, if it has another one."""
    if seconds is None:
        return "reset"
    moment = in_utc(seconds)
    utc = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    local = moment.astimezone((CountKey.parse(key).resets_at or moment).tzinfo)
    return f"{local.isoformat(' ', 'seconds')} ({utc})" if local.utcoffset() else utc
