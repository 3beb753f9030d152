"""The command that shows the counts of a store in a server, resets them, and grants more."""

import json
import math
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from uuid import uuid4

from langchain_quota.cli import CommandError, complain, one_line, printable, say, table
from langchain_quota.cli.arguments import STORE_VARIABLE
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits.call import ROOT_RUN, RUN
from langchain_quota.limits.options import UNITS
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.runtime.units import PER_BASE_UNIT, UNIT_LABELS, format_amount, in_base_unit
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.grants import Grant, in_utc
from langchain_quota.stores.keys import (
    CountKey,
    dimension_of,
    parsed,
    read_emission_interval,
    unit_of,
    window_end,
)
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.stores.server import PREFIX

Store = RedisStore | PostgresStore
_OF_REDIS = ("redis://", "rediss://", "unix://")
_PASSWORD = re.compile(r"^[^:]*://[^:]*:.*@|[?&]password=", re.DOTALL)
_TIMEOUT = 10.0
_BATCH_SIZE = 500
"""Number of counts that are reset in one step."""
_DECLINED = _BROKEN = 1
"""The exit code if nothing was reset, and if something that is no count was left out."""


def run(arguments: Namespace) -> int:
    """Run an action on the store's counts, and return the exit code."""
    prefix = arguments.prefix
    if arguments.store is not None and _PASSWORD.search(arguments.store):
        fault = "--store has a password, which others on this machine can see"
        raise CommandError(f"{fault}: set {STORE_VARIABLE} instead")
    url: Any = arguments.store or os.environ.get(STORE_VARIABLE) or None
    in_postgres = str(url).startswith(("postgres://", "postgresql://"))
    scheme = re.match("[a-zA-Z]+://", url or "")
    if url and not in_postgres and (not scheme or scheme[0] not in _OF_REDIS):
        name = "--store" if arguments.store else STORE_VARIABLE
        wrong = f", not {scheme[0]}…" if scheme else ""
        raise CommandError(f"{name} must be {', '.join(_OF_REDIS)} or postgresql://…{wrong}")
    try:
        prefix = PREFIX if prefix is None else prefix
        kind = PostgresStore if in_postgres else RedisStore
        with closing(kind(url, prefix=prefix, timeout=_TIMEOUT)) as store:
            return _ACTIONS[arguments.action](store, arguments)
    except (QuotaStoreError, ValueError, ModuleNotFoundError) as error:
        raise CommandError(one_line(error)) from error


def _show(store: Store, arguments: Namespace) -> int:
    usages, code = _find_usages(store, arguments)
    if arguments.near is not None:
        usages = [usage for usage in usages if _share(usage) >= arguments.near]
    usages.sort(key=_SORTS[arguments.sort])
    if not arguments.json:
        for grant in store.grants():
            if not grant.amount:
                say(f"frozen: {_line(grant)}")
        _print(usages)
    for usage in usages if arguments.json else ():
        say(json.dumps(_usage_object(usage)))
    return code


def _share(usage: QuotaUsage) -> float:
    """Return the used share of a limit: 0 without a limit, and for a smooth quota."""
    if usage.limit is None or read_emission_interval(usage.key):
        return 0.0
    limit = usage.limit + usage.granted
    return usage.used / limit if limit else math.inf


_SORTS: dict[str, Callable[[QuotaUsage], str | float]] = {
    "key": lambda usage: usage.key,
    "share": lambda usage: -_share(usage),
    "used": lambda usage: -usage.used,
    "reset": lambda usage: math.inf if usage.expires_at is None else usage.expires_at,
}


def _object(text: str, **amounts: int | None) -> dict[str, object]:
    """Return what a key says and amounts in its unit, as `--json` prints them."""
    key, unit = CountKey.parse(text), unit_of(text)
    names = {"key": text, "counted": key.counter, "per": key.dimension, "subject": key.subject}
    return {
        **names,
        "unit": UNIT_LABELS[unit],
        **{name: amount and in_base_unit(amount, unit) for name, amount in amounts.items()},
    }


def _usage_object(usage: QuotaUsage) -> dict[str, object]:
    used, granted, limit = usage.used, usage.granted, usage.limit
    limit = None if limit is None else limit + granted
    left = None if limit is None else max(0, limit - used)
    resets_at = None if usage.expires_at is None else in_utc(usage.expires_at).isoformat()
    added = {"granted": granted, "rolled_over": usage.rolled_over}
    amounts = _object(usage.key, used=used, limit=limit, left=left, **added)
    return {**amounts, "resets_at": resets_at}


