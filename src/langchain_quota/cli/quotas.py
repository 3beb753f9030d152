"""The command that shows the counts of a store in a server, resets them, and grants more."""

import json
import math
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from uuid import uuid4

from langchain_quota.cli import CommandError, complain, one_line, printable, say, table
from langchain_quota.cli.arguments import STORE_VARIABLE
from langchain_quota.limits.call import CONCURRENCY, ROOT_RUN, RUN
from langchain_quota.limits.options import UNITS
from langchain_quota.runtime.arguments import ALL_TOOLS
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.runtime.units import PER_BASE_UNIT, UNIT_LABELS, format_amount, in_base_unit
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.grants import Grant, calls_of, in_utc
from langchain_quota.stores.keys import DEFAULT_NAMES, CountKey, as_shown, parsed
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.stores.server import URL_VARIABLE

Store = RedisStore | PostgresStore
_OF_REDIS = ("redis://", "rediss://", "unix://")
Asked = Mapping[str, str]
"""The names that were given of counts, by the options, as they stand in keys."""

_PASSWORD = re.compile(r"^[^:]*://[^:]*:.*@|[?&]password=", re.DOTALL)
_TIMEOUT = 10.0
_BATCH_SIZE = 500  # of counts that are reset in one step
_DECLINED = _BROKEN = 1
"""The exit code if nothing was reset, and if something that is no count was left out."""


def run(arguments: Namespace) -> int:
    """Run an action on the store's counts, and return the exit code."""
    if arguments.store is not None and _PASSWORD.search(arguments.store):
        fault = "--store has a password, which others on this machine can see"
        raise CommandError(f"{fault}: set {STORE_VARIABLE} instead")
    url = arguments.store or os.environ.get(STORE_VARIABLE) or None
    if url is None and not os.environ.get(URL_VARIABLE):
        raise CommandError(
            "no server was given: pass --store, such as redis://127.0.0.1:6379/0 or postgresql://…,"
            f" or set {STORE_VARIABLE} or {URL_VARIABLE}"
        )
    in_postgres = str(url).startswith(("postgres://", "postgresql://"))
    scheme = re.match("[a-zA-Z]+://", url or "")
    if url and not in_postgres and (not scheme or scheme[0] not in _OF_REDIS):
        name = "--store" if arguments.store else STORE_VARIABLE
        wrong = f", not {scheme[0]}…" if scheme else ""
        raise CommandError(f"{name} must be {', '.join(_OF_REDIS)} or postgresql://…{wrong}")
    try:
        prefix = {} if arguments.prefix is None else {"prefix": arguments.prefix}
        kind: Callable[..., Store] = PostgresStore if in_postgres else RedisStore
        with closing(kind(url, timeout=_TIMEOUT, **prefix)) as store:
            return _ACTIONS[arguments.action](store, arguments, _asked(arguments))
    except (QuotaStoreError, ValueError, ModuleNotFoundError) as error:
        raise CommandError(one_line(error)) from error


def _show(store: Store, arguments: Namespace, asked: Asked) -> int:
    freezes = [each for each in store.grants() if not each.amount and _is_of(each.key, asked)]
    for freeze in freezes:
        say(json.dumps(_grant_object(freeze)) if arguments.json else f"frozen: {_line(freeze)}")
    counts, code = _find(store, asked)
    usages = [usage for usage in counts.values() if _share(usage) >= (arguments.near or 0)]
    usages.sort(key=_SORTS[arguments.sort])
    if not arguments.json:
        _print(usages)
    for usage in usages if arguments.json else ():
        say(json.dumps(_usage_object(usage)))
    return code


def _share(usage: QuotaUsage) -> float:
    """Return the used share of a limit: 0 without a limit, and for a smooth quota."""
    limit = _limit(usage)
    if limit is None or CountKey.parse(usage.key).limit:
        return 0.0
    return usage.used / limit if limit else math.inf


