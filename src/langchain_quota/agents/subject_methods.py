"""Methods that read and change what limits count for a subject, by the names of limits."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

from langchain_quota.core.plans import Meter, Place, Rule, store_counter
from langchain_quota.features.budgets.budgets import receipt_of
from langchain_quota.features.model_notes import added_to
from langchain_quota.limits import Limit, choose_quota
from langchain_quota.limits.call import ROOT_RUN, THREAD
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.resolver import quota_meter, subject_text
from langchain_quota.middleware.root_run import StoreSequence
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.sync_async import Mode, call_variant, run_sync
from langchain_quota.runtime.units import UNIT_LABELS, Dollars, Time, exact_amount
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.grants import Grant, SupportsGrants
from langchain_quota.stores.keys import CountKey, check_prefix
from langchain_quota.telemetry.receipts import Receipt

Id = str | int | UUID
"""Names a subject, such as a user or a customer."""


@dataclass(frozen=True, slots=True)
class Balance:
    """How much of a limit a subject has used, and what is left.

    Attributes:
        used: Calls or tokens as whole numbers, dollars or seconds as exact decimals. A budget
            includes what is reserved for calls that are running.
        limit: The limit with its grants.
        left: `limit` less `used`, from 0.
        unit: `"calls"`, `"tokens"`, `"dollars"` or `"seconds"`.
        resets_at: When the window ends; `None` without a window, and for a smooth quota.

    Examples:
        >>> from langchain_quota import MemoryStore, Quota, QuotaMiddleware, ToolCallLimit
        >>> limit = ToolCallLimit("email", quotas=[Quota(5, per="user_id")])
        >>> quota = QuotaMiddleware([limit], store=MemoryStore())
        >>> grant = quota.grant("tool:email", 2, user_id="ada", reason="ticket 4711")
        >>> quota.left("tool:email", user_id="ada").left
        7
    """

    used: int | Decimal
    limit: int | Decimal
    left: int | Decimal
    unit: str
    resets_at: datetime | None


class CountName(NamedTuple):
    """The names that choose a count, and the limit's number if a function decides it."""

    limit: str
    quota: str | None
    prefix: str | None
    subject: Mapping[str, Id]
    number: Dollars | Time | None = None


def balance_of(limit: Limit, meter: Meter, place: Place, uses: Mapping[str, QuotaUsage]) -> Balance:
    """Return the balance of a count; `uses` is what the store keeps under the place's keys."""
    used = uses[place.key].used if place.key in uses else 0
    most = (meter.maximum or 0) + added_to({"": place}, uses)[""]
    amounts = (exact_amount(amount, limit.unit) for amount in (used, most, max(0, most - used)))
    used_amount, limit_amount, left = amounts
    return Balance(used_amount, limit_amount, left, UNIT_LABELS[limit.unit], place.resets_at)


