"""A question at a limit: a person says whether the run may go on.

The run is interrupted with the payload of LangChain's `HumanInTheLoopMiddleware`, which existing
interfaces show: one action, whose arguments say how much more each limit would grant.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt

from langchain_quota import messages
from langchain_quota.admission import AcquireResult, Hits, admit
from langchain_quota.decide import Breach
from langchain_quota.decision import STORE, Answer, Scope, Unit
from langchain_quota.limit_options import whole_amount
from langchain_quota.limits import Limit
from langchain_quota.middleware._answers import ACTION, read_answer
from langchain_quota.middleware._calls import Request
from langchain_quota.money import as_dollars
from langchain_quota.raised import raised
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.state import ledger
from langchain_quota.stores.grants import MAX_TEXT
from langchain_quota.telemetry.recorder import Recorder


class Exhausted(NamedTuple):
    """A threshold that an approval raises.

    Attributes:
        limit: The limit.
        scope: Its scope.
        counter: The name of its count.
        key: Where a store keeps the count; `None` if the thread's state does.
    """

    limit: Limit
    scope: Scope
    counter: str
    key: str | None


RequestT = TypeVar("RequestT", bound=Request)
Ask = Callable[[ResolvedLimits], RequestT | None]
"""Makes the request of calls to limits; `None` if no call waits."""


@dataclass(slots=True)
class Question:
    """The question to a person: may calls run that limits refuse?

    Attributes:
        request: The calls.
        breaches: The limits whose refusals hold.
        exhausted: The thresholds to raise so that the calls run; empty if that would not help.
        offered: How much an approval grants, by the name of the limit.
        answer: The person's answer; `None` before it.
    """

    request: Request
    breaches: Sequence[Breach]
    exhausted: Sequence[Exhausted]
    offered: Mapping[str, int]
    answer: Answer | None = field(default=None, init=False)

    @property
    def _units(self) -> dict[str, Unit]:
        """What the limits count to which an approval grants more, by name."""
        return {each.limit.name: each.limit.unit for each in self.exhausted}

    @property
    def is_rejected(self) -> bool:
        """Whether the run is to end."""
        return self.answer is not None and self.answer.type == "reject"

    def put(self, recorder: Recorder) -> None:
        """Ask the person. LangGraph interrupts the run here, and resumes it with the answer.

        Raises:
            GraphInterrupt: Nobody has answered yet, or the answer could not be used.
        """
        if not self.exhausted:
            return
        context, limits = self.request.context, sorted(self.offered)
        question_id = context.task(f"{self.request.task}/question")
        answer, problem = None, ""
        while answer is None:
            try:
                resumed = interrupt(self.payload(problem))
            except GraphInterrupt:
                recorder.record_question(context.agent, limits, problem, question_id)
                raise
            try:
                answer = read_answer(resumed, self.offered, self._units)
            except ValueError as error:
                # LangGraph keeps an answer: only a new question can get another one.
                problem = f"The answer could not be used: {error}. "
        self.answer = self.request.answer = answer
        answer_id = context.task(f"{self.request.task}/answer")
        if recorder.record_answer(context.agent, limits, answer, answer_id):
            granted = [
                (each.limit.name, each.scope, each.limit.unit, amount)
                for amount, each in self._granted
                if each.key is None
            ]
            recorder.record_granted(context.agent, granted)

    def payload(self, problem: str) -> dict[str, Any]:
        """The question as a `HITLRequest`.

        Args:
            problem: Why the previous answer could not be used; empty for the first question.
        """
        units = self._units
        args = {
            name: as_dollars(amount).replace("$", "").replace(",", "")
            if units[name] == "microdollars"
            else amount
            for name, amount in self.offered.items()
        }
        text = problem + messages.question(self.breaches, self.offered, units)
        return {
            "action_requests": [{"name": ACTION, "args": args, "description": text}],
            "review_configs": [{"action_name": ACTION, "allowed_decisions": ["approve", "reject"]}],
        }

    def of_store(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What a store is to grant: keys, with the arguments of `store.grant`."""
        context, answer = self.request.context, self.answer
        for granted, each in self._granted:
            if each.key is None or answer is None:
                continue
            amount: object = granted
            if each.limit.unit == "microdollars":
                amount = Decimal(granted).scaleb(-6)
            # The same each time the run is resumed.
            name = f"{context.step(self.request.task)}/{each.counter}"
            thread = "" if context.run_thread_id is None else str(context.run_thread_id)
            reason = answer.message or f"a person was asked in thread {thread!r}"
            yield (
                each.key,
                {
                    "amount": amount,
                    "id": name[:MAX_TEXT],
                    "by": answer.by[:MAX_TEXT],
                    "reason": reason[:MAX_TEXT],
                },
            )

    def again(self, limits: ResolvedLimits, ask: Ask[RequestT]) -> RequestT:
        """The same request, made again after the answer. Nobody is asked about what is refused now.

        A store that has charged it once answers the same when the run is resumed once more.

        Args:
            limits: The limits for which the first request was made.
            ask: Makes the request.
        """
        more = {each.counter: amount for amount, each in self._granted if each.key is None}
        found = ask(raised(limits, more))
        assert found is not None  # noqa: S101 - for the type checker: the calls wait
        found.answer = self.answer
        if more:
            known = ledger(self.request.state).get("granted") or {}
            found.granted = {**known, **{name: known.get(name, 0) + more[name] for name in more}}
        asking = found.limits.asking
        found.stops = {name: n for name, n in found.stops.items() if name not in asking}
        return found

    @property
    def raises(self) -> dict[str, int]:
        """How much an approval grants, by counter."""
        return {each.counter: amount for amount, each in self._most(self.offered)}

    @property
    def _granted(self) -> Collection[tuple[int, Exhausted]]:
        """What the answer grants."""
        return self._most({} if self.answer is None else self.answer.granted)

    def _most(self, given: Mapping[str, int]) -> Collection[tuple[int, Exhausted]]:
        """What is granted, once for each count: limits can share one, and the most is granted."""
        most: dict[str, tuple[int, Exhausted]] = {}
        for each in self.exhausted:
            amount = given.get(each.limit.name, 0)
            if amount > most.get(each.counter, (0, each))[0]:
                most[each.counter] = amount, each
        return most.values()


