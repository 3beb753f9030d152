"""Grants: amounts that people add to the limits over one count, until they end."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_quota.limits.options import MODEL, UNITS, whole_amount
from langchain_quota.limits.quotas import CalendarWindow, parse_window
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.sync_async import T, run_sync
from langchain_quota.runtime.units import (
    MAX_DOLLARS,
    NANODOLLARS,
    UNIT_LABELS,
    Dollars,
    Time,
    Unit,
    format_amount,
    in_base_unit,
)
from langchain_quota.stores.base import BaseStore
from langchain_quota.stores.keys import (
    DEFAULT_NAMES,
    NOTES,
    CountKey,
    dimension_of,
    freezes_key,
    idle_time,
    read_emission_interval,
    unit_of,
)

if TYPE_CHECKING:
    from langchain_quota.stores.memory import Tables

MAX_TEXT = 1000
"""How long an id, a reason and a name may be: they are kept with the count, and logged."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)

_COUNTERS = {name: counter for counter, name in DEFAULT_NAMES.items()}

MAX_AMOUNT = MAX_DOLLARS * NANODOLLARS
"""The most that one grant gives: Redis adds in Lua, exactly up to 2**53."""

logger = logging.getLogger("langchain_quota")


@dataclass(frozen=True, slots=True)
class Grant:
    """An amount that raises the limits over one count.

    Attributes:
        key: The count's key.
        amount: How much more: calls, tokens, nanodollars or milliseconds, as the key
            counts them.
        id: The grant's name. A second grant with the same key and id adds nothing.
        given_at: When it was given, in UTC.
        until: When it ends, in UTC; once a store has given it, `None` only for a freeze that lasts
            until it is thawed.
        reason: Why it was given.
        by: Who gave it.

    Examples:
        >>> from langchain_quota import MemoryStore
        >>> store = MemoryStore()
        >>> grant = store.grant("email:user_id:ada", 50, window=None, id="4711")
        >>> store.grant("email:user_id:ada", 50, id="4711") == grant
        True
        >>> [grant.amount for grant in store.grants("email:*")]
        [50]
    """

    key: str
    amount: int
    id: str
    given_at: datetime
    until: datetime | None = None
    reason: str = ""
    by: str = ""

    @property
    def unit(self) -> Unit:
        """What the amount counts."""
        return unit_of(self.key)

    @property
    def ends(self) -> int | None:
        """When it ends, in whole seconds since the Unix epoch, never late; `None` if it lasts."""
        return None if self.until is None else math.floor(self.until.timestamp())


