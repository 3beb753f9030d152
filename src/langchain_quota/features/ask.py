"""Ask a person at a limit whether the run may continue, and grant what the person answers.

The run is interrupted with the payload of LangChain's `HumanInTheLoopMiddleware`, which existing
interfaces show: one action, whose arguments say how much more each limit would grant.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from langgraph.errors import GraphInterrupt

from langchain_quota.core import messages
from langchain_quota.core.admission import Demand, admit
from langchain_quota.core.decision import Answer
from langchain_quota.core.plans import LimitSet, Places
from langchain_quota.limits import Limit
from langchain_quota.limits.call import STORE, THREAD, Scope
from langchain_quota.limits.options import whole_amount
from langchain_quota.middleware.calls import Step
from langchain_quota.middleware.context import call_context, running_config, running_runtime
from langchain_quota.middleware.feature import Feature, StepCheck
from langchain_quota.middleware.flow import STORE_UNAVAILABLE, Kernel
from langchain_quota.middleware.state import FeatureData, State, feature_ledger
from langchain_quota.runtime import compat
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import Mode, call_variant
from langchain_quota.runtime.units import (
    PER_BASE_UNIT,
    UNIT_LABELS,
    Unit,
    as_dollars,
    format_amount,
    in_base_unit,
)
from langchain_quota.stores.grants import MAX_AMOUNT, MAX_TEXT, SupportsGrants
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.logs import agent_name, fields_of, logger

if TYPE_CHECKING:
    from langchain.agents.middleware.human_in_the_loop import HITLRequest

ACTION = "raise_limits"
"""The name of the action that a person approves or rejects."""

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
        feature._asking_limit = asking[0]
        return feature

    _asking_limit: str

    def begin_run(self, state: State, feature_data: FeatureData) -> None:
        """Raise if the run cannot wait for a person's answer; drop the grants of the last run."""
        context = call_context(running_runtime())
        if not (context.remembers or context.invocation):
            raise RuntimeError(
                f"limit {self._asking_limit!r} has exit_behavior='ask', and a run that waits for a "
                "person needs a checkpointer: create_agent(…, checkpointer=…)"
            )
        grants = _state_grants(state)
        if grants:
            of_thread = {name: n for name, n in grants.items() if name.endswith(f"/{THREAD}")}
            feature_data[self.name] = {"granted": of_thread}

    def adjust_limits(self, state: State, limits: LimitSet, places: Places) -> LimitSet:
        """Raise limits by what people have granted in the thread's state."""
        grants = _state_grants(state).items()
        return limits.raised({name: amount for name, amount in grants if name not in places})

    async def admit(self, mode: Mode, step: Step, admit: StepCheck) -> Step:
        """Ask a person about refused calls, if a grant helps; check the step again."""
        step = await admit(mode, step)
        if not step.result.stopped or step.is_second:
            return step
        offers = _find_offers(step)
        grants: Sequence[_Offer] = ()
        if offers:
            answer, grants = self._ask_person(step, offers)
            step = step._replace(answer=answer)
            if answer.type == "reject":
                return step
        try:
            for grant in grants:
                if grant.key is not None:
                    await self._grant_in_store(mode, step, grant.key, grant)
        except QuotaStoreError as error:
            self.recorder.record_error("store", error)
            raise QuotaStoreError(STORE_UNAVAILABLE) from error
        # A store that has charged the request answers the same when the run is resumed again.
        new_grants = {grant.counter: grant.amount for grant in grants if grant.key is None}
        raised = step.original_limits.raised(new_grants)
        rebuilt = await self._kernel.prepared(mode, step.rebuilt(raised, step.places))
        if new_grants:
            total = Counter(_state_grants(step.state)) + Counter(new_grants)
            rebuilt = rebuilt.saving(self.name, {"granted": dict(total)})
        # Nobody is asked about calls that are still refused.
        asking = rebuilt.limits.asking
        stops = {name: n for name, n in step.stops.items() if name not in asking}
        return await admit(mode, rebuilt._replace(answer=step.answer, stops=stops))

    def _ask_person(
        self, step: Step, offers: Sequence["_Offer"]
    ) -> tuple[Answer, Sequence["_Offer"]]:
        """Interrupt the run with a question; return a person's answer and the grants in it."""
        agent, name = step.context.agent, step.question
        limits = sorted({offer.limit.name for offer in offers})
        problem = ""
        while True:
            try:
                payload = _payload(step, offers, problem)
                resumed = compat.ask(payload, _answer_schema(offers))
            except GraphInterrupt:
                if self.recorder.is_new(f"{name}/question", problem):
                    self._count(agent, limits, "asked")
                    self.recorder.log(_log_question, agent_name(agent), limits)
                raise
            try:
                answer = _parse_answer(resumed, offers)
                break
            except ValueError as error:
                # LangGraph replays this answer, so only a new question can get another one.
                problem = f"The answer could not be used: {error}. "
        grants = _highest_by_count(offers, answer.granted)
        if self.recorder.is_new(f"{name}/answer", answer):
            self._count(agent, limits, answer.type)
            self.recorder.log(_log_answer, agent_name(agent), limits, answer)
            in_state = [
                (grant.limit.name, grant.scope, grant.limit.unit, grant.amount)
                for grant in grants
                if grant.key is None
            ]
            self.recorder.record_grants(agent, in_state)
        return answer, grants

    async def _grant_in_store(self, mode: Mode, step: Step, key: str, grant: "_Offer") -> None:
        """Grant an amount under a key, once however often the run is resumed."""
        store: object = self.store and self.store.store
        answer, thread_id = step.answer, step.context.run_thread_id
        assert isinstance(store, SupportsGrants)  # noqa: S101 - for the type checker: see `create`
        assert answer is not None  # noqa: S101 - for the type checker: a person has granted this
        thread = "" if thread_id is None else str(thread_id)
        reason = answer.message or f"a person was asked in thread {thread!r}"
        await call_variant(
            mode,
            store.grant,
            store.agrant,
            key,
            _in_unit(grant.amount, grant.limit.unit),
            window=None,
            id=f"{step.question}/{key}"[:MAX_TEXT],
            by=answer.by[:MAX_TEXT],
            reason=reason[:MAX_TEXT],
        )

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