def _limit(usage: QuotaUsage) -> int | None:
    """Return a count's limit with what is added to it; `None` without a limit."""
    return None if usage.limit is None else usage.limit + usage.granted


_SORTS: dict[str, Callable[[QuotaUsage], float]] = {
    "name": lambda _: 0,  # they are sorted so
    "share": lambda usage: -_share(usage),
    "used": lambda usage: -usage.used,
    "reset": lambda usage: math.inf if usage.expires_at is None else usage.expires_at,
}


def _object(text: str, **amounts: int | None) -> dict[str, object]:
    """Return what a key says and amounts in its unit, as `--json` prints them."""
    limit, per, subject, _ = _names(text).values()
    names = {"key": text, "counted": limit, "per": per, "subject": subject}
    unit = CountKey.parse(text).unit
    shown = {name: amount and in_base_unit(amount, unit) for name, amount in amounts.items()}
    return {**names, "unit": UNIT_LABELS[unit], **shown}


def _usage_object(usage: QuotaUsage) -> dict[str, object]:
    used, limit = usage.used, _limit(usage)
    left = None if limit is None else max(0, limit - used)
    resets_at = None if usage.expires_at is None else in_utc(usage.expires_at).isoformat()
    added = {"granted": usage.granted, "rolled_over": usage.rolled_over}
    amounts = _object(usage.key, used=used, limit=limit, left=left, **added)
    return {**amounts, "resets_at": resets_at}


def _grant_object(grant: Grant) -> dict[str, object]:
    amounts = {**_object(grant.key, granted=grant.amount), "frozen": not grant.amount}
    until = grant.until and grant.until.isoformat()
    times = {"given_at": grant.given_at.isoformat(), "until": until}
    return {**amounts, **times, "by": grant.by, "reason": grant.reason, "id": grant.id}


def _print(usages: Collection[QuotaUsage]) -> None:
    headings = ("limit", "per", "subject", "used", "of", "until")
    rows = [*map(_row, usages)]
    for line in table(headings, rows, right={"used", "of"}) if rows else ["no counts"]:
        say(line)


def _reset(store: Store, arguments: Namespace, asked: Asked) -> int:
    usages, code = _find(store, asked)
    _print(usages.values())
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
        store.reset([*usages][first : first + _BATCH_SIZE])
    say(f"{len(usages)} reset to 0")
    return code


def _find(store: Store, asked: Asked, *granted: str) -> tuple[Mapping[str, QuotaUsage], int]:
    """Return the counts that have the names given, and the exit code; `granted` are keys, too."""
    kept = {key: QuotaUsage(key, 0, None, None) for key in granted} | store.entries(_pattern(asked))
    # Every run of the last day has counts, under ids that say nothing to a reader.
    hidden = () if asked.keys() & {"per", "key"} else (RUN, ROOT_RUN)
    usages = {
        key: usage
        for key, usage in kept.items()
        if usage is not None
        and parsed(key)
        # A key without a counter holds the number of a thread's newest root run.
        and not key.startswith(":")
        and _names(key)["per"] not in hidden
        # One that is over is kept for clocks that differ, and for what rolls over.
        and (usage.expires_at or math.inf) > time.time()
        and _is_of(key, asked)
    }
    if asked and not usages:
        *fewer, (name, text) = asked.items()
        others, _ = _find(store, dict(fewer))
        values = sorted({_names(key)[name] for key in others})
        nearest = get_close_matches(text, values, cutoff=0.5) or values[:3]
        named = f"nearest: {' or '.join(map(repr, nearest))}" if nearest else "there is none"
        raise CommandError(f"no count has --{name} {text!r} now; {named}")
    broken = sorted(key for key, usage in kept.items() if usage is None or not parsed(key))
    for key in broken:
        complain("quotas", f"{key!r} holds no count: delete it, or reset it with store.reset")
    in_order = sorted(usages, key=lambda key: [*_names(key).values()])
    return {key: usages[key] for key in in_order}, _BROKEN if broken else 0