class SupportsGrants(BaseStore):
    """A store that gives grants, and freezes subjects."""

    def grant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        key: str,
        amount: Dollars | Time,
        *,
        window: timedelta | str | CalendarWindow | None = "",
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
    ) -> Grant:
        """Raise the limits over a count by an amount.

        Every limit over the count is raised until the grant ends, in all agents that share the
        store. A grant to the count of a window ends with the window. It holds for all calls that
        are checked from now on, in every process. It is logged at the level INFO.

        Args:
            key: The count's key, as `QuotaUsage` has it.
            amount: How much more, above 0, as the key counts: calls, tokens, dollars or a time.
            window: The quota's window, such as `quota.period`, if `key` is given without it: then
                the present window is meant. `None`: the quota has none. By default, a key without
                a window must have a count already.
            until: When the grant ends, with a time zone; stores count whole seconds, and round
                down. `None`: at the end of the window. If the
                count has no window: after the time for which the store keeps a count without
                charges, by default a year.
            reason: Why it is given, for the list and the log.
            by: Who gives it.
            id: The grant's name; by default a new one. If the key has a grant with this name, even
                one that ended within the last week, it is returned, and nothing is added.

        Raises:
            QuotaStoreError: The store failed. The grant may be given nevertheless: with an `id`
                of your own you can ask again, and nothing is given twice.
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of bounds, no count can have the key, or the grant would
                have ended already.
        """
        options: Any = {"window": window, "until": until, "reason": reason, "by": by, "id": id}
        return run_sync(self.agrant(key, amount, **options))

    async def agrant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        key: str,
        amount: Dollars | Time,
        *,
        window: timedelta | str | CalendarWindow | None = "",
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
    ) -> Grant:
        """`grant`, without blocking the event loop."""
        name = uuid4().hex if id is None else id
        _check_texts(key=key, reason=reason, by=by, id=name)
        if not name:
            raise ValueError("id must not be empty: leave it out for a new one")
        now, counted = self.clock(), self._counted(key, window)
        if read_emission_interval(counted):
            raise ValueError(
                f"a smooth quota takes no grants: raise its limit or its burst, not {counted!r}"
            )
        _check_until(until)
        parsed = CountKey.parse(counted)
        whole = whole_amount(parsed.unit, "amount", amount)
        if not 0 < whole <= MAX_AMOUNT:
            bound = f"at most {format_amount(MAX_AMOUNT, parsed.unit)}" if whole else "above 0"
            raise ValueError(f"amount must be {bound}, not {amount!r}")
        grant = Grant(counted, whole, name, in_utc(now), until, reason, by)
        ends = [end for end in (grant.ends, parsed.ends) if end is not None]
        last = math.ceil(now) + idle_time(counted, self._idle)
        grant = replace(grant, until=in_utc(min(ends, default=last)))
        counter = _COUNTERS.get(parsed.counter, f"{MODEL}.{parsed.counter}")
        # A tool may have such a name, too.
        if counter in UNITS or (window == "" and parsed.window is None):
            [use] = await self.apeek([counted])
            if use is None:
                remedy = "give the quota's window, window=quota.period, or window=None for none"
                if counter in UNITS:
                    remedy = f"write {str(replace(parsed, counter=counter))!r}"
                raise ValueError(f"nothing is counted under {counted!r}: {remedy}")
        stored, is_new = await self._at(counted, lambda tables: tables.grant(grant))
        if stored is None:
            when = f" after {grant.until.isoformat()}" if grant.until else ""
            raise ValueError(f"nothing can be granted under {counted!r}{when}: that time is over")
        if is_new:
            _log("granted", stored)
        return stored

    def revoke(self, key: str, id: str) -> Grant | None:  # noqa: A002 - the same
        """End a grant now. What was used with it stays counted.

        Args:
            key: The count's key with its window, as `Grant.key` has it.
            id: The grant's id.

        Returns:
            The grant that is ended; `None` if there is none, or it had ended.

        Raises:
            QuotaStoreError: The store failed. The grant may be ended nevertheless.
            TypeError: An argument has the wrong type.
            ValueError: The key is not that of a count.
        """
        return run_sync(self.arevoke(key, id))

    async def arevoke(self, key: str, id: str) -> Grant | None:  # noqa: A002 - the same
        """`revoke`, without blocking the event loop."""
        _check_texts(key=key, id=id)
        CountKey.parse(key)
        ended = await self._at(key, lambda tables: tables.revoke(key, id))
        if ended is not None:
            _log("revoked", ended)
        return ended

    def grants(self, pattern: str = "*") -> list[Grant]:
        """Return the grants that have not ended, sorted by key and time; see `usages`.

        The pattern `*` includes freezes: grants of 0 under keys such as `:tenant:acme`, or `::` if
        all are frozen.

        Args:
            pattern: A glob pattern of keys, as in Python's `fnmatch.fnmatchcase`.

        Raises:
            QuotaStoreError: The store failed.
            TypeError: The store serves no sync calls.
        """
        pages = self._listed(NOTES, pattern, lambda tables, some: tables.grants(some))
        grants = map(as_listed, chain.from_iterable(pages))
        return sorted(set(grants), key=lambda grant: (grant.key, grant.given_at))

    async def freeze(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        per: str,
        subject: str,
        *,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        prefix: str = "",
    ) -> Grant:
        """Freeze a subject, or all if both names are empty; see `QuotaMiddleware.freeze`."""
        _check_texts(per=per, subject=subject, reason=reason, by=by)
        _check_until(until)
        if bool(per) != bool(subject):
            raise ValueError(f"a freeze needs per and subject, or neither: {per!r}, {subject!r}")
        times = in_utc(self.clock()), until or _LAST
        freeze = Grant(freezes_key(prefix), 0, str(CountKey("", per, subject)), *times, reason, by)
        stored, _ = await self._at(freeze.key, lambda tables: tables.grant(freeze))
        if stored is None:
            raise ValueError(f"until must be later than now, not {until}")
        freeze = as_listed(stored)
        _log("frozen", freeze)
        return freeze

    async def thaw(self, per: str, subject: str, *, by: str = "", prefix: str = "") -> Grant | None:
        """End a freeze, and return it; `None` if there is none."""
        key, name = freezes_key(prefix), str(CountKey("", per, subject))
        ended = await self._at(key, lambda tables: tables.revoke(key, name))
        if ended is not None:
            ended = as_listed(ended)
            _log("thawed", replace(ended, by=by))
        return ended

    async def freezes(self, prefix: str = "") -> list[Grant]:
        """Return the freezes under a prefix, as `grants` does."""
        keys = [freezes_key(prefix)]
        [freezes] = await self._run(keys, lambda tables, _: tables.grants(keys), reads=True)
        return [*map(as_listed, freezes)]

    def _counted(self, text: str, window: timedelta | str | CalendarWindow | None) -> str:
        """Return the key of a count; if a window is given, of the present one."""
        key = CountKey.parse(text)
        if window in (None, ""):
            return text
        if key.window is not None:
            raise ValueError(f"key has a window, so window must be None: {text!r}")
        values = key.counter, key.dimension, key.subject, parse_window(window)
        return str(CountKey.at(*values, self.clock(), prefix=key.prefix))

    async def mark(self, key: str, limit: str, thresholds: Sequence[int]) -> tuple[int | None, int]:
        """Mark the highest threshold that a limit's settled use has passed, until it is reset.

        Return the use, if that is higher than what was marked, else `None`; and the mark, or 0.
        """
        return await self._at(key, lambda tables: tables.mark(key, limit, thresholds))

    async def _at(self, key: str, change: "Callable[[Tables], T]") -> T:
        """Make a change of what is kept under one key, and return its result."""
        [result] = await self._run([key], lambda tables, _: change(tables))
        return result