def question_of(request: RequestT, result: AcquireResult) -> Question:
    """The question to a person whose answer can let calls run.

    Its `exhausted` is empty if no answer can: another limit refuses these calls or ends the run, or
    the store could not be asked.

    Args:
        request: The calls.
        result: The answer to their request.
    """
    question = Question(request, (), (), {})
    needs: dict[tuple[str, Scope], int] = {}
    while True:
        found = _needed(request, result, question.raises)
        if found is None:
            return Question(request, (), (), {})
        # A grant also raises limits that do not ask: then more calls run, and need more.
        more = {name: max(found.get(name, 0), needs.get(name, 0)) for name in {**needs, **found}}
        if more == needs:
            return question
        needs = more
        question = _question(request, result, needs)


def _needed(
    request: Request, result: AcquireResult, granted: Mapping[str, int]
) -> dict[tuple[str, Scope], int] | None:
    """How much more the calls need that no other limit refuses, by limit and scope.

    `None` if they do not run whatever is granted.

    Args:
        request: The calls.
        result: The answer to their request.
        granted: How much an approval grants, by counter.
    """
    asking = request.limits.asking
    # The answer if all that these calls need were granted.
    hits = [
        Hits(amounts, tuple(t for t in over if t.limit not in asking or t.scope == STORE))
        for amounts, over in request.hits
    ]
    stops = {name: after for name, after in request.stops.items() if name not in asking}
    free = admit(hits, result.used, stops, granted)
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


def _question(
    request: Request, result: AcquireResult, needs: Mapping[tuple[str, Scope], int]
) -> Question:
    """The question that offers what calls need, by limit and scope."""
    exhausted: list[Exhausted] = []
    offered: dict[str, int] = {}
    for resolved in request.limits.limits:
        limit = resolved.limit
        rows = [each for each in request.limits.rows(resolved) if (limit.name, each.scope) in needs]
        if not rows:
            continue
        own = _own_grant(limit) or min(
            (row.most or 0) - _granted_before(request, result, row.counter) for row in rows
        )
        offered[limit.name] = max(own, *(needs[limit.name, row.scope] for row in rows))
        exhausted += [
            Exhausted(limit, row.scope, row.counter, _key(request, row.counter)) for row in rows
        ]
    _, breaches = request.decided(result)
    asked = [each for each in breaches if each.limit.limit.name in offered]
    return Question(request, asked, exhausted, offered)


def _own_grant(limit: Limit) -> int | None:
    """How much the limit says that an approval grants."""
    grant = getattr(limit, "grant", None)
    return None if grant is None else whole_amount(limit.unit, "grant", grant)


def _key(request: Request, counter: str) -> str | None:
    """Where a store keeps a count."""
    return None if request.sent is None else request.sent.counters[counter].key


def _granted_before(request: Request, result: AcquireResult, counter: str) -> int:
    """How much is granted already for a count."""
    in_state = ledger(request.state).get("granted") or {}
    return result.granted.get(counter, 0) + in_state.get(counter, 0)