_Needs = dict[tuple[str, Scope], int]
"""How much more calls need, by limit and scope."""


def _find_offers(step: Step) -> list[_Offer]:
    """Return the thresholds to raise so that refused calls run; none if that would not help."""
    needs: _Needs = {}
    while True:
        offers = _offers_for(step, needs)
        still_needed = _needs_after(step, _highest_by_count(offers, _amounts(offers)))
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


def _offers_for(step: Step, needs: _Needs) -> list[_Offer]:
    """Return the offers that cover needs: the same amount for all thresholds of a limit."""
    offers = []
    in_state = _state_grants(step.state)
    for rule in step.limits.rules:
        limit = rule.limit
        meters = [meter for meter in rule.meters if (limit.name, meter.scope) in needs]
        if not meters:
            continue
        # By default as much as the limit says without grants.
        amount = min(
            (meter.maximum or 0)
            - step.result.granted.get(meter.counter, 0)
            - in_state.get(meter.counter, 0)
            for meter in meters
        )
        if limit.grant is not None:
            amount = whole_amount(limit.unit, "grant", limit.grant)
        offered = max(amount, *(needs[limit.name, meter.scope] for meter in meters))
        for meter in meters:
            key = None if step.sent is None else step.sent.counters[meter.counter].key
            offers.append(_Offer(limit, meter.scope, meter.counter, key, offered))
    return offers


def _needs_after(step: Step, grants: Sequence[_Offer]) -> _Needs | None:
    """Return how much more than grants the calls need; `None` if no call can run.

    Calls that limits refuse which do not ask need nothing.
    """
    asking, result = step.limits.asking, step.result
    # Check the calls as if everything that they need were granted.
    demands = [
        Demand(amounts, tuple(t for t in thresholds if t.limit not in asking or t.scope == STORE))
        for amounts, thresholds in step.demands
    ]
    stops = {name: after for name, after in step.stops.items() if name not in asking}
    granted = {grant.counter: grant.amount for grant in grants}
    unasked = admit(demands, result.used, stops, granted)
    # Nobody is asked to allow what an operator has stopped.
    if unasked.stopped or result.frozen or (step.sent is not None and not step.answered):
        return None
    needs: _Needs = {}
    added = unasked.charged(demands)
    for (_, thresholds), runs in zip(step.demands, unasked.admitted, strict=True):
        for threshold in thresholds if runs else ():
            lacking = result.used[threshold.counter] + added[threshold.counter] - threshold.maximum
            if threshold.limit in asking and lacking > 0:
                needs[threshold.limit, threshold.scope] = lacking
    return needs


def _amounts(offers: Sequence[_Offer]) -> dict[str, int]:
    """Return the offered amounts by the name of the limit."""
    return {offer.limit.name: offer.amount for offer in offers}


