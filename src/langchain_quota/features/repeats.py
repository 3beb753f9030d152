"""Repeat limits: their counts depend on the call, and on the answers of earlier calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AnyMessage

from langchain_quota.admission import Hits, Threshold
from langchain_quota.decision import RUN, THREAD, Call, Reason
from langchain_quota.middleware._history import PendingCalls
from langchain_quota.repeat_records import NOTHING, Record, calls_made
from langchain_quota.repeats import (
    MOST_KEPT,
    Made,
    Repeated,
    RepeatLimit,
    key_digest,
    newest,
    repeated,
    tool_digest,
)
from langchain_quota.resolved import Asked, Check, ResolvedLimit
from langchain_quota.state import ledger


@dataclass(frozen=True, slots=True)
class _Known:
    """What one limit knows before it judges the calls of a message."""

    limit: RepeatLimit
    step: int
    made: Sequence[Made]
    others: Mapping[str, list[str]]
    repeated: Repeated
    asked: Sequence[tuple[str, str] | None]


class Repeats:
    """What the repeat limits of a middleware know of the calls of one message."""

    def __init__(
        self,
        limits: Sequence[RepeatLimit],
        state: Mapping[str, Any],
        pending: PendingCalls,
        calls: Sequence[Call],
        *,
        middleware: str,
    ) -> None:
        self._middleware = middleware
        self._message = pending.message.id or ""
        self._calls = pending.calls
        self._records = ledger(state).get("repeats") or {}
        messages: Sequence[AnyMessage] = state.get("messages") or ()
        own = self._records.get(middleware, {})
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
        amounts, thresholds = dict(asked.hits.amounts), list(asked.hits.thresholds)
        for each in asked.limits:
            limit = each.limit
            if not isinstance(limit, RepeatLimit):
                limits.append(each)
                continue
            for check in each.checks:
                amounts.pop(check.counter, None)
            own = self._check(limit, index)
            if own is None:
                continue
            # A thread has no count of its own.
            limits.append(each._replace(checks=(own._replace(scope=THREAD, most=None), own)))
            amounts[own.counter] = 1
            assert own.most is not None  # noqa: S101 - for the type checker
            thresholds.append(Threshold(limit.name, RUN, own.counter, own.most, limit.enforce))
        return Asked(tuple(limits), Hits(amounts, tuple(thresholds)), asked.shared)

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