def _names(text: str) -> dict[str, str]:
    """Return the names of a count by the options that choose it; a freeze is of no limit."""
    key = CountKey.parse(text)
    limit = key.counter and _limit_name(key)
    return {"limit": limit, "per": key.dimension, "subject": key.subject, "key": text}


def _limit_name(key: CountKey) -> str:
    """Return the name that a limit on a count has, unless it is given another."""
    if key.counter in UNITS:
        return DEFAULT_NAMES.get(key.counter, key.counter.removeprefix("model."))
    tools = key.counter.removeprefix(",")
    tools = f"*{tools.removeprefix(ALL_TOOLS)}" if tools.startswith(ALL_TOOLS) else tools
    return f"{CONCURRENCY if key.dimension == CONCURRENCY else 'tool'}:{tools}"


def _asked(arguments: Namespace) -> Asked:
    given = ((name, getattr(arguments, name, None)) for name in ("limit", "per", "subject", "key"))
    return {
        name: as_shown(text) if name in {"per", "subject"} else text
        for name, text in given
        if text is not None
    }


def _is_of(text: str, asked: Asked) -> bool:
    """Return whether a key has the names that were given; a freeze of all has all names."""
    names, is_freeze = _names(text), text.startswith(":")
    return all(
        names[name] == text or (is_freeze and not names[name]) for name, text in asked.items()
    )


def _pattern(asked: Asked) -> str:
    """Return a pattern of the keys that have the names given, and maybe of others."""
    key = CountKey("", asked.get("per", ""), asked.get("subject", ""))
    _, per, subject = str(key).split(":")
    return f"*:{per or '*'}:{subject}*" if per or subject else "*"


def _only(keys: Collection[str]) -> str:
    """Return the only key; if there are several, the error says which."""
    if len(keys) > 1:
        each = (
            f"--key {key} (until {_format_time(CountKey.parse(key).ends, key)})" for key in keys
        )
        raise CommandError(f"several match: add {' or '.join(each)}")
    return next(iter(keys))


def _row(usage: QuotaUsage) -> tuple[str, ...]:
    key, limit = CountKey.parse(usage.key), _limit(usage)
    most = "-" if limit is None else format_amount(limit, key.unit)
    until = "it drains" if key.limit else _format_time(usage.expires_at, usage.key)
    return (*_cells(usage.key), format_amount(usage.used, key.unit), most, until)


def _grant(store: Store, arguments: Namespace, asked: Asked) -> int:
    granted = (grant.key for grant in store.grants(_pattern(asked)) if grant.amount)
    key = _only(_find(store, asked, *granted)[0])
    text, unit = arguments.amount, CountKey.parse(key).unit
    if not text.isascii() or (unit not in PER_BASE_UNIT and not text.isdecimal()):
        number = "a number" if unit in PER_BASE_UNIT else "a whole number"
        raise CommandError(f"amount must be {number} of {UNIT_LABELS[unit]}, not {text!r}")
    amount: str | float = text if unit in PER_BASE_UNIT else int(text)
    with suppress(ValueError):  # else it is a time such as 30s
        amount = float(text) if unit == "milliseconds" else amount
    until = arguments.for_time and datetime.now(UTC) + arguments.for_time
    grant_id = uuid4().hex if arguments.id is None else arguments.id
    options = {"until": until, "reason": arguments.reason, "by": arguments.by}
    try:
        grant = store.grant(key, amount, window=None, id=grant_id, **options)
    except QuotaStoreError as error:
        remedy = f"to try again without granting twice add --id {grant_id}"
        raise QuotaStoreError(f"{error}; {remedy}") from error
    if (grant.ends or 0) <= time.time():
        raise CommandError(f"over already: {_line(grant)}; for another grant give another --id")
    say(f"granted {_line(grant)}")
    return 0