def _highest_by_count(offers: Sequence[_Offer], amounts: Mapping[str, int]) -> list[_Offer]:
    """Return one grant for each count, of the highest amount that a limit on it gets."""
    highest: dict[str, _Offer] = {}
    for offer in offers:
        amount = amounts.get(offer.limit.name, 0)
        if amount > (highest[offer.counter].amount if offer.counter in highest else 0):
            highest[offer.counter] = offer._replace(amount=amount)
    return [*highest.values()]


def _payload(step: Step, offers: Sequence[_Offer], problem: str) -> "HITLRequest":
    """Return the question, with the problem of an earlier answer, if any."""
    offered = {offer.limit.name: offer for offer in offers}
    args = {name: _in_unit(offer.amount, offer.limit.unit) for name, offer in offered.items()}
    grants = ", ".join(map(_shown, offered.values()))
    _, breaches = step.decide()
    asking = [breach for breach in breaches if breach.rule.limit.name in offered]
    reasons = " ".join(f"{messages.reached(breach).rstrip('.')}." for breach in asking)
    text = f"{problem}{reasons} Approve to allow {grants}. Reject to end the run."
    return {
        "action_requests": [{"name": ACTION, "args": args, "description": text}],
        "review_configs": [{"action_name": ACTION, "allowed_decisions": ["approve", "reject"]}],
    }


def _shown(offer: _Offer) -> str:
    name, unit, amount = offer.limit.name, offer.limit.unit, offer.amount
    if unit in PER_BASE_UNIT:
        return f"{format_amount(amount, unit)} more for {name!r}"
    noun = unit.removesuffix("s") if amount == 1 else unit
    return f"{amount:,} more {noun} for {name!r}"


def _answer_schema(offers: Sequence[_Offer]) -> dict[str, object]:
    """Return the JSON Schema of an answer, from which interfaces make a form."""
    fields: dict[str, object] = {"type": {"enum": ["approve", "reject"]}}
    unit, *further = sorted({offer.limit.unit for offer in offers})
    if not further:
        description = f"How much to allow, in {UNIT_LABELS[unit]}; by default what is offered."
        kind = ["number", "string"] if unit in PER_BASE_UNIT else "integer"
        fields["amount"] = {"type": kind, "description": description}
    fields |= {name: {"type": "string"} for name in ("message", "by")}
    decision = {"type": "object", "properties": fields, "required": ["type"]}
    decisions = {"type": "array", "items": decision, "minItems": 1, "maxItems": 1}
    return {"type": "object", "properties": {"decisions": decisions}, "required": ["decisions"]}


def _parse_answer(resumed: object, offers: Sequence[_Offer]) -> Answer:
    """Parse the answer that resumes a run: a `HITLResponse`, which may have an amount."""
    match resumed:
        case {"decisions": [{"type": "approve" | "reject" as kind, **decision}], **response}:
            pass
        case _:
            raise ValueError(f"it must be {_ANSWERS}, not {resumed!r}")
    # LangGraph's server has authenticated this user, so it wins over a name in the answer. Anywhere
    # else the caller can write it.
    configurable = running_config().get("configurable") or {}
    on_server = "langgraph_api" in sys.modules
    user = configurable.get("langgraph_auth_user_id") if on_server else None
    by = user or decision.get("by") or response.get("by") or ""
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


def _in_unit(amount: int, unit: Unit) -> float | str:
    """Return an amount in the unit of people and stores: dollars exactly, as text."""
    if unit == "nanodollars":
        return as_dollars(amount).replace("$", "").replace(",", "")
    return in_base_unit(amount, unit)


def _state_grants(state: State) -> Mapping[str, int]:
    """Return what people have granted to the thread and to this run, by the state's counters."""
    return feature_ledger(state, Questions.name).get("granted") or {}


def _log_question(agent: str, limits: Sequence[str]) -> None:
    fields = fields_of(event="asked", agent=agent, limits=[*limits])
    listed = ", ".join(map(repr, limits))
    logger.info("agent %r asks a person whether it may go on at %s", agent, listed, extra=fields)


def _log_answer(agent: str, limits: Sequence[str], answer: Answer) -> None:
    verdict, by, listed = answer.type, answer.by, ", ".join(map(repr, limits))
    fields = fields_of(event="answered", agent=agent, limits=[*limits], answer=verdict, by=by)
    logger.info("agent %r was answered %r at %s, by %r", agent, verdict, listed, by, extra=fields)
