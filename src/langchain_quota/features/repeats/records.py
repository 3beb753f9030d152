"""What a repeat limit remembers of a run's tool calls, and what of them repeats."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.features.repeats.digests import answer_digest
from langchain_quota.limits.repeats import MOST_KEPT, RepeatLimit
from langchain_quota.messages import NOT_RUN


class Made(NamedTuple):
    """A tool call that was let through.

    Attributes:
        step: The number of the model's answer that made it.
        tool: A digest of the tool; begins with `-` if the limit never refuses its calls.
        key: A digest of the call: the same for calls that count as equal.
        gave: A digest of its answer; empty if it is not known. An error begins with `!`.
    """

    step: int
    tool: str
    key: str
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


class Repeated(NamedTuple):
    """How often calls were made, and tools have failed, since something new came.

    Attributes:
        calls: Equal calls, by key.
        failures: In how many answers of the model a tool failed in the same way, by tool. Of
            several ways the most frequent one counts.
    """

    calls: Mapping[str, int]
    failures: Mapping[str, int]


def repeated(made: Iterable[Made]) -> Repeated:
    """How often calls were made, and tools have failed, since something new came."""
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
    return Repeated({key: calls[key] + 1 for key in known}, by_tool)


def newest(limit: RepeatLimit, made: Sequence[Made]) -> Sequence[Made]:
    """The calls that a limit continues to remember."""
    if limit.run_limit == 1:
        # No call may come twice, even after many calls of other tools.
        made = sorted(made, key=lambda each: each.is_limited)[-MOST_KEPT:]
        return sorted(made, key=lambda each: each.step)
    return made[-MOST_KEPT:]


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


NOTHING: Record = {"message": "", "step": 0, "made": [], "waiting": {}}


def calls_made(record: Record, messages: Sequence[AnyMessage]) -> list[Made]:
    """The calls that a record knows, with the answers that they have now."""
    # Calls that were let through here and then did not run are left out.
    made = [Made(*each) for each in record["made"]]
    waiting = record["waiting"]
    answers, args = _answers(record, messages) if waiting else ({}, {})
    for call_id, (tool, key) in waiting.items():
        answer, gave = answers.get(call_id), ""
        if answer is not None:
            if NOT_RUN in answer.response_metadata:
                continue
            failed = answer.status == "error"
            gave = answer_digest(answer.content, call_id, args.get(call_id), failed=failed)
        made.append(Made(record["step"], tool, key, gave))
    return made


def most_repeated(record: Record, messages: Sequence[AnyMessage]) -> int:
    """How often the most repeated call or failure has come, of those that may be refused."""
    made = calls_made(record, messages)
    calls, failures = repeated(made)
    limited = [each for each in made if each.is_limited]
    counts = [calls[each.key] for each in limited]
    return max((*counts, *(failures.get(each.tool, 0) for each in limited)), default=0)


def _answers(
    record: Record, messages: Sequence[AnyMessage]
) -> tuple[dict[str, ToolMessage], dict[str | None, object]]:
    """The answers of the calls that wait, and the arguments, by id."""
    found: dict[str, ToolMessage] = {}
    for message in reversed(messages):
        if isinstance(message, AIMessage) and message.id == record["message"]:
            return found, {call["id"]: call["args"] for call in message.tool_calls}
        if isinstance(message, AIMessage):
            # Calls of a later message can have the same ids.
            found.clear()
        if isinstance(message, ToolMessage) and message.tool_call_id in record["waiting"]:
            found.setdefault(message.tool_call_id, message)
    return found, {}
