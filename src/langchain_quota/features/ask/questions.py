"""Asks a person at a limit whether the run may go on, and grants what the person answers.

The run is interrupted with the payload of LangChain's `HumanInTheLoopMiddleware`, which existing
interfaces show: one action, whose arguments say how much more each limit would grant.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt

from langchain_quota import messages
from langchain_quota.admission import AcquireResult, Hits, admit
from langchain_quota.concurrency import Form, ask
from langchain_quota.decision import STORE, THREAD, Answer, Scope
from langchain_quota.errors import QuotaStoreError
from langchain_quota.features.ask.answers import ACTION, KEPT, is_answered, read_answer
from langchain_quota.limits import Limit
from langchain_quota.limits.options import whole_amount
from langchain_quota.middleware.calls import Batch
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.feature import Feature
from langchain_quota.rule import ResolvedLimits
from langchain_quota.state import Own, own_of
from langchain_quota.stores.grants import MAX_TEXT, Granting
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.units import Unit, as_dollars

_Needs = Mapping[tuple[str, Scope], int]
"""How much more calls need, by limit and scope."""


class Questions(Feature):
    """Asks people at the limits of a middleware."""

    name = "ask"

    @classmethod
    def of(cls, limiter: Any) -> "Questions | None":
        """The feature, if a limit asks."""
        asking = [
            each.name for each in limiter.limits if each.enforce and each.exit_behavior == "ask"
        ]
        if not asking:
            return None
        if limiter.why_nobody_is_asked:
            raise ValueError(
                f"limit {asking[0]!r} has exit_behavior='ask', which {limiter.why_nobody_is_asked}"
            )
        client = limiter._store  # noqa: SLF001 - the kernel gives it
        store = None if client is None else client.store
        if store is not None and not isinstance(store, Granting):
            raise TypeError(
                "exit_behavior='ask' needs a store that can grant more, as MemoryStore and "
                f"RedisStore can, not {store!r}"
            )
        return cls(asking[0], store, limiter)

    def __init__(self, limit: str, store: Granting | None, limiter: Any) -> None:
        # The first limit that asks.
        self._limit = limit
        # `None` where the state counts alone.
        self._store = store
        self._limiter = limiter
        self._recorder: Recorder = limiter._recorder  # noqa: SLF001 - the same

    def begin(self, state: Any, own: Own) -> None:
        """Check that a run can wait for the answer of a person; it has no grants of its own yet."""
        context = call_context(running_runtime(), model_name=None)
        if not (context.remembers or context.invocation):
            raise RuntimeError(
                f"limit {self._limit!r} has exit_behavior='ask', and a run that waits for a person "
                "needs a checkpointer: create_agent(…, checkpointer=…)"
            )
        granted = _granted(state)
        if granted:
            of_thread = {name: n for name, n in granted.items() if name.endswith(f"/{THREAD}")}
            own[self.name] = {"granted": of_thread}

    def limits(self, state: Any, limits: ResolvedLimits) -> ResolvedLimits:
        """Raise limits by what people have granted in the thread's state."""
        return limits.raised(_granted(state))

    def unanswered(self, batch: Batch) -> None:
        """Fail a run that is resumed with an answer; it can be resumed again."""
        # Nothing is undone: a store that has received it answers the same when asked again.
        if batch.answer is not None or (batch.limits.asking and is_answered()):
            raise QuotaStoreError(KEPT)

    async def refused(
        self, form: Form, batch: Batch, result: AcquireResult
    ) -> tuple[Batch, AcquireResult]:
        """Ask a person about refused calls, if that helps; the newest batch, and its result."""
        question = question_of(batch, result)
        answer = self._answered(question) if question.exhausted else None
        batch.answer = answer
        if answer is not None and answer.type == "reject":
            return batch, result
        granted = question.granted(answer.granted if answer else {})
        try:
            for each in granted:
                if each.key is not None:
                    await ask(form, self._store, "grant", each.key, **question.grant(each))
        except QuotaStoreError as error:
            self._recorder.record_error("store", error)
            raise QuotaStoreError(KEPT) from error
        # A store that has charged the request once answers the same when the run is resumed again.
        more = {each.counter: each.amount for each in granted if each.key is None}
        again = batch.remake(batch.given.raised(more))
        assert again is not None  # noqa: S101 - for the type checker: the calls wait
        for checks in self._limiter._hooks["checks"]:  # noqa: SLF001 - the kernel's
            checks(again)
        again.answer = answer
        if more:
            known = _granted(batch.state)
            more = {name: known.get(name, 0) + amount for name, amount in more.items()}
            again.keep(self.name, {"granted": {**known, **more}})
        # Nobody is asked about what is refused now.
        asking = again.limits.asking
        again.stops = {name: n for name, n in again.stops.items() if name not in asking}
        return again, await self._limiter._acquire(form, again)  # noqa: SLF001 - the same

    def _answered(self, question: "Question") -> Answer:
        """What the person answers: LangGraph interrupts the run here, and resumes it with it."""
        context, name = question.request.context, question.request.question
        limits = sorted(question.offered)
        problem = ""
        while True:
            try:
                resumed = interrupt(question.payload(problem))
            except GraphInterrupt:
                self._recorder.record_question(context.agent, limits, problem, f"{name}/question")
                raise
            try:
                answer = read_answer(resumed, question.offered, question.units)
                break
            except ValueError as error:
                # LangGraph keeps an answer: only a new question can get another one.
                problem = f"The answer could not be used: {error}. "
        if self._recorder.record_answer(context.agent, limits, answer, f"{name}/answer"):
            granted = [
                (each.limit.name, each.scope, each.limit.unit, each.amount)
                for each in question.granted(answer.granted)
                if each.key is None
            ]
            self._recorder.record_granted(context.agent, granted)
        return answer


