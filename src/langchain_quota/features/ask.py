"""Ask a person at a limit whether the run may go on, and grant what the person answers.

The run is interrupted with the payload of LangChain's `HumanInTheLoopMiddleware`, which existing
interfaces show: one action, whose arguments say how much more each limit would grant.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt

from langchain_quota.core import messages
from langchain_quota.core.admission import AcquireResult, Demand, admit
from langchain_quota.core.checks import ResolvedLimits
from langchain_quota.core.decision import Answer
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.limits.call import STORE, THREAD, Scope
from langchain_quota.limits.options import whole_amount
from langchain_quota.middleware.calls import Batch
from langchain_quota.middleware.context import (
    call_context,
    running_config,
    running_runtime,
)
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import FeatureData, State, feature_ledger
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, call_variant
from langchain_quota.runtime.units import Unit, as_dollars, format_amount, in_base_unit
from langchain_quota.stores.grants import MAX_AMOUNT, MAX_TEXT, SupportsGrants
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.logs import agent_name, fields_of, logger

ACTION = "raise_limits"
"""The name of the action that a person approves or rejects."""

KEPT = (
    "the store could not be asked, and the answer of a person waits for it: resume the run again "
    "when the store answers; the answer is kept"
)
"""The message if the store fails that has to grant what a person answered."""

_ANSWERS = (
    '{"decisions": [{"type": "approve"}]}, or with "reject", or with "approve" and an "amount"'
)


class Questions(Feature):
    """Asks people at the limits of a middleware."""

    name = "ask"

    @classmethod
    def create(cls, kernel: Kernel) -> "Questions | None":
        """Return the feature if a limit asks."""
        asking = [
            limit.name for limit in kernel.limits if limit.enforce and limit.exit_behavior == "ask"
        ]
        if not asking:
            return None
        if kernel.why_nobody_is_asked:
            raise ValueError(
                f"limit {asking[0]!r} has exit_behavior='ask', which {kernel.why_nobody_is_asked}"
            )
        feature = cls(kernel)
        if feature.store is not None and not isinstance(feature.store.store, SupportsGrants):
            raise TypeError(
                "exit_behavior='ask' needs a store that can grant more, as MemoryStore, "
                f"RedisStore and PostgresStore can, not {feature.store.store!r}"
            )
        feature._first = asking[0]
        return feature

    _first: str

    def begin_run(self, state: State, feature_data: FeatureData) -> None:
        """Check that a run can wait for the answer of a person; it has no grants of its own yet."""
        context = call_context(running_runtime(), model_name=None)
        if not (context.remembers or context.invocation):
            raise RuntimeError(
                f"limit {self._first!r} has exit_behavior='ask', and a run that waits for a person "
                "needs a checkpointer: create_agent(…, checkpointer=…)"
            )
        granted = _granted(state)
        if granted:
            of_thread = {name: n for name, n in granted.items() if name.endswith(f"/{THREAD}")}
            feature_data[self.name] = {"granted": of_thread}

    def adjust_limits(self, state: State, limits: ResolvedLimits) -> ResolvedLimits:
        """Raise limits by what people have granted in the thread's state."""
        return limits.raised(_granted(state))

    def on_store_unavailable(self, batch: Batch) -> None:
        """Fail a run that is resumed with an answer; it can be resumed again."""
        # Nothing is undone: a store that has received it answers the same when asked again.
        if batch.answer is not None or (batch.limits.asking and compat.is_answered()):
            raise QuotaStoreError(KEPT)

    async def recheck_stopped(
        self, mode: Mode, batch: Batch, result: AcquireResult
    ) -> tuple[Batch, AcquireResult]:
        """Ask a person about refused calls, if that helps; the newest batch, and its result."""
        offers = _offers(batch, result)
        granted: Sequence[_Offer] = ()
        if offers:
            batch.answer, granted = self._answered(batch, result, offers)
            if batch.answer.type == "reject":
                return batch, result
        try:
            for offer in granted:
                if offer.key is not None:
                    arguments = _grant(batch, offer)
                    store: object = self.store and self.store.store
                    assert isinstance(store, SupportsGrants)  # noqa: S101 - as `of` has checked
                    await call_variant(mode, store.grant, store.agrant, offer.key, **arguments)
        except QuotaStoreError as error:
            self.recorder.record_error("store", error)
            raise QuotaStoreError(KEPT) from error
        # A store that has charged the request once answers the same when the run is resumed again.
        raised_by = {offer.counter: offer.amount for offer in granted if offer.key is None}
        again = batch.rebuild(batch.original_limits.raised(raised_by))
        assert again is not None  # noqa: S101 - for the type checker: the calls wait
        self._kernel.adjust_checks(again)
        again.answer = batch.answer
        if raised_by:
            thread_grants = _granted(batch.state)
            raised_by = {
                name: thread_grants.get(name, 0) + amount for name, amount in raised_by.items()
            }
            again.save(self.name, {"granted": {**thread_grants, **raised_by}})
        # Nobody is asked about what is refused now.
        asking = again.limits.asking
        again.stops = {name: n for name, n in batch.stops.items() if name not in asking}
        return again, await self._kernel.acquire(mode, again)

    def _answered(
        self, batch: Batch, result: AcquireResult, offers: Sequence["_Offer"]
    ) -> tuple[Answer, Sequence["_Offer"]]:
        """Return a person's answer and what it grants: LangGraph interrupts the run here."""
        agent, name = batch.context.agent, batch.question
        limits = sorted({offer.limit.name for offer in offers})
        problem = ""
        while True:
            try:
                resumed = interrupt(_payload(batch, result, offers, problem))
            except GraphInterrupt:
                if self.recorder.is_new(f"{name}/question", problem):
                    self._count(agent, limits, "asked")
                    self.recorder.log(_log_question, agent_name(agent), limits)
                raise
            try:
                answer = _read(resumed, offers)
                break
            except ValueError as error:
                # LangGraph keeps an answer: only a new question can get another one.
                problem = f"The answer could not be used: {error}. "
        granted = _by_count(offers, answer.granted)
        if self.recorder.is_new(f"{name}/answer", answer):
            self._count(agent, limits, answer.type)
            self.recorder.log(_log_answer, agent_name(agent), limits, answer)
            counted = (limit for limit in granted if limit.key is None)
            self.recorder.record_grants(
                agent,
                [
                    (limit.limit.name, limit.scope, limit.limit.unit, limit.amount)
                    for limit in counted
                ],
            )
        return answer, granted

    def _count(self, agent: str | None, limits: Sequence[str], event: str) -> None:
        for limit in limits:
            self.recorder.count(names.QUESTIONS, agent, limit_label(limit), event)


