"""Validation of arguments, and warnings that point at the user's line.

Each message names the argument, the value and the remedy.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import currentframe, iscoroutinefunction, signature
from types import FrameType
from typing import Any, NamedTuple, TypeVar

ALL_TOOLS = "__all__"
"""The counter of all tools together, as LangChain's limiter writes it to the state."""

MAX_NAME_LENGTH = 64
"""The longest limit name, in characters: a metric label carries it unchanged."""

_LONGEST_VALUE = 80

_Kind = TypeVar("_Kind")

_GUESSES = {
    "run_limit": "limit max max_calls calls max_tokens max_cost budget timeout seconds max_repeats",
    "max_concurrency": "limit max max_calls parallel",
    "limit": "max_calls calls run_limit",
    "tool_name": "tool tools tool_names",
    "exit_behavior": "on_limit on_exceeded behavior",
    "per": "key by user scope",
    "window": "period interval",
    "tz": "timezone",
    "store": "storage backend",
    "input": "prompt",
    "output": "completion",
}
"""Arguments, and what people write in their place."""


class QuotaWarning(UserWarning):
    """A limit is set up so that it does not hold as its user expects; the text says why.

    It is given once, and points at the line that creates the middleware or the `GraphQuota`,
    because in a run the stack may have no line of yours. Where warnings are errors, a warning about
    an answer that is already paid is logged instead.

    Examples:
        Fail on it, in tests:

        >>> import warnings
        >>> from langchain.agents import create_agent
        >>> from langchain_quota import QuotaMiddleware, QuotaWarning, ToolCallLimit
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> quota = QuotaMiddleware([ToolCallLimit(thread_limit=20)])
        >>> agent = create_agent(ScriptedChatModel(script=["Hello."]), middleware=[quota])
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", QuotaWarning)
        ...     try:
        ...         agent.invoke({"messages": [("user", "Hi!")]})
        ...     except QuotaWarning as warning:
        ...         print(warning)
        QuotaMiddleware has a thread limit, but ...
    """


def explain_arguments(example: str) -> Callable[[type[_Kind]], type[_Kind]]:
    """Make a class say what to write, such as the example, if its arguments do not fit.

    Without it, Python's `TypeError` says only what is wrong.
    """

    def decorate(cls: type[_Kind]) -> type[_Kind]:
        init = cls.__init__
        accepted = signature(init).parameters

        @wraps(init)
        def explained(self: _Kind, *args: Any, **options: Any) -> None:
            try:
                init(self, *args, **options)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # by the class itself
                mistake = _mistake(error, accepted, options)
                raise TypeError(f"{cls.__name__} {mistake}: write {example}") from None

        cls.__init__ = explained  # type: ignore[assignment]
        return cls

    return decorate


def _mistake(error: TypeError, accepted: Mapping[str, object], options: Iterable[str]) -> str:
    """Return what is wrong with the arguments of a call, with the name that was meant."""
    for name in [name for name in options if name not in accepted]:
        guesses = [argument for argument, words in _GUESSES.items() if name in words.split()]
        guesses = [guess for guess in guesses if guess in accepted]
        meant = guesses or get_close_matches(name, accepted)
        return f"has no argument {name!r}" + (f" (did you mean {meant[0]}?)" if meant else "")
    return str(error).partition("() ")[2]


def short_repr(value: object) -> str:
    """Return the `repr` of a value, or only its type, as `ToolCallLimit(…)`, if that is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{type(value).__name__}(…)"


class NoHook:
    """An attribute that says what to write where LangChain looks for a middleware's hook."""

    def __init__(self, limit: str) -> None:
        self._limit = limit  # in the list of a QuotaMiddleware; {} is the name of the class

    def __get__(self, _: object, kind: type) -> None:
        limit = self._limit.format(kind.__name__)
        raise AttributeError(
            f"{kind.__name__} is no middleware: write middleware=[QuotaMiddleware([{limit}])]"
        )


def validate_type(argument: str, value: object, types: Any, what: str) -> None:
    """Check that a value has one of the types; `True` and `False` are no numbers."""
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise TypeError(f"{argument} must be {what}, not {value!r}")


def validate_switch(argument: str, value: object) -> None:
    """Check that a value is `True` or `False`."""
    validate_type(argument, value, bool, "True or False")


