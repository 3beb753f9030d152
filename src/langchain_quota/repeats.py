"""The limit on tool calls that repeat earlier ones, and how calls and answers are compared."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple

from langchain_quota.arguments import (
    check_count,
    check_sync_function,
    check_type,
    checked_excluded,
    checked_tools,
)
from langchain_quota.decision import Decision
from langchain_quota.limit_options import Checks, ToolLimit, checks
from langchain_quota.quotas import Quota

MOST_KEPT = 100
"""How many of a run's newest calls a limit remembers: about 5 kB of a checkpoint."""

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
"""The parts of an answer that may change without saying anything new."""

MOST_COMPARED = 20_000
"""How much of a call or an answer is compared, in characters."""

_PER_VALUE = 16
"""How many characters a value in a list or a mapping counts for, beside its own."""

_LEAST_ID = 6
"""A shorter id of a call, such as `"1"`, is part of many texts that do not name it."""


def _check_run_limit(argument: str, value: Any) -> None:
    what = "a whole number, the most equal calls of a run"
    check_count(argument, value, least=1, what=what)
    if value > MOST_KEPT:
        raise ValueError(
            f"{argument} must be {MOST_KEPT} or less, as no more calls are remembered, not "
            f"{value!r}"
        )


def _check_key(argument: str, value: object) -> None:
    check_type(argument, value, Callable, "a function of the tool call or None")
    check_sync_function(argument, value, "call")


@dataclass(frozen=True, slots=True)
class RepeatLimit(ToolLimit):
    """How often a run may make the same tool call without getting a new answer.

    `run_limit` equal calls are admitted, and the next one is refused: its answer says to the model
    that it repeats itself. Calls are equal if they have the same tool and the same arguments. At
    most 20,000 characters are compared: of a text of more than half of that the beginning, the end
    and the length, of a long list or mapping the beginning and the length.

    An answer is new if the call has not had it before in this run. A new answer sets the counts of
    all calls back to one. So polling is not refused while the answer changes, and tests that run
    after every change are not refused. But calls that alternate without new answers are refused.

    If a tool has failed in the same way in `run_limit` answers of the model, further calls of it
    are refused, whatever their arguments, until something new comes. With a `run_limit` of 1 it may
    fail twice.

    Args:
        run_limit: Most equal calls, a whole number from 1 to 100. With 1 no call is admitted twice.
            Of a run, the newest 100 calls are remembered.
        key: What is compared instead of tool and arguments: a function from the tool call (`name`,
            `args`, `id`) to a string or another JSON value. Calls with equal values are equal. A
            call with `None` is ignored.
        tools: The tools whose calls are refused, one or several; empty for all.
        exclude: With all tools: the tools to ignore. They are never refused, and their answers do
            not count as new.
        message: What the model reads instead of the default text; see `ToolCallLimit`.
        name: The limit's name in metrics and spans, 1 to 64 printable characters.
        exit_behavior: What a refusal does; see `ToolCallLimit`.
        give_up_after: After how many refusals the run ends; see `ToolCallLimit`.
        near: The used share from which this limit counts as near; see `ToolCallLimit`.
        enforce: Whether the limit refuses calls; see `ToolCallLimit`.
        alert: Whether a refusal is worth an alert; see `ToolCallLimit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Two arguments do not go together, or one is out of bounds. The message names
            the argument and the value.

    Examples:
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import QuotaMiddleware, RepeatLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> def search(query: str = "") -> str:
        ...     "Search the web."
        ...     return "nothing found"
        >>> model = ScriptedChatModel(script=[["search"], ["search"], ["search"], "Nothing."])
        >>> agent = create_agent(model, [search], middleware=[QuotaMiddleware([RepeatLimit(2)])])
        >>> result = agent.invoke({"messages": [("user", "Find it!")]})
        >>> print(result["messages"][-2].content)
        This call was not run: 'search' was called 2 times with the same arguments, and nothing ...

        Reading one file counts as one call, whatever part of it is read:

        >>> limit = RepeatLimit(5, key=lambda call: call["args"]["path"], tools="read_file")
    """

    thread_limit: ClassVar[None] = None
    """A new run may repeat what an earlier one did."""
    counted: ClassVar[bool] = False
    """The counts depend on the call, and on the answers of earlier calls."""

    run_limit: int
    _: KW_ONLY
    key: Callable[[Any], object] | None = None
    tools: Sequence[str] = ()
    exclude: Sequence[str] = ()
    message: str | Callable[[Decision], str] | None = None
    name: str = "repeats"
    exit_behavior: Literal["continue", "error", "end"] = "continue"
    give_up_after: int | None = None
    near: float | None = None
    enforce: bool = True
    alert: bool = True
    quotas: tuple[Quota, ...] = field(default=(), init=False, repr=False)
    """None: repeats are counted within one run."""
    counter: str = field(init=False, repr=False)
    """The first part of the key under which calls are counted; the call's key follows."""

    _checks: ClassVar[Checks] = checks(
        "calls", Literal["continue", "error", "end"], run_limit=_check_run_limit, key=_check_key
    )

    def __post_init__(self) -> None:
        self._check_options("repeats")
        tools = () if self.tools in ((), []) else checked_tools("tools", self.tools)
        # No tool's counter begins with a comma.
        counter = f",repeats,{self.name}"
        self._set(tools=tools, exclude=checked_excluded(self.exclude), counter=counter)
        if self.tools and self.exclude:
            raise ValueError(f"exclude={self.exclude!r} needs all tools: leave tools out")

    @property
    def most_failures(self) -> int:
        """In how many answers of the model a tool may fail in the same way."""
        # With 1, the model could not even correct its arguments after the first failure.
        return max(2, self.run_limit)


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