def _revoke(store: Store, arguments: Namespace, asked: Asked) -> int:
    keys = [each.key for each in store.grants() if each.amount and each.id == arguments.id]
    named = [key for key in keys if _is_of(key, asked)]
    ended = store.revoke(_only(named), arguments.id) if named else None
    if ended is None:
        where = f"one of {' and '.join(map(_whose, keys))}" if keys else "see quotas grants"
        raise CommandError(f"no such grant has the id {arguments.id!r}: {where}")
    say(f"revoked {_line(ended)}")
    return 0


def _grants(store: Store, arguments: Namespace, asked: Asked) -> int:
    grants = [grant for grant in store.grants() if _is_of(grant.key, asked)]
    if arguments.json:
        for grant in grants:
            say(json.dumps(_grant_object(grant)))
        return 0
    rows = [
        (
            *_cells(grant.key),
            format_amount(grant.amount, grant.unit) if grant.amount else "frozen",
            _until(grant),
            *(repr(grant.by), repr(grant.reason), printable(grant.id)),
        )
        for grant in grants
    ]
    headings = ("limit", "per", "subject", "granted", "until", "by", "reason", "id")
    for line in table(headings, rows, right={"granted"}) if rows else ["no grants"]:
        say(line)
    return 0


def _freeze(store: Store, arguments: Namespace, asked: Asked) -> int:
    until = arguments.for_time and datetime.now(UTC) + arguments.for_time
    options = {"until": until, "reason": arguments.reason, "by": arguments.by}
    freeze = run_sync(store.freeze(asked["per"], asked["subject"], **options))
    say(f"frozen: {_line(freeze)}")
    say(
        "a freeze does not stop calls that ask no store, limits with enforce=False, and, with "
        'on_store_error="allow", calls while the store is unavailable'
    )
    if arguments.per:
        # The subject is frozen, also where the user of the server has no right to list counts.
        try:
            # A customer may have called in a window that is over.
            counts = (key for key in store.entries(_pattern(asked)) if parsed(key))
            if not any(_is_of(key, asked) for key in counts if not key.startswith(":")):
                _find(store, asked)
        except (CommandError, QuotaStoreError) as error:
            complain("quotas", f"warning: this may stop nobody, because {error}")
    return 0


def _thaw(store: Store, arguments: Namespace, asked: Asked) -> int:
    per, subject = asked["per"], asked["subject"]
    freeze = run_sync(store.thaw(per, subject, by=arguments.by))
    if freeze is None:
        whose = calls_of(str(CountKey("", per, subject)))
        frozen = [calls_of(freeze.key) for freeze in run_sync(store.freezes())]
        nearest = " and ".join(get_close_matches(whose, frozen, cutoff=0)) or "nothing"
        raise CommandError(f"not frozen: {whose}; frozen: {nearest}")
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


def _cells(key: str) -> tuple[str, str, str]:
    """Return a count's names in a table."""
    limit, per, subject, _ = _names(key).values()
    return printable(limit), printable(per), repr(subject)


def _line(grant: Grant) -> str:
    """Return a grant in one line, for an audit log."""
    until, reason = _until(grant), f", reason {grant.reason!r}" if grant.reason else ""
    cause = f"by {grant.by!r}{reason}"
    if not grant.amount:
        since = _format_time(grant.given_at.timestamp(), grant.key)
        return f"{calls_of(grant.key)} since {since} until {until}, {cause}"
    amount = format_amount(grant.amount, grant.unit)
    if grant.unit == "calls":
        amount += " call" if grant.amount == 1 else " calls"
    return f"{amount} of {_whose(grant.key)} until {until}, {cause}, id {printable(grant.id)}"


def _whose(key: str) -> str:
    """Return whose count of which limit a key names."""
    limit, per, subject = _cells(key)
    return f"{limit} to {per}" + f" {subject}" * bool(CountKey.parse(key).subject)


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
