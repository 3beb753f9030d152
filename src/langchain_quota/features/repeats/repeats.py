"""Repeat limits: their counts depend on the call, and on the answers of earlier calls."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.decision import RUN, THREAD, Outcome
from langchain_quota.features.repeats.digests import answer_digest, key_digest, tool_digest
from langchain_quota.limits.repeats import MOST_KEPT, RepeatLimit
from langchain_quota.messages import NOT_RUN
from langchain_quota.middleware.calls import Batch, Conclusion
from langchain_quota.middleware.feature import Feature
from langchain_quota.rule import Asked, Check, ResolvedLimit, run_counter, thread_counter
from langchain_quota.state import Own, own_of

_NOT_RUN = (Outcome.BLOCKED, Outcome.SKIPPED)


class Record(TypedDict):
    """What a repeat limit remembers of a run; every value is plain JSON."""

    message: str
    """The id of the newest message whose calls it has judged."""
    step: int
    """How many messages that was, in this run."""
    made: list[list[Any]]
    """The calls of earlier messages, as in `Made`."""
    waiting: dict[str, list[str]]
    """The keys of the tool and of the call, for each call of that message, by id."""


_NOTHING: Record = {"message": "", "step": 0, "made": [], "waiting": {}}


class Repeats(Feature):
    """Refuses calls that repeat earlier ones."""

    name = "repeats"
    unused: ClassVar[Mapping[str, Any]] = {"repeats": {}}
    """The tool calls of this run, as each limit remembers them, by middleware and name."""

    @classmethod
    def of(cls, limiter: Any) -> "Repeats | None":
        """The feature, if a limit is one on repeats."""
        made = cls(limiter)
        return made if made._limits else None

    def __init__(self, limiter: Any) -> None:
        super().__init__(limiter)
        self._limits = [each for each in limiter.limits if isinstance(each, RepeatLimit)]

    def begin(self, state: Any, own: Own) -> None:
        """A new run may repeat what an earlier one did."""
        if _records(state):
            own[self.name] = {**self.unused}

    def counts(self, state: Any) -> dict[str, int]:
        """How often the most repeated call or failure has come, by the name of the counter."""
        records = _records(state).get(self._limiter.name, {})
        found: dict[str, int] = {}
        for limit in self._limits:
            made = _made(records.get(limit.name, _NOTHING), state.get("messages") or ())
            calls, failures = repeated(made)
            limited = [each for each in made if each.is_limited]
            counts = [max(calls[each.key], failures.get(each.tool, 0)) for each in limited]
            most = max(counts, default=0)
            found |= {thread_counter(limit): most, run_counter(limit): most}
        return found

    def checks(self, batch: Batch) -> None:
        """Ask of each call how often it, or its failure, came before."""
        if batch.pending is None or not batch.calls:
            return
        records = _records(batch.state).get(batch.middleware, {})
        known = {
            each.name: _Judged(each, records.get(each.name, _NOTHING), batch)
            for each in self._limits
        }
        batch.own[self.name] = known
        batch.ask(
            Asked.of(_asked(asked, known, index, batch.used))
            for index, asked in enumerate(batch.asked)
        )

    def concluded(self, batch: Batch, conclusion: Conclusion) -> Conclusion:
        """Remember the calls."""
        known: Mapping[str, _Judged] | None = batch.own.get(self.name)
        if known is not None and conclusion.error is None:
            runs = [each.outcome not in _NOT_RUN for each in conclusion.decisions]
            own = {name: each.noted(runs) for name, each in known.items()}
            records = {**_records(batch.state), batch.middleware: own}
            batch.keep(self.name, {"repeats": records})
        return conclusion


def _records(state: Mapping[str, Any]) -> Mapping[str, dict[str, Record]]:
    """What the limits of all middlewares remember."""
    return own_of(state, Repeats.name).get("repeats") or {}


def _asked(
    asked: Asked, known: Mapping[str, "_Judged"], index: int, used: dict[str, int]
) -> Iterator[ResolvedLimit]:
    """The limits on a call, with what repeat limits count of it."""
    for each in asked.limits:
        check = None
        if each.limit.name in known:
            check = known[each.limit.name].check(index, used)
            if check is None:
                continue
        # A thread has no count of its own.
        yield (
            each
            if check is None
            else each._replace(checks=(check._replace(scope=THREAD, most=None), check))
        )


class _Judged:
    """The calls of a message, as one limit judges them."""

    def __init__(self, limit: RepeatLimit, record: Record, batch: Batch) -> None:
        pending, messages = batch.pending, batch.state.get("messages") or ()
        assert pending is not None  # noqa: S101 - for the type checker
        self._limit = limit
        self._message = pending.message.id or ""
        self._ids = [str(call["id"]) for call in pending.calls]
        self._step, self._others = record["step"] + 1, dict[str, list[str]]()
        if record["step"] and record["message"] == self._message:
            # These calls are judged again.
            waiting = record["waiting"]
            self._others = {key: waiting[key] for key in waiting if key not in self._ids}
            self._step, record = record["step"], {**record, "waiting": {}}
        self._made = _made(record, messages)
        self._calls, self._failures = repeated(self._made)
        # The digests of the tool and of the call; `None` for a call that is ignored.
        self._digests: list[tuple[str, str] | None] = []
        for call, judged in zip(pending.calls, batch.calls, strict=True):
            matches = limit.matches(judged)
            key, tool = key_digest(limit, call, matches=matches), call["name"]
            found = None if key is None else (tool_digest(tool, matches=matches), key)
            self._digests.append(found)

    def check(self, index: int, used: dict[str, int]) -> Check | None:
        """What the limit counts of a call, whose count is added; `None` if it ignores the call."""
        digests, limit = self._digests[index], self._limit
        if digests is None:
            return None
        tool, key = digests
        made, failed = self._calls.get(key, 0), self._failures.get(tool, 0)
        if failed >= limit.most_failures and made < limit.run_limit:
            counter, most = f"{limit.counter}/{tool}", limit.most_failures
            used[counter] = failed
            return Check(RUN, counter, most, mirrored=True, reason="failing")
        counter = f"{limit.counter}/{key}"
        used[counter] = made
        return Check(RUN, counter, limit.run_limit, mirrored=True)

    def noted(self, let_through: Sequence[bool]) -> Record:
        """What is remembered when these calls are judged."""
        waiting = {
            call_id: [*digests]
            for call_id, digests, runs in zip(self._ids, self._digests, let_through, strict=True)
            if runs and digests is not None
        }
        made = self._made
        if self._limit.run_limit == 1:
            # No call may come twice, even after many calls of other tools.
            newest = sorted(made, key=lambda each: each.is_limited)[-MOST_KEPT:]
            made = sorted(newest, key=lambda each: each.step)
        return Record(
            message=self._message,
            step=self._step,
            made=[list(each) for each in made[-MOST_KEPT:]],
            waiting=dict([*{**self._others, **waiting}.items()][-MOST_KEPT:]),
        )


class Made(NamedTuple):
    """A tool call that was let through."""

    # The number of the model's answer that made it.
    step: int
    # A digest of the tool; begins with `-` if the limit never refuses its calls.
    tool: str
    # A digest of the call: the same for calls that count as equal.
    key: str
    # A digest of its answer; empty if it is not known. An error begins with `!`.
    gave: str

    @property
    def is_limited(self) -> bool:
        """Whether the limit may refuse such a call."""
        return not self.tool.startswith("-")

    @property
    def failed(self) -> bool:
        """Whether the answer was an error."""
        return self.gave.startswith("!")

    @property
    def learnt(self) -> tuple[str, str]:
        """What the run learned. An error of a tool is the same thing with all arguments."""
        return (self.tool if self.failed else self.key, self.gave)


def _made(record: Record, messages: Sequence[AnyMessage]) -> list[Made]:
    """The calls that a record knows, with the answers that they have now."""
    made, waiting = [Made(*each) for each in record["made"]], record["waiting"]
    answers: dict[str, ToolMessage] = {}
    args: dict[str | None, object] = {}
    for message in reversed(messages if waiting else ()):
        if isinstance(message, AIMessage) and message.id == record["message"]:
            args = {call["id"]: call["args"] for call in message.tool_calls}
            break
        if isinstance(message, AIMessage):
            # Calls of a later message can have the same ids.
            answers.clear()
        if isinstance(message, ToolMessage):
            answers.setdefault(message.tool_call_id, message)
    for call_id, (tool, key) in waiting.items():
        answer, gave = answers.get(call_id), ""
        if answer is not None:
            # It was let through here and then did not run.
            if NOT_RUN in answer.response_metadata:
                continue
            failed = answer.status == "error"
            gave = answer_digest(answer.content, call_id, args.get(call_id), failed=failed)
        made.append(Made(record["step"], tool, key, gave))
    return made


def repeated(made: Iterable[Made]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """How often equal calls were made, by key, and tools have failed, since something new came.

    Of the ways in which a tool failed the most frequent one counts, once in an answer of the model.
    """
    # How often each came again: its count is one more.
    calls: Counter[str] = Counter()
    failures: Counter[tuple[str, str]] = Counter()
    known: set[str] = set()
    learnt: set[tuple[str, str]] = set()
    for _, step in groupby(made, key=lambda each: each.step):
        together = list(step)
        own = Counter(each.key for each in together)
        # A call without an answer is new only if it was not made before.
        new = {
            (each.key, each.gave)
            for each in together
            if each.learnt not in learnt and (each.gave or each.key not in known)
        }
        if new:
            calls, failures = Counter(), Counter()
            for key, answers in Counter(key for key, _ in new).items():
                calls[key] = own[key] - answers
        else:
            calls.update(own)
            calls.subtract(own.keys() - known)
            # Failures in one message count once: the model has not read of the first one.
            failures.update({each.learnt for each in together if each.failed})
        known |= own.keys()
        learnt.update(each.learnt for each in together)
    by_tool: dict[str, int] = {}
    for what in learnt:
        tool, gave = what
        if gave.startswith("!"):
            by_tool[tool] = max(failures[what] + 1, by_tool.get(tool, 0))
    return {key: calls[key] + 1 for key in known}, by_tool