def _grant_object(grant: Grant) -> dict[str, object]:
    return {
        **_object(grant.key, granted=grant.amount),
        "given_at": grant.given_at.isoformat(),
        "until": grant.until and grant.until.isoformat(),
        "by": grant.by,
        "reason": grant.reason,
        "id": grant.id,
    }


def _print(usages: Sequence[QuotaUsage]) -> None:
    headings = ("counted", "per", "subject", "used", "of", "until")
    rows = [*map(_row, usages)]
    for line in table(headings, rows, right={"used", "of"}) if rows else ["no counts"]:
        say(line)


def _reset(store: Store, arguments: Namespace) -> int:
    usages, code = _find_usages(store, arguments)
    for pattern in arguments.key:
        if not any(fnmatchcase(usage.key, pattern) for usage in usages):
            raise CommandError(f"no count matches --key {pattern!r}: see quotas show")
    if not usages and (arguments.per, arguments.subject) != (None, None):
        raise CommandError("no count matches --per and --subject: see quotas show")
    _print(usages)
    if usages and not arguments.yes:
        if not sys.stdin.isatty():
            raise CommandError("reset asks first, and there is no terminal: pass --yes")
        try:
            answer = input(f"Reset {len(usages)} to 0? [y/N] ")
        except EOFError:
            say()
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            say("nothing was reset")
            return _DECLINED
    for first in range(0, len(usages), _BATCH_SIZE):
        store.reset([usage.key for usage in usages[first : first + _BATCH_SIZE]])
    say(f"{len(usages)} reset to 0")
    return code


def _find_usages(store: Store, arguments: Namespace) -> tuple[list[QuotaUsage], int]:
    """Return the counts that are meant, and the exit code; name what is no count."""
    usages, broken = dict[str, QuotaUsage](), set[str]()
    for pattern in arguments.key or ("*",):
        # Every run of the last day has counts, under ids that say nothing to a reader.
        names_runs = ":run:" in pattern or ":root_run:" in pattern
        with_runs = names_runs or arguments.per in (RUN, ROOT_RUN)
        for key, usage in store.entries(pattern).items():
            if usage is None or not parsed(key):
                broken.add(key)
            elif (
                # A key without a counter holds the number of a thread's newest root run.
                not key.startswith(":")
                and (with_runs or dimension_of(key) not in (RUN, ROOT_RUN))
                # One that is over is kept for clocks that differ, and for what rolls over.
                and (usage.expires_at or math.inf) > time.time()
            ):
                usages[key] = usage
    for key in sorted(broken):
        complain("quotas", f"{key!r} holds no count: delete it, or reset it with store.reset")
    found = [usages[key] for key in sorted(usages) if _is_of(key, arguments)]
    return found, _BROKEN if broken else 0


def _is_of(text: str, arguments: Namespace) -> bool:
    """Return whether a key has the `per` and the subject that were asked for, if any."""
    key, per, subject = CountKey.parse(text), arguments.per, arguments.subject
    # A key has a long subject shortened.
    encoded = str(CountKey("", "", subject or "")).split(":")[2]
    is_subject = subject in (None, key.subject) or encoded == text.split(":")[2]
    return is_subject and per in (None, key.dimension)


def _row(usage: QuotaUsage) -> tuple[str, ...]:
    key = CountKey.parse(usage.key)
    names = (printable(key.counter), printable(key.dimension), repr(key.subject))
    unit = UNITS.get(names[0], "calls")
    limit = "-" if usage.limit is None else format_amount(usage.limit + usage.granted, unit)
    drains = read_emission_interval(usage.key)
    until = "it drains" if drains else _format_time(usage.expires_at, usage.key)
    return (*names, format_amount(usage.used, unit), limit, until)


def _grant(store: Store, arguments: Namespace) -> int:
    key = arguments.key
    if _without_window(key) == key:
        key = _find_current_key(store, key)
    text, unit = arguments.amount, unit_of(key)
    if not text.isascii() or (unit not in PER_BASE_UNIT and not text.isdecimal()):
        number = "a number" if unit in PER_BASE_UNIT else "a whole number"
        raise CommandError(f"amount must be {number} of {UNIT_LABELS[unit]}, not {text!r}")
    amount = text if unit in PER_BASE_UNIT else int(text)
    until = arguments.for_time and datetime.now(UTC) + arguments.for_time
    grant_id = uuid4().hex if arguments.id is None else arguments.id
    reason, by = arguments.reason, arguments.by
    try:
        grant = store.grant(
            key, amount, until=until, reason=reason, by=by, id=grant_id, window=None
        )
    except QuotaStoreError as error:
        remedy = f"to try again without granting twice add --id {grant_id}"
        raise QuotaStoreError(f"{error}; {remedy}") from error
    if (grant.ends or 0) <= time.time():
        raise CommandError(f"over already: {_line(grant)}; for another grant give another --id")
    say(f"granted {_line(grant)}")
    return 0


