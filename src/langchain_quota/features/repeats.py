"""Check repeat limits, which count a call by the answers to earlier calls that equal it."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolCall, ToolMessage

from langchain_quota.core.messages import NOT_RUN
from langchain_quota.core.plans import Meter, Plan, run_counter, thread_counter
from langchain_quota.limits.call import RUN, THREAD, Call
from langchain_quota.limits.calls import MOST_COMPARED, RepeatLimit
from langchain_quota.middleware.calls import Step
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import since
from langchain_quota.middleware.state import State, ledger
from langchain_quota.runtime.sync_async import Mode

_JSON = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


class Repeats(Feature):
    """Refuses calls that repeat earlier ones of the run, as its messages show them."""

    @classmethod
    def create(cls, kernel: Kernel) -> "Repeats | None":
        """Return the feature if a limit is a `RepeatLimit`."""
        feature = cls(kernel)
        return feature if feature._limits else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._limits = [limit for limit in kernel.limits if isinstance(limit, RepeatLimit)]

    def state_counts(self, state: State) -> dict[str, int]:
        """Return how often the most repeated call or failure occurred, by the counter's name."""
        messages, counters = _of_run(state), dict[str, int]()
        for limit in self._limits:
            steps = _past_steps(limit, messages)
            calls, failures = _count_repeats(steps)
            limited = [call for step in steps for call in step if call.is_limited]
            counts = (max(calls[call.key], failures.get(call.tool, 0)) for call in limited)
            counters[thread_counter(limit)] = counters[run_counter(limit)] = max(counts, default=0)
        return counters

    async def prepare(self, mode: Mode, step: Step) -> Step:  # noqa: ARG002 - as for every feature
        """Check each call by how often it, or its failure, occurred before."""
        if step.pending is None or not step.calls:
            return step
        messages, used = _of_run(step.state), {**step.used}
        repeats = {
            limit.name: _meters(limit, messages, step.pending.calls, used) for limit in self._limits
        }
        plans = (
            Plan.of(
                rule if meters is None else rule._replace(meters=meters[index])
                for rule in plan.rules
                if (meters := repeats.get(rule.limit.name)) is None or meters[index]
            )
            for index, plan in enumerate(step.plans)
        )
        return step.with_plans(plans, used=used)


class _PastCall(NamedTuple):
    """An answered tool call."""

    tool: str
    # The same for calls that count as equal.
    key: str
    # What it has said. An error of a tool says the same with all arguments.
    results: frozenset[tuple[str, ...]]
    # The text of its error, or `None` if it did not fail.
    error: str | None
    # Whether the limit may refuse such a call.
    is_limited: bool