def validate_function(argument: str, value: object, *parameters: str) -> None:
    """Check that a value, if it is a function, accepts these positional arguments."""
    if not callable(value):
        return
    try:
        accepted = signature(value)
    except (TypeError, ValueError):  # no signature: not written in Python
        return
    try:
        accepted.bind(*parameters)
    except TypeError:
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(
            f"{argument} must be a function of {' and '.join(parameters)}, as in "
            f"lambda {', '.join(parameters)}: …, not {name}{accepted}"
        ) from None


def validate_sync_function(argument: str, value: object, *parameters: str) -> None:
    """Check a function as `validate_function` does, and that it is not async."""
    validate_function(argument, value, *parameters)
    if is_async(value):
        raise TypeError(f"{argument} must be a function that is not async, not {value!r}")


def is_async(function: object) -> bool:
    """Return whether a function, or a callable object, is async."""
    return iscoroutinefunction(function) or iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object
    )


def validate_share(argument: str, value: Any) -> None:
    """Check that a value is a share above 0 and at most 1."""
    validate_type(argument, value, int | float, "a number")
    if not 0 < value <= 1:
        raise ValueError(f"{argument} must be above 0 and at most 1, not {value!r}")


def validate_count(
    argument: str, value: object, *, least: int = 0, what: str = "a whole number or None"
) -> None:
    """Check that a value is a whole number that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        remedy = f": write {value}" if isinstance(value, str) and value.isdecimal() else ""
        raise TypeError(f"{argument} must be {what}, not {value!r}{remedy}")
    if value < least:
        is_optional = argument in ("thread_limit", "run_limit")
        remedy = ": leave it out for no limit" if is_optional else ""
        if least and remedy:  # a RepeatLimit always has one
            remedy = ": write 1 to block every repetition"
        raise ValueError(f"{argument} must be {least} or more, not {value!r}{remedy}")


def validate_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"Invalid {argument}: {value!r}. Choose one of {', '.join(choices)}")


def parse_tool_names(argument: str, value: object, *, or_none: bool = False) -> tuple[str, ...]:
    """Return the names of tools, sorted and without duplicates; none for `None`."""
    if value is None or (or_none and value in ((), [])):
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        name = getattr(value, "name", None) or getattr(value, "__name__", None)
        remedy = f": write {name!r}" if isinstance(name, str) else ""
        if isinstance(value, int) and argument == "tool_name":
            remedy = f": to limit the calls of a run, write run_limit={value!r}"
        raise TypeError(
            f"{argument} must be a string, several strings or None, not {short_repr(value)}{remedy}"
        )
    if not names:
        raise ValueError(f"{argument} must name a tool, not {value!r}")
    for name in names:
        if not name or name.startswith(ALL_TOOLS) or "," in name:
            raise ValueError(f"{argument} must be the name of a tool, not {name!r}")
    return tuple(sorted(set(names)))


def validate_name(value: object) -> None:
    """Check that a value is a limit's name, or empty."""
    validate_type("name", value, str, "a string")
    if value and (len(str(value)) > MAX_NAME_LENGTH or not str(value).isprintable()):
        must = f"have 1 to {MAX_NAME_LENGTH} printable characters"
        raise ValueError(f"name must {must}, not {value!r}")


_NOT_THE_USERS = {"langchain_quota", "typing"}
"""The packages whose lines are skipped; a generic class is made in `typing`."""


class UserLine(NamedTuple):
    """A line of the user's code."""

    # LangGraph runs hooks in tasks and threads of its own, so the stack of a hook that warns may
    # have no line of the user. The line is recorded when the user creates the object that will
    # warn.

    filename: str
    number: int
    module: str

    @classmethod
    def of_caller(cls) -> "UserLine":
        """Return the newest line on the stack that is not in this package."""
        frame = currentframe()
        assert frame is not None  # noqa: S101 - for the type checker: CPython has frames
        while _module(frame).partition(".")[0] in _NOT_THE_USERS and frame.f_back is not None:
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno, _module(frame))

    def warn(self, text: str) -> None:
        """Warn, and point at this line."""
        # As in `warnings.warn`, the registry has a text shown once for each line.
        registry = vars(sys.modules.get(self.module, sys)).setdefault("__warningregistry__", {})
        warnings.warn_explicit(
            text, QuotaWarning, self.filename, self.number, self.module, registry
        )


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