def _granted(state: Mapping[str, Any]) -> Mapping[str, int]:
    """What people have granted to the thread and to this run, if the state counts them."""
    return own_of(state, Questions.name).get("granted") or {}


class Exhausted(NamedTuple):
    """A threshold that an approval raises, and by how much."""

    limit: Limit
    scope: Scope
    counter: str
    # Where a store keeps the count; `None` if the thread's state does.
    key: str | None
    amount: int = 0


class Question:
    """The question to a person: may calls run that limits refuse?"""

    def __init__(self, request: Batch, result: AcquireResult, needs: _Needs) -> None:
        self.request = request
        self._result = result
        # The thresholds to raise so that the calls run; empty if that would not help.
        self.exhausted: list[Exhausted] = []
        # How much an approval grants, by the name of the limit.
        self.offered: dict[str, int] = {}
        in_state = _granted(request.state)
        for resolved in request.limits.limits if needs else ():
            limit = resolved.limit
            rows = [each for each in resolved.checks if (limit.name, each.scope) in needs]
            if not rows:
                continue
            grant = getattr(limit, "grant", None)
            # By default as much as the limit says without grants.
            own = min(
                (row.most or 0) - result.granted.get(row.counter, 0) - in_state.get(row.counter, 0)
                for row in rows
            )
            if grant is not None:
                own = whole_amount(limit.unit, "grant", grant)
            self.offered[limit.name] = max(own, *(needs[limit.name, row.scope] for row in rows))
            for row in rows:
                key = None if request.sent is None else request.sent.counters[row.counter].key
                self.exhausted.append(Exhausted(limit, row.scope, row.counter, key))

    @property
    def units(self) -> dict[str, Unit]:
        """What the limits count to which an approval grants more, by name."""
        return {each.limit.name: each.limit.unit for each in self.exhausted}

    def granted(self, given: Mapping[str, int]) -> Sequence[Exhausted]:
        """What is granted, once for each count: limits can share one, and the most is granted."""
        most: dict[str, Exhausted] = {}
        for each in self.exhausted:
            amount = given.get(each.limit.name, 0)
            if amount > (most[each.counter].amount if each.counter in most else 0):
                most[each.counter] = each._replace(amount=amount)
        return [*most.values()]

    def payload(self, problem: str) -> dict[str, Any]:
        """The question as a `HITLRequest`, after an answer with a problem, if there was one."""
        units = self.units
        args = {
            name: as_dollars(amount).replace("$", "").replace(",", "")
            if units[name] == "microdollars"
            else amount
            for name, amount in self.offered.items()
        }
        _, breaches = self.request.decided(self._result)
        asked = [each for each in breaches if each.limit.limit.name in self.offered]
        text = problem + messages.question(asked, self.offered, units)
        return {
            "action_requests": [{"name": ACTION, "args": args, "description": text}],
            "review_configs": [{"action_name": ACTION, "allowed_decisions": ["approve", "reject"]}],
        }

    def grant(self, granted: Exhausted) -> dict[str, Any]:
        """The arguments of `store.grant`, which are the same each time the run is resumed."""
        context, answer = self.request.context, self.request.answer
        assert answer is not None  # noqa: S101 - for the type checker: it is granted
        amount = granted.amount
        thread = "" if context.run_thread_id is None else str(context.run_thread_id)
        reason = answer.message or f"a person was asked in thread {thread!r}"
        return {
            "amount": Decimal(amount).scaleb(-6)
            if granted.limit.unit == "microdollars"
            else amount,
            "id": f"{self.request.question}/{granted.counter}"[:MAX_TEXT],
            "by": answer.by[:MAX_TEXT],
            "reason": reason[:MAX_TEXT],
        }


def question_of(request: Batch, result: AcquireResult) -> Question:
    """The question whose answer can let calls run; it has nothing `exhausted` if no answer can."""
    needs: _Needs = {}
    while True:
        question = Question(request, result, needs)
        found = _needed(request, result, question.granted(question.offered))
        if found is None:
            return Question(request, result, {})
        # A grant also raises limits that do not ask: then more calls run, and need more.
        more = {name: max(found.get(name, 0), needs.get(name, 0)) for name in {**needs, **found}}
        if more == needs:
            return question
        needs = more


def _needed(request: Batch, result: AcquireResult, granted: Sequence[Exhausted]) -> _Needs | None:
    """How much more the calls need that no other limit refuses; `None` if they never run."""
    asking = request.limits.asking
    # The answer if all that these calls need were granted.
    hits = [
        Hits(amounts, tuple(t for t in over if t.limit not in asking or t.scope == STORE))
        for amounts, over in request.hits
    ]
    stops = {name: after for name, after in request.stops.items() if name not in asking}
    free = admit(hits, result.used, stops, {each.counter: each.amount for each in granted})
    if free.stopped or (request.sent is not None and not request.answered):
        return None
    needs: dict[tuple[str, Scope], int] = {}
    added = free.charged(hits)
    for (_, thresholds), runs in zip(request.hits, free.admitted, strict=True):
        for each in thresholds if runs else ():
            lacking = result.used[each.counter] + added[each.counter] - each.most
            if each.limit in asking and lacking > 0:
                needs[each.limit, each.scope] = lacking
    return needs
