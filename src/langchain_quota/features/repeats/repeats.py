"""Repeat limits: their counts depend on the call, and on the answers of earlier calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_core.messages import AnyMessage

from langchain_quota.decision import RUN, THREAD, Call, Outcome, Reason
from langchain_quota.features.repeats.digests import key_digest, tool_digest
from langchain_quota.features.repeats.records import (
    NOTHING,
    Made,
    Record,
    Repeated,
    calls_made,
    most_repeated,
    newest,
    repeated,
)
from langchain_quota.limits.repeats import MOST_KEPT, RepeatLimit
from langchain_quota.middleware.calls import Batch, Conclusion
from langchain_quota.middleware.feature import Feature
from langchain_quota.rule import Asked, Check, ResolvedLimit, run_counter, thread_counter
from langchain_quota.state import Own, own_of

_NOT_RUN = (Outcome.BLOCKED, Outcome.SKIPPED)


@dataclass(frozen=True, slots=True)
class _Known:
    """What one limit knows before it judges the calls of a message."""

    limit: RepeatLimit
    step: int
    made: Sequence[Made]
    others: Mapping[str, list[str]]
    repeated: Repeated
    asked: Sequence[tuple[str, str] | None]


class Repeats(Feature):
    """Refuses calls that repeat earlier ones."""

    name = "repeats"
    unused: ClassVar[Mapping[str, Any]] = {"repeats": {}}
    """The tool calls of this run, as each limit remembers them, by middleware and name."""

    @classmethod
    def of(cls, limiter: Any) -> "Repeats | None":
        """The feature, if a limit is one on repeats."""
        limits = [each for each in limiter.limits if isinstance(each, RepeatLimit)]
        return cls(limiter, limits) if limits else None

    def __init__(self, limiter: Any, limits: Sequence[RepeatLimit]) -> None:
        self._limiter = limiter
        self._limits = limits

    def begin(self, state: Any, own: Own) -> None:
        """A new run may repeat what an earlier one did."""
        if _records(state):
            own[self.name] = {**self.unused}

    def counts(self, state: Any) -> dict[str, int]:
        """How often the most repeated call or failure has come, by the name of the counter."""
        records = _records(state).get(self._limiter.name, {})
        found: dict[str, int] = {}
        for limit in self._limits:
            most = most_repeated(records.get(limit.name, NOTHING), state.get("messages") or ())
            found |= {thread_counter(limit): most, run_counter(limit): most}
        return found

    def checks(self, batch: Batch) -> None:
        """Ask of each call how often it, or its failure, came before."""
        if batch.pending is None or not batch.calls:
            return
        known = _Message(self._limits, batch)
        batch.ask(known.ask(batch.asked))
        batch.used |= known.used
        batch.own[self.name] = known

    def concluded(self, batch: Batch, conclusion: Conclusion) -> Conclusion:
        """Remember the calls."""
        known: _Message | None = batch.own.get(self.name)
        if known is not None and conclusion.error is None:
            runs = [each.outcome not in _NOT_RUN for each in conclusion.decisions]
            batch.keep(self.name, {"repeats": known.noted(runs)})
        return conclusion


def _records(state: Mapping[str, Any]) -> Mapping[str, dict[str, Record]]:
    """What the limits of all middlewares remember."""
    return own_of(state, Repeats.name).get("repeats") or {}


class _Message:
    """What the repeat limits of a middleware know of the calls of one message."""

    def __init__(self, limits: Sequence[RepeatLimit], batch: Batch) -> None:
        state, pending, calls = batch.state, batch.pending, batch.calls
        assert pending is not None  # noqa: S101 - for the type checker
        self._middleware = batch.middleware
        self._message = pending.message.id or ""
        self._calls = pending.calls
        self._records = _records(state)
        messages: Sequence[AnyMessage] = state.get("messages") or ()
        own = self._records.get(batch.middleware, {})
        self._known = {
            limit.name: self._know(limit, own.get(limit.name, NOTHING), messages, calls)
            for limit in limits
        }
        self.used: dict[str, int] = {}
        """The counts that the calls ask for, by name."""

    def _know(
        self,
        limit: RepeatLimit,
        record: Record,
        messages: Sequence[AnyMessage],
        calls: Sequence[Call],
    ) -> _Known:
        step, others = record["step"] + 1, dict[str, list[str]]()
        if record["step"] and record["message"] == self._message:
            # These calls are judged again.
            again = {str(call["id"]) for call in self._calls}
            others = {key: each for key, each in record["waiting"].items() if key not in again}
            step, record = record["step"], {**record, "waiting": {}}
        made = calls_made(record, messages)
        asked: list[tuple[str, str] | None] = []
        for call, judged in zip(self._calls, calls, strict=True):
            matches = limit.matches(judged)
            key = key_digest(limit, call, matches=matches)
            tool = tool_digest(call["name"], matches=matches)
            asked.append(None if key is None else (tool, key))
        return _Known(limit, step, made, others, repeated(made), asked)

    def ask(self, asked: Sequence[Asked]) -> list[Asked]:
        """What the calls ask of all limits, these included."""
        return [self._ask(index, each) for index, each in enumerate(asked)]

    def _ask(self, index: int, asked: Asked) -> Asked:
        limits: list[ResolvedLimit] = []
        for each in asked.limits:
            limit = each.limit
            if not isinstance(limit, RepeatLimit):
                limits.append(each)
                continue
            own = self._check(limit, index)
            if own is not None:
                # A thread has no count of its own.
                limits.append(each._replace(checks=(own._replace(scope=THREAD, most=None), own)))
        return Asked.of(limits)

    def _check(self, limit: RepeatLimit, index: int) -> Check | None:
        """What a limit counts of a call; `None` if it does not count the call."""
        known = self._known[limit.name]
        asked = known.asked[index]
        if asked is None:
            return None
        tool, key = asked
        reason: Reason = "exhausted"
        made, failed = known.repeated.calls.get(key, 0), known.repeated.failures.get(tool, 0)
        if failed >= limit.most_failures and made < limit.run_limit:
            counter, most, reason = f"{limit.counter}/{tool}", limit.most_failures, "failing"
            self.used[counter] = failed
        else:
            counter, most = f"{limit.counter}/{key}", limit.run_limit
            self.used[counter] = made
        return Check(RUN, counter, most, mirrored=True, reason=reason)

    def noted(self, let_through: Sequence[bool]) -> dict[str, dict[str, Record]]:
        """What is remembered when these calls are judged."""
        own: dict[str, Record] = {}
        for name, known in self._known.items():
            waiting = {
                str(call["id"]): [*asked]
                for call, asked, runs in zip(self._calls, known.asked, let_through, strict=True)
                if runs and asked is not None
            }
            judged = list({**known.others, **waiting}.items())[-MOST_KEPT:]
            own[name] = Record(
                message=self._message,
                step=known.step,
                made=[list(each) for each in newest(known.limit, known.made)],
                waiting=dict(judged),
            )
        return {**self._records, self._middleware: own}