def _check_texts(**arguments: object) -> None:
    """Check that arguments are strings that can be kept."""
    for argument, value in arguments.items():
        validate_type(argument, value, str, "a string")
        if len(str(value)) > MAX_TEXT:
            raise ValueError(f"{argument} must have at most {MAX_TEXT} characters")


def _check_until(until: datetime | None) -> None:
    validate_type("until", until, datetime | None, "a datetime or None")
    if until is not None and until.tzinfo is None:
        raise ValueError(f"until must have a time zone, such as UTC, not {until!r}")


def as_listed(grant: Grant) -> Grant:
    """Return a grant; a freeze, which is one of 0, under its subject, and without an end if so."""
    if grant.amount or grant.until is None:
        return grant
    until = None if grant.until.year == _LAST.year else grant.until
    return replace(grant, key=grant.id, until=until)


def calls_of(key: str) -> str:
    """Return whose calls a freeze stops, by the key under which it is listed."""
    # A name is shown as its key encodes it, so that it forges no line.
    per, subject = dimension_of(key), CountKey.parse(key).subject
    return f"the calls of {per} {subject!r}" if per else "all calls"


def _log(event: str, grant: Grant) -> None:
    until = None if grant.until is None else grant.until.isoformat()
    fields = {
        "quota_event": event,
        "quota_key": grant.key,
        "quota_grant": grant.id,
        "quota_amount": in_base_unit(grant.amount, grant.unit),
        "quota_unit": UNIT_LABELS[grant.unit],
        "quota_until": until,
        "quota_reason": grant.reason,
        "quota_by": grant.by,
    }
    if grant.amount:
        amount = format_amount(grant.amount, grant.unit)
        logger.info(
            "%s under %r: %s until %s, by %r, reason %r, id %r",
            *(event, grant.key, amount, until, grant.by, grant.reason, grant.id),
            extra=fields,
        )
        return
    how = event if event == "thawed" else f"frozen until {until or 'they are thawed'}"
    texts = (calls_of(grant.key), how, grant.by, grant.reason)
    logger.info("%s are %s, by %r, reason %r", *texts, extra=fields)


def in_utc(seconds: float) -> datetime:
    """Return a time in UTC; the end of the year 9999 for any later time."""
    try:
        return _EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return _LAST if seconds > 0 else datetime.min.replace(tzinfo=UTC)