def _revoke(store: Store, arguments: Namespace) -> int:
    key = arguments.key
    for grant in store.grants(_escape_glob(key) + "*"):
        if grant.id == arguments.id and key in {grant.key, _without_window(grant.key)}:
            ended = store.revoke(grant.key, grant.id)
            if ended is not None:
                say(f"revoked {_line(ended)}")
                return 0
    raise CommandError(f"nothing is granted under {key!r} with the id {arguments.id!r}")


def _grants(store: Store, arguments: Namespace) -> int:
    patterns = arguments.key or ("*",)
    grants = {
        (grant.key, grant.id): grant
        for pattern in patterns
        for grant in store.grants(pattern)
        if _is_of(grant.key, arguments)
    }
    in_order = sorted(grants.values(), key=lambda grant: (grant.key, grant.given_at))
    if arguments.json:
        for grant in in_order:
            say(json.dumps(_grant_object(grant)))
        return 0
    rows = [
        (
            printable(grant.key),
            format_amount(grant.amount, grant.unit) if grant.amount else "frozen",
            _until(grant),
            *(repr(grant.by), repr(grant.reason), printable(grant.id)),
        )
        for grant in in_order
    ]
    headings = ("key", "granted", "until", "by", "reason", "id")
    for line in table(headings, rows, right={"granted"}) if rows else ["no grants"]:
        say(line)
    return 0


def _freeze(store: Store, arguments: Namespace) -> int:
    until = arguments.for_time and datetime.now(UTC) + arguments.for_time
    options = {"until": until, "reason": arguments.reason, "by": arguments.by}
    freeze = run_sync(store.freeze("", *arguments.per, **options))
    say(f"frozen: {_line(freeze)}")
    say(
        "not frozen: calls that ask no store, limits with enforce=False, and, with "
        'on_store_error="allow", calls while the store is unavailable'
    )
    return 0


def _thaw(store: Store, arguments: Namespace) -> int:
    freeze = run_sync(store.thaw("", *arguments.per, by=arguments.by))
    if freeze is None:
        raise CommandError(f"not frozen: {_whose(printable(':'.join(arguments.per)))}")
    say(f"thawed: {_line(freeze)}")
    return 0


_ACTIONS = {
    "show": _show,
    "reset": _reset,
    "grant": _grant,
    "revoke": _revoke,
    "grants": _grants,
    "freeze": _freeze,
    "thaw": _thaw,
}


def _find_current_key(store: Store, text: str) -> str:
    """Return the key of the current count under a key without its window."""
    pattern = _escape_glob(text) + "*"
    keys = {usage.key for usage in store.usages(pattern)}
    keys.update(grant.key for grant in store.grants(pattern))
    current = [
        key
        for key in sorted(keys)
        if _without_window(key) == text and (window_end(key) or time.time() + 1) > time.time()
    ]
    if not current:
        raise CommandError(f"nothing is counted under {text!r} now: use store.grant in a program")
    if len(current) > 1 and text not in current:
        fault = "several counts are meant: give one of them, --key"
        raise CommandError(f"{fault} {' or '.join(current)}")
    return text if text in current else current[0]


def _without_window(text: str) -> str:
    """Return a key's text without its window."""
    return ":".join(text.split(":")[:3])


def _escape_glob(text: str) -> str:
    """Return a pattern that only the text itself matches."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _line(grant: Grant) -> str:
    """Return a grant in one line, for an audit log."""
    amount = format_amount(grant.amount, grant.unit) + (" calls" if grant.unit == "calls" else "")
    key, name = printable(grant.key), printable(grant.id)
    cause = f"by {grant.by!r}, reason {grant.reason!r}"
    if not grant.amount:
        since = _format_time(grant.given_at.timestamp(), grant.key)
        return f"{_whose(key)} since {since} until {_until(grant)}, {cause}"
    return f"{amount} under {key} until {_until(grant)}, {cause}, id {name}"


def _whose(key: str) -> str:
    return key.strip(":").replace(":", " ") or "all"


def _until(grant: Grant) -> str:
    return "thawed" if grant.until is None else _format_time(grant.ends, grant.key)


def _format_time(seconds: float | None, key: str) -> str:
    """Return a time in UTC, after the time in the zone of the key's window if that is another."""
    if seconds is None:
        return "reset"
    moment = in_utc(seconds)
    utc = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    local = moment.astimezone((CountKey.parse(key).resets_at or moment).tzinfo)
    return f"{local.isoformat(' ', 'seconds')} ({utc})" if local.utcoffset() else utc