class _Offer(NamedTuple):
    """A threshold that an approval raises, and by how much."""

    limit: Limit
    scope: Scope
    counter: str
    # Where a store keeps the count; `None` if the thread's state does.
    key: str | None
    amount: int


_Needs = dict[tuple[str, Scope], int]  # how much more calls need, by limit and scope


def _offers(batch: Batch, result: AcquireResult) -> list[_Offer]:
    """Return the thresholds to raise so that refused calls run; none if that would not help."""
    needs: _Needs = {}
    while True:
        offers = _offered(batch, result, needs)
        still_needed = _needed(batch, result, _by_count(offers, _amounts(offers)))
        if still_needed is None:
            return []
        # A grant also raises limits that do not ask: then more calls run, and need more.
        total = {
            key: max(still_needed.get(key, 0), needs.get(key, 0))
            for key in {**needs, **still_needed}
        }
        if total == needs:
            return offers
        needs = total


def _offered(batch: Batch, result: AcquireResult, needs: _Needs) -> list[_Offer]:
    """Return the offer that covers a need: of each limit the same for all its thresholds."""
    offers = []
    in_state = _granted(batch.state)
    for resolved in batch.limits.limits:
        limit = resolved.limit
        rows = [check for check in resolved.checks if (limit.name, check.scope) in needs]
        if not rows:
            continue
        # By default as much as the limit says without grants.
        room = min(
            (row.maximum or 0) - result.granted.get(row.counter, 0) - in_state.get(row.counter, 0)
            for row in rows
        )
        if limit.grant is not None:
            room = whole_amount(limit.unit, "grant", limit.grant)
        offered = max(room, *(needs[limit.name, row.scope] for row in rows))
        for row in rows:
            key = None if batch.sent is None else batch.sent.counters[row.counter].key
            offers.append(_Offer(limit, row.scope, row.counter, key, offered))
    return offers


def _needed(batch: Batch, result: AcquireResult, granted: Sequence[_Offer]) -> _Needs | None:
    """Return how much more the calls need that no other limit refuses; `None` if none can run."""
    asking = batch.limits.asking
    # The answer if all that these calls need were granted.
    demands = [
        Demand(amounts, tuple(t for t in over if t.limit not in asking or t.scope == STORE))
        for amounts, over in batch.demands
    ]
    stops = {name: after for name, after in batch.stops.items() if name not in asking}
    free = admit(demands, result.used, stops, {each.counter: each.amount for each in granted})
    if free.stopped or (batch.sent is not None and not batch.answered):
        return None
    needs: _Needs = {}
    added = free.charged(demands)
    for (_, thresholds), runs in zip(batch.demands, free.admitted, strict=True):
        for threshold in thresholds if runs else ():
            lacking = result.used[threshold.counter] + added[threshold.counter] - threshold.maximum
            if threshold.limit in asking and lacking > 0:
                needs[threshold.limit, threshold.scope] = lacking
    return needs


