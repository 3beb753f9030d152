"""`quotas grant`, `revoke` and `grants`: more of a shared quota, for a time."""

import json
import logging
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from getpass import getuser
from uuid import uuid4

from langchain_quota.cli.command import CommandError, escaped, say, say_table, when
from langchain_quota.cli.quotas_arguments import NO_WINDOW
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import window_end
from langchain_quota.stores.grants import Grant, in_window, unit_of
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.redis import RedisStore
from langchain_quota.units import shown

_HEADINGS = ("key", "granted", "until", "by", "reason", "id")


def grant(store: RedisStore, arguments: Namespace) -> int:
    """Give more of a quota; the exit code."""
    key = _count(store, arguments)
    text, unit = arguments.amount, unit_of(key)
    if unit != "microdollars" and not text.isdecimal():
        raise CommandError(f"amount must be a whole number of {unit}, not {text!r}")
    amount = text if unit == "microdollars" else int(text)
    until = None
    if arguments.for_time is not None:
        try:
            until = datetime.now(UTC) + arguments.for_time
        except OverflowError:
            raise CommandError("--for must end before the year 10000") from None
    name = uuid4().hex if arguments.id is None else arguments.id
    by, reason = _user() if arguments.by is None else arguments.by, arguments.reason
    try:
        with _audit() as told:
            given = store.grant(key, amount, until=until, reason=reason, by=by, id=name)
    except QuotaStoreError as error:
        again = f"to try again without granting twice add --id {name}"
        raise QuotaStoreError(f"{error}; {again}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    event = "granted" if told else "was granted before:"
    if (given.ends or 0) <= time.time():
        event = "was granted before, and is over:"
    say(f"{event} {_line(given)}")
    return 0


def revoke(store: RedisStore, arguments: Namespace) -> int:
    """End a grant; the exit code."""
    key = arguments.key
    for each in store.grants(_glob(key) + "*"):
        if each.id == arguments.id and key in {each.key, _base(each.key)}:
            with _audit():
                ended = store.revoke(each.key, each.id)
            if ended is not None:
                say(f"revoked {_line(ended)}")
                return 0
    raise CommandError(f"nothing is granted under {key!r} with the id {arguments.id!r}")


def show(store: RedisStore, arguments: Namespace) -> int:
    """Print the grants that have not ended; the exit code."""
    found = {
        (each.key, each.id): each
        for pattern in arguments.keys or ("*",)
        for each in store.grants(pattern)
    }
    in_order = sorted(found.values(), key=lambda grant: (grant.key, grant.given_at))
    say_table(_HEADINGS, [*map(_row, in_order)], right={"granted"}, empty="no grants")
    return 0


def _row(each: Grant) -> tuple[str, ...]:
    amount, key, name = shown(each.amount, each.unit), escaped(each.key), escaped(each.id)
    return (key, amount, when(each.ends), repr(each.by), repr(each.reason), name)


def _count(store: RedisStore, arguments: Namespace) -> str:
    """The whole key of the count; if it has a window, the key for the present one."""
    text: str = arguments.key
    try:
        key = CountKey.parse(text)
    except ValueError:
        raise CommandError(
            f"--key must be the key of a count, such as email:user_id:ada, not {text!r}: "
            "quotas show lists what is counted, per what, and for whom"
        ) from None
    if key.window is not None or ("window" in arguments and arguments.window is None):
        return text
    if "window" in arguments:
        return in_window(text, arguments.window, time.time())
    found = [
        each.key
        for each in store.usages(_glob(text) + "*")
        if _base(each.key) == text and (window_end(each.key) or time.time() + 1) > time.time()
    ]
    if len(found) == 1:
        return found[0]
    if found:
        several = "several counts are meant: give one of them, --key"
        raise CommandError(f"{several} {' or '.join(found)}")
    raise CommandError(
        f"nothing is counted under {text!r} now: add the window of the quota, such as --window 1d, "
        f"or --window {NO_WINDOW}"
    )


def _base(text: str) -> str:
    """A key's text without its window."""
    with suppress(ValueError):
        key = CountKey.parse(text)
        if key.window is not None:
            return text.removesuffix(f":{key.window}:{key.index}")
    return text


def _glob(text: str) -> str:
    """A pattern that only the text itself matches."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _line(grant: Grant) -> str:
    amount = shown(grant.amount, grant.unit) + (" calls" if grant.unit == "calls" else "")
    return f"{amount} under {escaped(grant.key)} until {when(grant.ends)}, id {escaped(grant.id)}"


@contextmanager
def _audit() -> Iterator[list[str]]:
    """Print what is logged about grants on stderr, as JSON; gives the list of these lines."""
    handler = _Audit()
    logger = logging.getLogger("langchain_quota")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Audit(logging.Handler):
    """Prints the fields of records about grants."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        fields = {name: value for name, value in vars(record).items() if name.startswith("quota_")}
        if fields:
            time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            self.lines.append(json.dumps({"time": time, **fields}))
            print(self.lines[-1], file=sys.stderr, flush=True)  # noqa: T201 - a command's output


def _user() -> str:
    """Who runs the command; empty if the system does not know."""
    try:
        return getuser()
    except (ImportError, KeyError, OSError):
        return ""
