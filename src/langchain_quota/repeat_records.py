"""What a repeat limit remembers of a run's tool calls, as the state keeps it."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

# That of `typing` has no JSON Schema before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.messages import NOT_RUN
from langchain_quota.repeats import Made, answer_digest, repeated


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

Records = Mapping[str, Mapping[str, Record]]
"""By middleware and name of the limit."""


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


def most_repeated(records: Records, messages: Sequence[AnyMessage]) -> dict[str, int]:
    """How often the most repeated call or failure has come, by name of the limit.

    Calls that a limit never refuses do not count.

    Args:
        records: The records.
        messages: The history.
    """
    found: dict[str, int] = {}
    for by_limit in records.values():
        for name, record in by_limit.items():
            made = calls_made(record, messages)
            calls, failures = repeated(made)
            limited = [each for each in made if each.is_limited]
            counts = [calls[each.key] for each in limited]
            counts += [failures.get(each.tool, 0) for each in limited]
            found[name] = max((*counts, found.get(name, 0)))
    return found


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