class SubjectMethods:
    """Limits whose counts in a store can be read, raised and reset by names."""

    kernel: Kernel
    has_state: ClassVar[bool] = False  # whether the agent's state has the counts of threads, too

    def receipt(self) -> AbstractContextManager[Receipt]:
        """Return a context manager that adds up what runs use: `with quota.receipt() as bill:`.

        It counts the calls of all models and tools that the runs of the block make, in sub-agents,
        tasks and threads, too, whatever agents they belong to. Not counted are other processes,
        and threads with neither the run's context nor its `callbacks`. Dollars are those of this
        middleware's `prices`, and need a `CostLimit`: without a number, `CostLimit(enforce=False)`.
        The refusals are those of all middlewares. Nothing of it is kept after the block.
        """
        return receipt_of(self.kernel)

    def left(
        self,
        name: str,
        /,
        *,
        quota: str | None = None,
        limit: Dollars | Time | None = None,
        prefix: str | None = None,
        **subject: Id,
    ) -> Balance:
        """Return what a subject has left of a limit now; all of it, if it never called.

        Args:
            name: The limit's name, as in logs and metrics.
            quota: The quota's name, needed if several quotas of the limit have the same `per`.
            limit: The limit's number, needed if a function decides it.
            prefix: The prefix of keys, needed if a function decides it for the store.
            subject: Whose count it is, called as the quota's `per`, such as `tenant="acme"`, or as
                its `name` if `per` is a function. None with `per="global"`; `thread="7"` for a
                `thread_limit`. With `per="root_run"`, the thread of its newest root run. A `per`
                that is called like another argument needs the store's methods.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The names choose no count, or several; or the middleware has no store.
            QuotaStoreError: The store was unavailable.
        """
        return run_sync(self._left("", CountName(name, quota, prefix, subject, limit)))

    async def aleft(
        self,
        name: str,
        /,
        *,
        quota: str | None = None,
        limit: Dollars | Time | None = None,
        prefix: str | None = None,
        **subject: Id,
    ) -> Balance:
        """Call `left` without blocking the event loop."""
        return await self._left("a", CountName(name, quota, prefix, subject, limit))

    def grant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        name: str,
        amount: Dollars | Time,
        /,
        *,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
        quota: str | None = None,
        prefix: str | None = None,
        **subject: Id,
    ) -> Grant:
        """Raise a subject's limits on one count by an amount, at once, even during a run.

        The amount is above 0, in the limit's unit: calls, tokens, dollars or a time. The subject is
        named as in `left`, and need not have called. The other arguments and the errors are those
        of `MemoryStore.grant`; without a store that gives grants it is a `TypeError`.
        """
        options = {"until": until, "reason": reason, "by": by, "id": id}
        return run_sync(self._grant("", CountName(name, quota, prefix, subject), amount, options))

    async def agrant(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        name: str,
        amount: Dollars | Time,
        /,
        *,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        id: str | None = None,  # noqa: A002 - as the field is called
        quota: str | None = None,
        prefix: str | None = None,
        **subject: Id,
    ) -> Grant:
        """Call `grant` without blocking the event loop."""
        options = {"until": until, "reason": reason, "by": by, "id": id}
        return await self._grant("a", CountName(name, quota, prefix, subject), amount, options)

    def revoke(
        self,
        name: str,
        grant_id: str,
        /,
        *,
        quota: str | None = None,
        prefix: str | None = None,
        **subject: Id,
    ) -> Grant | None:
        """End a grant now, and return it; `None` if there is none, or it had ended.

        The arguments and errors are those of `grant`. What was used with it stays counted.
        """
        return run_sync(self._revoke("", CountName(name, quota, prefix, subject), grant_id))

    async def arevoke(
        self,
        name: str,
        grant_id: str,
        /,
        *,
        quota: str | None = None,
        prefix: str | None = None,
        **subject: Id,
    ) -> Grant | None:
        """Call `revoke` without blocking the event loop."""
        return await self._revoke("a", CountName(name, quota, prefix, subject), grant_id)

    def reset(
        self, name: str, /, *, quota: str | None = None, prefix: str | None = None, **subject: Id
    ) -> None:
        """Set a subject's count to 0; the arguments and errors are those of `left`."""
        run_sync(self._reset_count("", CountName(name, quota, prefix, subject)))

    async def areset(
        self, name: str, /, *, quota: str | None = None, prefix: str | None = None, **subject: Id
    ) -> None:
        """Call `reset` without blocking the event loop."""
        await self._reset_count("a", CountName(name, quota, prefix, subject))

    async def balances(
        self, subject: Mapping[str, Id]
    ) -> list[tuple[Limit, str, CountKey, Balance]] | None:
        """Return what a subject has left of enforced limits, with the names of their quotas.

        The store is read once; `None` if it is unavailable. A number that a function decides is
        that of the last charge; before the first one, the quota is left out.

        Raises:
            ValueError: No quota counts by a name of the subject, or it has no prefix.
        """
        prefix: Any = subject.get("prefix")
        counts = [
            await self._find("a", CountName(limit.name, one.name, prefix, {per: subject[per]}))
            for limit in self.kernel.limits
            for one in limit.quotas
            # The key of a smooth quota has its number.
            if limit.enforce and not (one.smooth and callable(one.limit))
            if (per := one.dimension) in subject
        ]
        if not counts:
            raise ValueError(f"no quota counts by one of {[*subject]}")
        keys = [key for *_, place in counts for key in place.keys]
        uses = await counts[0][0].peek("a", list(dict.fromkeys(keys)))
        if uses is None:
            return None
        balances = []
        for _, limit, meter, place in counts:
            use = uses.get(place.key)
            number = meter.maximum if not meter.computed else use.limit if use else None
            if number is not None:
                balance = balance_of(limit, meter._replace(maximum=number), place, uses)
                balances.append((limit, meter.scope, CountKey.parse(place.key), balance))
        return balances

    def freeze(
        self,
        *,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        prefix: str | None = None,
        **subject: Id,
    ) -> None:
        """Block the calls of a subject in all processes, until it is thawed.

        From the store's answer on, limits that count for the subject refuse its calls, for the
        reason `"frozen"`, as their `exit_behavior` says. Calls that run go on. While the store is
        unavailable, `on_store_error` decides alone. A second freeze replaces the first one.

        Args:
            until: When the freeze ends by itself, with a time zone.
            reason: Why, for the list and the log.
            by: Who freezes.
            prefix: The prefix of keys, needed if a function decides it for the store.
            subject: Whose calls, such as `tenant="acme"` or `thread="7"`; without one, all calls
                that ask the store.

        Raises:
            TypeError: An argument has the wrong type, or the store keeps no freezes.
            ValueError: No enforced limit counts so, `until` is over, or there is no store.
            QuotaStoreError: The store was unavailable. The subject may be frozen nevertheless.
        """
        run_sync(self._freeze("freeze", subject, prefix, until=until, reason=reason, by=by))

    async def afreeze(
        self,
        *,
        until: datetime | None = None,
        reason: str = "",
        by: str = "",
        prefix: str | None = None,
        **subject: Id,
    ) -> None:
        """Call `freeze` without blocking the event loop."""
        await self._freeze("freeze", subject, prefix, until=until, reason=reason, by=by)

    def thaw(self, *, by: str = "", prefix: str | None = None, **subject: Id) -> bool:
        """End what `freeze` with the same subject began; return whether it was frozen."""
        return run_sync(self._freeze("thaw", subject, prefix, by=by))

    async def athaw(self, *, by: str = "", prefix: str | None = None, **subject: Id) -> bool:
        """Call `thaw` without blocking the event loop."""
        return await self._freeze("thaw", subject, prefix, by=by)

    async def _freeze(
        self, op: str, subject: Mapping[str, Id], prefix: str | None, **options: Any
    ) -> bool:
        store, client = self._granting(), self.kernel.store
        enforced = [limit for limit in self.kernel.limits if limit.counted and limit.enforce]
        names = {quota.dimension for limit in enforced for quota in limit.quotas}
        names |= {THREAD for limit in enforced if limit.thread_limit is not None}
        names -= {"global", ROOT_RUN}
        if not enforced or len(subject) > 1 or not names.issuperset(subject):
            expected = " or ".join([*(f"{name}=…" for name in sorted(names)), "no subject"])
            expected = expected if enforced else "an enforced limit that counts in the store"
            raise ValueError(f"{op} needs {expected}; given: {dict(subject)!r}")
        [(per, value)] = subject.items() or [("", "")]
        text = subject_text(f"the freeze per {per!r}", value) if per else ""
        if client is not None and callable(client.prefix):
            options["prefix"] = check_prefix("prefix", prefix)
        change = store.freeze if op == "freeze" else store.thaw
        return await change(per, text, **options) is not None

    async def _left(self, mode: Mode, name: CountName) -> Balance:
        client, limit, meter, place = await self._find(mode, name, reads=True)
        keys = [*place.keys]
        peeked = await call_variant(mode, client.store.peek, client.store.apeek, keys)
        uses = {use.key: use for use in peeked if use is not None}
        return balance_of(limit, meter, place, uses)

    async def _grant(self, mode: Mode, name: CountName, amount: Any, options: Any) -> Grant:
        store, place = self._granting(), (await self._find(mode, name))[-1]
        variants = store.grant, store.agrant
        return await call_variant(mode, *variants, place.key, amount, window=None, **options)

    async def _revoke(self, mode: Mode, name: CountName, grant_id: str) -> Grant | None:
        store, place = self._granting(), (await self._find(mode, name))[-1]
        return await call_variant(mode, store.revoke, store.arevoke, place.key, grant_id)

    async def _reset_count(self, mode: Mode, name: CountName) -> None:
        client, *_, place = await self._find(mode, name)
        if self.has_state and THREAD in name.subject and CountKey.parse(place.key).window is None:
            raise ValueError(
                f"the thread's state has the count of limit {name.limit!r}, too: call "
                "reset(agent, config)"
            )
        await client.reset(mode, [place.key])

    def _granting(self) -> SupportsGrants:
        store: object = self.kernel.store and self.kernel.store.store
        if not isinstance(store, SupportsGrants):
            raise TypeError(
                f"grants and freezes need a store that has them, not {store!r}: pass "
                "store=MemoryStore() or, for several processes, store=RedisStore()"
            )
        return store

    async def _find(
        self, mode: Mode, name: CountName, *, reads: bool = False
    ) -> tuple[StoreClient, Limit, Meter, Place]:
        """Return the store, the limit, the meter that the names choose, and its place."""
        validate_type("name", name.limit, str, "the name of a limit")
        limits = {limit.name: limit for limit in self.kernel.limits}
        limit, client = limits.get(name.limit), self.kernel.store
        if limit is None:
            names = ", ".join(map(repr, limits))
            raise ValueError(f"no limit has the name {name.limit!r}: choose one of {names}")
        quota = choose_quota(limit, name.quota, name.subject)
        if client is None:
            raise ValueError(
                f"limit {limit.name!r} counts in the agent's state: call "
                "usage(agent.get_state(config)), or give a store, such as store=MemoryStore()"
            )
        what = f"limit {limit.name!r}"
        prefix = check_prefix("prefix", name.prefix) if callable(client.prefix) else ""
        number: Any = limit.thread_limit if quota is None else quota.limit
        if callable(number):
            if name.number is None and (reads or (quota and quota.smooth)):
                remedy = "give it, limit=…" if reads else "use the store's own methods"
                raise ValueError(f"a function decides the number of {what}: {remedy}")
            # The keys of other counts do not depend on the number.
            number = name.number or 0
        subject = "".join(subject_text(what, value) for value in name.subject.values())
        if quota is None:
            meter = Rule.of(limit, thread=number, run=None).meters[0]
            key = CountKey(store_counter(limit), THREAD, subject, prefix=prefix)
            return client, limit, meter, Place(str(key))
        if quota.per == ROOT_RUN:
            subject = await StoreSequence(client, prefix).newest(mode, subject) or subject
        found = quota_meter(limit, quota, number, subject, prefix=prefix, now=client.clock())
        return client, limit, *found