def _count_repeats(
    steps: Iterable[Sequence[_PastCall]],
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return how often calls came and tools failed since something new came, by key and tool.

    A tool's most frequent failure counts.
    """
    calls: dict[str, int] = {}
    failures: dict[tuple[str, str], int] = {}
    results: set[tuple[str, ...]] = set()
    for step in steps:
        new = {call for call in step if results.isdisjoint(call.results)}
        if new:
            calls, failures = dict.fromkeys(calls, 1), dict.fromkeys(failures, 1)
        for key, number in Counter(call.key for call in step).items():
            answers = sum(call.key == key for call in new)
            if new:
                calls[key] = number - answers + 1 if answers else 1
            else:
                calls[key] = calls.get(key, 0) + number
        # Failures in one message count once: the model had not read of the first one.
        for failure in {(call.tool, call.error) for call in step if call.error is not None}:
            failures[failure] = 1 if new else failures.get(failure, 0) + 1
        results.update(*(call.results for call in step))
    by_tool: dict[str, int] = {}
    for (tool, _), number in failures.items():
        by_tool[tool] = max(number, by_tool.get(tool, 0))
    return calls, by_tool


def _meters(
    limit: RepeatLimit,
    messages: Sequence[AnyMessage],
    tool_calls: Sequence[ToolCall],
    used: dict[str, int],
) -> list[tuple[Meter, ...]]:
    """Return the meters of each call, and add its count to `used`; none for an ignored call."""
    calls, failures = _count_repeats(_past_steps(limit, messages))
    keys: dict[str, int] = {}
    meters: list[tuple[Meter, ...]] = []
    for tool_call in tool_calls:
        key, tool = _key(limit, tool_call), tool_call["name"]
        if key is None:
            meters.append(())
            continue
        count, failed = calls.get(key, 0), failures.get(tool, 0)
        # No counter of a call has two slashes.
        counter = f"{limit.counter}/{keys.setdefault(key, len(keys))}"
        meter = Meter(RUN, counter, limit.run_limit)
        if failed >= limit.most_failures and count < limit.run_limit:
            count, counter = failed, f"{limit.counter}//{tool}"
            meter = Meter(RUN, counter, limit.most_failures, reason="failing")
        used[counter] = count
        # A thread has no count of its own.
        meters.append((meter._replace(scope=THREAD, maximum=None), meter))
    return meters


def _of_run(state: State) -> Sequence[AnyMessage]:
    """Return the messages of the run, or those since a person's if its first one is gone."""
    messages: Sequence[AnyMessage] = state.get("messages") or ()
    of_run = since(messages, ledger(state).get("turn"))
    if of_run is None:
        people = (n for n, message in enumerate(messages, 1) if isinstance(message, HumanMessage))
        of_run = messages[max(people, default=0) :]
    return of_run


def _past_steps(limit: RepeatLimit, messages: Sequence[AnyMessage]) -> list[list[_PastCall]]:
    """Return the answered calls of each of the model's newest messages."""
    steps: list[list[_PastCall]] = []
    answers: dict[str, ToolMessage] = {}
    number = 0
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            answers.setdefault(message.tool_call_id, message)
        elif isinstance(message, AIMessage):
            pairs = ((call, answers.get(str(call["id"]))) for call in message.tool_calls)
            calls = (
                _past_call(limit, call, answer)
                for call, answer in pairs
                if answer is not None and NOT_RUN not in answer.response_metadata
            )
            steps.append([call for call in calls if call is not None])
            number += sum(call.is_limited for call in steps[-1])
            # Calls of an earlier message can have the same ids.
            answers.clear()
            if number >= MOST_COMPARED:
                break
    return steps[::-1]


def _past_call(limit: RepeatLimit, call: ToolCall, answer: ToolMessage) -> _PastCall | None:
    """Return a call with its answer; `None` for a call that is ignored."""
    key, tool, failed = _key(limit, call), call["name"], answer.status == "error"
    if key is None:
        return None
    text = answer.content if isinstance(answer.content, str) else _text(answer.content)
    if failed:
        # LangGraph's messages repeat the arguments of the call.
        before, start, rest = text.partition(" with kwargs {")
        _, end, after = rest.partition("} with error:")
        text = before + after if start and end else text
    is_limited = limit.matches(Call("tool", tool))
    has_own_key = limit.key is not None and is_limited
    said = _key(limit, call, answer=text) or "" if has_own_key else text
    results = frozenset([(key, said), *[("", tool, text)] * failed])
    return _PastCall(tool, key, results, text if failed else None, is_limited)


def _key(limit: RepeatLimit, call: ToolCall, **answer: str) -> str | None:
    """Return a text that equal calls share; `None` for a call that is ignored."""
    matches = limit.matches(Call("tool", call["name"]))
    if not matches and not limit.tools:
        return None
    # The user's function does not get calls that are never refused.
    if limit.key is None or not matches:
        return _text([call["name"], call["args"]])
    try:
        # A function that changes its argument must not change the call.
        key = limit.key({**deepcopy(call), **answer})
    except Exception as error:
        error.add_note(f"raised by the key of limit {limit.name!r} for tool {call['name']!r}")
        raise
    return None if key is None else _text(key)


def _text(value: object) -> str:
    """Return a value as a text: equal values have equal texts."""
    try:
        return _JSON.encode(value)
    except (TypeError, ValueError):  # its keys cannot be sorted, or it contains itself
        return repr(value)