def tool_digest(name: str, *, matches: bool = True) -> str:
    """A digest of a tool."""
    return ("" if matches else "-") + _digest(name, size=4)


def key_digest(limit: RepeatLimit, call: Mapping[str, Any], *, matches: bool) -> str | None:
    """A digest that equal calls share; `None` for a call that is ignored."""
    if not matches and not limit.tools:
        return None
    # The function does not get calls that are never refused.
    if limit.key is None or not matches:
        return _digest(_part([call["name"], call["args"]]))
    try:
        # A function that changes its argument must not change the call.
        key = limit.key(_copied(dict(call)))
    except Exception as error:
        error.add_note(f"raised by the key of limit {limit.name!r} for tool {call['name']!r}")
        raise
    if key is None:
        return None
    try:
        return _digest(_part(key, is_json=True))
    except TypeError as error:
        raise TypeError(
            f"key of limit {limit.name!r} must give a string or another JSON value, not {key!r}"
        ) from error


def answer_digest(content: object, call_id: str, args: object, *, failed: bool) -> str:
    """A digest of what an answer says."""
    text = _part(content, has_length=not failed)
    if len(call_id) >= _LEAST_ID:
        text = text.replace(call_id, "")
    if failed:
        text = _without_arguments(text)
    # What the arguments name must not be ignored as a moment or an id.
    named = {found[0] for found in _VOLATILE.finditer(_part(args))}
    # Of a moment that the arguments name, the answer may repeat the date alone.
    named |= {each[:10] for each in named}
    text = _VOLATILE.sub(lambda found: found[0] if found[0] in named else "", text)
    return ("!" if failed else "+") + _digest(text)


def _without_arguments(error: str) -> str:
    """An error without the call's arguments, which LangGraph's messages repeat."""
    before, begins, rest = error.partition(" with kwargs {")
    _, ends, after = rest.partition("} with error:")
    return before + after if begins and ends else error


def _part(value: object, *, is_json: bool = False, has_length: bool = True) -> str:
    """What is compared of a value, as a text: equal values have equal texts, however long."""
    # Each text, list or mapping gets half of what is left at most, so that a short argument is
    # compared beside a long one.
    left, parts, values = MOST_COMPARED, list[str](), [value]
    while values:
        each = values.pop()
        inner: Sequence[object] = ()
        if isinstance(each, str):
            text, kind = each, '"'
        elif isinstance(each, list | tuple):
            text, kind = str(len(each)), "list "
            inner = each[: left // 2 // _PER_VALUE]
        elif isinstance(each, Mapping):
            text, kind = str(len(each)), "mapping "
            first = islice(each.items(), left // 4 // _PER_VALUE)
            pairs = sorted(((str(key), one) for key, one in first), key=itemgetter(0))
            inner = [one for pair in pairs for one in pair]
        else:
            text, kind = _written(each, is_json=is_json), ""
        half = left // 4
        if len(text) > 2 * half:
            length = f"\0{len(text)}" if has_length else ""
            text = f"{text[:half]}\0{text[len(text) - half :]}{length}"
        left = max(0, left - len(text) - len(inner) * _PER_VALUE)
        parts.append(kind + text)
        values += reversed(inner)
    return "\0".join(parts)


def _written(value: object, *, is_json: bool) -> str:
    """A value without parts; as JSON has only one kind of number, 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # In decimal, the work grows with the square of the digits.
        return f"{value:d}" if value.bit_length() < 1_000 else f"{value:x}"  # noqa: PLR2004
    if is_json and not (value is None or isinstance(value, bool | float)):
        raise TypeError(f"no JSON value: {value!r}")
    return str(value)


def _copied(value: Any) -> Any:
    """A JSON value whose lists and mappings are others."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _digest(text: str, size: int = 8) -> str:
    return blake2b(text.encode(errors="backslashreplace"), digest_size=size).hexdigest()
