"""Check repeat limits, which count a call by the answers to earlier calls that equal it."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from hashlib import blake2b
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from langchain_core.messages import AIMessage, AnyMessage, ToolCall, ToolMessage

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.core.checks import (
    CallChecks,
    Check,
    ResolvedLimit,
    run_counter,
    thread_counter,
)
from langchain_quota.core.decision import Outcome
from langchain_quota.core.messages import NOT_RUN
from langchain_quota.limits.call import RUN, THREAD
from langchain_quota.limits.calls import MOST_KEPT, RepeatLimit
from langchain_quota.middleware.calls import Batch, HookResult
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import FeatureData, State, feature_ledger

_NOT_RUN = (Outcome.BLOCKED, Outcome.SKIPPED)

_VOLATILE = re.compile(
    r"""
    \b(?=[0-9a-f])(?:
        \d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?  # a moment
        | \d{1,2}:\d\d:\d\d(?:[.,]\d+)?                    # a time of day
        | \d+(?:\.\d+)?[ ]?(?:ms|µs)\b                      # a duration
        | \d+\.\d+[ ]?s(?:ec(?:onds)?)?\b
        | [0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b      # a UUID
        | 0x[0-9a-f]+\b                                     # an address
        | \d{10,}(?:\.\d+)?\b                              # a moment in seconds, an id
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""The parts of an answer that may change though the answer says nothing new."""

MOST_COMPARED = 20_000
"""How many characters of an answer are compared."""

_LEAST_ID = 6
"""A shorter id of a call, such as `"1"`, is part of many texts that do not name it."""


class Record(TypedDict):
    """What a repeat limit remembers of a run; every value is plain JSON."""

    message: str
    """The id of the newest message whose calls it has checked."""
    step: int
    """How many messages that was, in this run."""
    past_calls: list[list[Any]]
    """The calls of earlier messages: the fields of `PastCall`."""
    waiting: dict[str, list[str]]
    """The digests of the tool and of the call, for each call of that message, by id."""


_EMPTY: Record = {"message": "", "step": 0, "past_calls": [], "waiting": {}}


class Repeats(Feature):
    """Refuses calls that repeat earlier ones."""

    name = "repeats"
    unused: ClassVar[Mapping[str, object]] = {"repeats": {}}
    """The records of this run, by middleware and limit."""

    @classmethod
    def create(cls, kernel: Kernel) -> "Repeats | None":
        """Return the feature if a limit is a `RepeatLimit`."""
        feature = cls(kernel)
        return feature if feature._limits else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._limits = [limit for limit in kernel.limits if isinstance(limit, RepeatLimit)]

    def begin_run(self, state: State, feature_data: FeatureData) -> None:
        """Forget the calls of the last run, because a new run may repeat them."""
        if _records(state):
            feature_data[self.name] = {**self.unused}

    def state_counts(self, state: State) -> dict[str, int]:
        """Return how often the most repeated call or failure occurred, by the counter's name."""
        records = _records(state).get(self._kernel.name, {})
        counters: dict[str, int] = {}
        for limit in self._limits:
            past_calls = _past_calls(records.get(limit.name, _EMPTY), state.get("messages") or ())
            calls, failures = count_repeats(past_calls)
            counts = (
                max(calls[past_call.key], failures.get(past_call.tool, 0))
                for past_call in past_calls
                if past_call.is_limited
            )
            counters[thread_counter(limit)] = counters[run_counter(limit)] = max(counts, default=0)
        return counters

    def adjust_checks(self, batch: Batch) -> None:
        """Check each call by how often it, or its failure, occurred before."""
        if batch.pending is None or not batch.calls:
            return
        records = _records(batch.state).get(batch.middleware, {})
        repeat_checks = {
            limit.name: _RepeatCheck(limit, records.get(limit.name, _EMPTY), batch)
            for limit in self._limits
        }
        batch.feature_data[self.name] = repeat_checks
        batch.set_checks(
            CallChecks.of(_limits_of_call(checks, repeat_checks, index, batch.used))
            for index, checks in enumerate(batch.call_checks)
        )

    def on_hook_result(self, batch: Batch, conclusion: HookResult) -> HookResult:
        """Remember the calls."""
        repeat_checks: Mapping[str, _RepeatCheck] | None = batch.feature_data.get(self.name)
        if repeat_checks is not None and conclusion.error is None:
            runs = [decision.outcome not in _NOT_RUN for decision in conclusion.decisions]
            new_records = {name: check.record(runs) for name, check in repeat_checks.items()}
            records = {**_records(batch.state), batch.middleware: new_records}
            batch.save(self.name, {"repeats": records})
        return conclusion


def _records(state: State) -> Mapping[str, dict[str, Record]]:
    """Return what the limits of all middlewares remember."""
    return feature_ledger(state, Repeats.name).get("repeats") or {}


def _limits_of_call(
    checks: CallChecks,
    repeat_checks: Mapping[str, "_RepeatCheck"],
    index: int,
    used: dict[str, int],
) -> Iterator[ResolvedLimit]:
    """Yield the limits on a call, with the counts of repeat limits."""
    for limit in checks.limits:
        repeat_check = repeat_checks.get(limit.limit.name)
        if repeat_check is None:
            yield limit
        elif (check := repeat_check.check(index, used)) is not None:
            # A thread has no count of its own.
            yield limit._replace(checks=(check._replace(scope=THREAD, maximum=None), check))


class _RepeatCheck:
    """The calls of a message, as one limit checks them."""

    def __init__(self, limit: RepeatLimit, record: Record, batch: Batch) -> None:
        pending, messages = batch.pending_calls, batch.state.get("messages") or ()
        self._limit = limit
        self._message = pending.message.id or ""
        self._ids = [str(call["id"]) for call in pending.calls]
        # The calls of this message that were allowed before, and that are not checked again.
        self._allowed_before: dict[str, list[str]] = {}
        self._step = record["step"] + 1
        if record["step"] and record["message"] == self._message:
            # The message is checked again.
            waiting = record["waiting"]
            self._allowed_before = {key: waiting[key] for key in waiting if key not in self._ids}
            self._step, record = record["step"], {**record, "waiting": {}}
        self._past_calls = _past_calls(record, messages)
        self._calls, self._failures = count_repeats(self._past_calls)
        # The digests of the tool and of the call; `None` for a call that is ignored.
        self._digests: list[tuple[str, str] | None] = []
        for tool_call, call in zip(pending.calls, batch.calls, strict=True):
            matches = limit.matches(call)
            key = _key_digest(limit, tool_call, matches=matches)
            # The mark says that the limit never refuses calls of the tool.
            tool = ("" if matches else "-") + _digest(tool_call["name"], size=4)
            self._digests.append(None if key is None else (tool, key))

    def check(self, index: int, used: dict[str, int]) -> Check | None:
        """Return the check of a call, and add its count to `used`; `None` for an ignored call."""
        digests, limit = self._digests[index], self._limit
        if digests is None:
            return None
        tool, key = digests
        earlier, failed = self._calls.get(key, 0), self._failures.get(tool, 0)
        if failed >= limit.most_failures and earlier < limit.run_limit:
            counter, maximum = f"{limit.counter}/{tool}", limit.most_failures
            used[counter] = failed
            return Check(RUN, counter, maximum, mirrored=True, reason="failing")
        counter = f"{limit.counter}/{key}"
        used[counter] = earlier
        return Check(RUN, counter, limit.run_limit, mirrored=True)

    def record(self, allowed: Sequence[bool]) -> Record:
        """Return the record after these calls are checked, and some of them allowed."""
        waiting = {
            call_id: [*digests]
            for call_id, digests, runs in zip(self._ids, self._digests, allowed, strict=True)
            if runs and digests is not None
        }
        past_calls = self._past_calls
        if self._limit.run_limit == 1:
            # No call may occur twice, even after many calls of other tools.
            newest = sorted(past_calls, key=lambda past_call: past_call.is_limited)[-MOST_KEPT:]
            past_calls = sorted(newest, key=lambda past_call: past_call.step)
        return Record(
            message=self._message,
            step=self._step,
            past_calls=[[*past_call] for past_call in past_calls[-MOST_KEPT:]],
            waiting=dict([*{**self._allowed_before, **waiting}.items()][-MOST_KEPT:]),
        )


class PastCall(NamedTuple):
    """A tool call that was allowed."""

    # The number of the model's message that asked for it.
    step: int
    # A digest of the tool; begins with `-` if the limit never refuses its calls.
    tool: str
    # A digest of the call: the same for calls that count as equal.
    key: str
    # A digest of the answer; empty if there is none. That of an error begins with `!`.
    answer: str

    @property
    def is_limited(self) -> bool:
        """Whether the limit may refuse such a call."""
        return not self.tool.startswith("-")

    @property
    def failed(self) -> bool:
        """Whether the answer was an error."""
        return self.answer.startswith("!")

    @property
    def result(self) -> tuple[str, str]:
        """What the call returned. An error of a tool is the same one for all arguments."""
        return (self.tool if self.failed else self.key, self.answer)


def _past_calls(record: Record, messages: Sequence[AnyMessage]) -> list[PastCall]:
    """Return the calls in a record, with the answers that they have now."""
    past_calls, waiting = [PastCall(*row) for row in record["past_calls"]], record["waiting"]
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
        answer, digest = answers.get(call_id), ""
        if answer is not None:
            # The call was allowed here, and then did not run.
            if NOT_RUN in answer.response_metadata:
                continue
            failed = answer.status == "error"
            digest = _answer_digest(answer.content, call_id, args.get(call_id), failed=failed)
        past_calls.append(PastCall(record["step"], tool, key, digest))
    return past_calls


def count_repeats(past_calls: Iterable[PastCall]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return how often calls came and tools failed since something new came, by key and tool.

    A tool's most frequent failure counts, and failures of one message count once.
    """
    # How often each call was repeated: it was made once more than that.
    repeats: Counter[str] = Counter()
    failures: Counter[tuple[str, str]] = Counter()
    keys: set[str] = set()
    results: set[tuple[str, str]] = set()
    for _, step in groupby(past_calls, key=lambda past_call: past_call.step):
        together = list(step)
        counts = Counter(past_call.key for past_call in together)
        # A call without an answer is new only if it was not made before.
        new = {
            (past_call.key, past_call.answer)
            for past_call in together
            if past_call.result not in results and (past_call.answer or past_call.key not in keys)
        }
        if new:
            repeats, failures = Counter(), Counter()
            for key, answers in Counter(key for key, _ in new).items():
                repeats[key] = counts[key] - answers
        else:
            repeats.update(counts)
            repeats.subtract(counts.keys() - keys)
            # Failures in one message count once: the model had not read of the first one.
            failures.update({past_call.result for past_call in together if past_call.failed})
        keys |= counts.keys()
        results.update(past_call.result for past_call in together)
    by_tool: dict[str, int] = {}
    for result in results:
        tool, answer = result
        if answer.startswith("!"):
            by_tool[tool] = max(failures[result] + 1, by_tool.get(tool, 0))
    return {key: repeats[key] + 1 for key in keys}, by_tool


# How calls and answers are compared: equal ones have equal digests.


def _key_digest(limit: RepeatLimit, call: ToolCall, *, matches: bool) -> str | None:
    """Return a digest that equal calls share; `None` for a call that is ignored."""
    if not matches and not limit.tools:
        return None
    # The user's function does not get calls that are never refused.
    if limit.key is None or not matches:
        return _digest(_text([call["name"], call["args"]]))
    try:
        # A function that changes its argument must not change the call.
        key = limit.key(deepcopy(call))
    except Exception as error:
        error.add_note(f"raised by the key of limit {limit.name!r} for tool {call['name']!r}")
        raise
    return None if key is None else _digest(_text(key))


def _answer_digest(content: object, call_id: str, args: object, *, failed: bool) -> str:
    """Return a digest of an answer's content."""
    text = content if isinstance(content, str) else _text(content)
    if len(text) > MOST_COMPARED:
        half, length = MOST_COMPARED // 2, "" if failed else len(text)
        text = f"{text[:half]}\0{text[-half:]}{length}"
    if len(call_id) >= _LEAST_ID:
        text = text.replace(call_id, "")
    if failed:
        text = _without_arguments(text)
    # A moment or an id from the arguments means something, so it is compared.
    named = {match[0] for match in _VOLATILE.finditer(_text(args)[:MOST_COMPARED])}
    # The answer may repeat the date of such a moment without its time.
    named |= {moment[:10] for moment in named}
    text = _VOLATILE.sub(lambda match: match[0] if match[0] in named else "", text)
    return ("!" if failed else "+") + _digest(text)


def _without_arguments(error: str) -> str:
    """Return an error without the call's arguments, which LangGraph's messages repeat."""
    before, start, rest = error.partition(" with kwargs {")
    _, end, after = rest.partition("} with error:")
    return before + after if start and end else error


def _text(value: object) -> str:
    """Return a value as a text: equal values have equal texts."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # its keys cannot be sorted, or it contains itself
        return repr(value)


def _digest(text: str, size: int = 8) -> str:
    return blake2b(text.encode(errors="backslashreplace"), digest_size=size).hexdigest()