def _amounts(offers: Sequence[_Offer]) -> dict[str, int]:
    """Return the offered amounts by the name of the limit."""
    return {offer.limit.name: offer.amount for offer in offers}


def _by_count(offers: Sequence[_Offer], amounts: Mapping[str, int]) -> list[_Offer]:
    """Return the grants, one for each count: limits can share one, and the highest counts."""
    highest: dict[str, _Offer] = {}
    for offer in offers:
        amount = amounts.get(offer.limit.name, 0)
        if amount > (highest[offer.counter].amount if offer.counter in highest else 0):
            highest[offer.counter] = offer._replace(amount=amount)
    return [*highest.values()]


def _payload(
    batch: Batch, result: AcquireResult, offers: Sequence[_Offer], problem: str
) -> dict[str, Any]:
    """Return the question as a `HITLRequest`, with the problem of an earlier answer, if any."""
    offered = _amounts(offers)
    units = {offer.limit.name: offer.limit.unit for offer in offers}
    args = {name: _given(amount, units[name]) for name, amount in offered.items()}
    _, breaches = batch.decide(result)
    asking = [breach for breach in breaches if breach.limit.limit.name in offered]
    text = problem + messages.question(asking, offered, units)
    return {
        "action_requests": [{"name": ACTION, "args": args, "description": text}],
        "review_configs": [{"action_name": ACTION, "allowed_decisions": ["approve", "reject"]}],
    }


def _read(resumed: object, offers: Sequence[_Offer]) -> Answer:
    """Read the answer that resumes a run: a `HITLResponse`, which may have an amount."""
    match resumed:
        case {"decisions": [{"type": "approve" | "reject" as kind, **decision}], **others}:
            pass
        case _:
            raise ValueError(f"it must be {_ANSWERS}, not {resumed!r}")
    # LangGraph's server has checked its user, who wins over a name that the answer claims. Anywhere
    # else the caller may have written it.
    configurable = running_config().get("configurable") or {}
    on_server = "langgraph_api" in sys.modules
    user = configurable.get("langgraph_auth_user_id") if on_server else None
    by = user or decision.get("by") or others.get("by") or ""
    # Agent Inbox sends what a person says as "args".
    inbox = decision.get("args")
    message = decision.get("message") or (inbox if isinstance(inbox, str) else "")
    granted: Mapping[str, int] = {}
    if kind == "approve":
        amount, offered = decision.get("amount"), _amounts(offers)
        granted = offered if amount is None else dict.fromkeys(offered, _amount(amount, offers))
    return Answer(kind, granted, str(by), str(message))


def _amount(value: object, offers: Sequence[_Offer]) -> int:
    """Return the amount that a person gives to each limit of the question."""
    unit, *further = sorted({offer.limit.unit for offer in offers})
    if further:
        raise ValueError('the limits do not count the same: approve without an "amount"')
    try:
        amount = whole_amount(unit, '"amount"', value)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if amount > MAX_AMOUNT:
        raise ValueError(
            f'"amount" must be at most {format_amount(MAX_AMOUNT, unit)}, not {value!r}'
        )
    return amount


def _grant(batch: Batch, granted: _Offer) -> dict[str, Any]:
    """Return the arguments of `store.grant`, which are the same each time the run is resumed."""
    answer, thread_id = batch.answer, batch.context.run_thread_id
    assert answer is not None  # noqa: S101 - for the type checker: it is granted
    thread = "" if thread_id is None else str(thread_id)
    reason = answer.message or f"a person was asked in thread {thread!r}"
    return {
        "amount": _given(granted.amount, granted.limit.unit),
        "window": None,
        "id": f"{batch.question}/{granted.counter}"[:MAX_TEXT],
        "by": answer.by[:MAX_TEXT],
        "reason": reason[:MAX_TEXT],
    }


def _given(amount: int, unit: Unit) -> float | str:
    """Return an amount as people and stores are given it: dollars exactly, as text."""
    if unit == "nanodollars":
        return as_dollars(amount).replace("$", "").replace(",", "")
    return in_base_unit(amount, unit)


def _granted(state: State) -> Mapping[str, int]:
    """Return what people have granted to the thread and to this run, if the state counts them."""
    return feature_ledger(state, Questions.name).get("granted") or {}


def _log_question(agent: str, limits: Sequence[str]) -> None:
    fields = fields_of(event="asked", agent=agent, limits=[*limits])
    listed = ", ".join(map(repr, limits))
    logger.info("agent %r asks a person whether it may go on at %s", agent, listed, extra=fields)


def _log_answer(agent: str, limits: Sequence[str], answer: Answer) -> None:
    verdict, by, listed = answer.type, answer.by, ", ".join(map(repr, limits))
    fields = fields_of(event="answered", agent=agent, limits=[*limits], answer=verdict, by=by)
    logger.info("agent %r was answered %r at %s, by %r", agent, verdict, listed, by, extra=fields)
