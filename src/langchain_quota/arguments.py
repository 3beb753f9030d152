"""Checks of arguments: each message names the argument, the value and the remedy."""

from collections.abc import Sequence

ALL_TOOLS = "__all__"
"""The counter of all tools together, as LangChain's limiter writes it to the state."""

MAX_NAME_LENGTH = 64
"""The longest limit name, in characters: a metric label carries it unchanged."""


def check_share(argument: str, value: object) -> None:
    """Check that a value is a share above 0 and at most 1.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{argument} must be a number, not {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{argument} must be above 0 and at most 1, not {value!r}")


def check_count(argument: str, value: object, *, least: int = 0) -> None:
    """Check that a value is a whole number, from a least one.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be a whole number or None, not {value!r}")
    if value < least:
        raise ValueError(f"{argument} must be {least} or more, not {value!r}")


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a value is one of several.

    Raises:
        ValueError: It is not.
    """
    if value not in choices:
        raise ValueError(f"Invalid {argument}: {value!r}. Choose one of {', '.join(choices)}")


def checked_tools(argument: str, value: object) -> tuple[str, ...]:
    """The names of tools, sorted, each once; none for `None`.

    Raises:
        TypeError: It is neither a string nor several.
        ValueError: A name is none of a tool.
    """
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a string, several strings or None, not {value!r}")
    if not names:
        raise ValueError(f"{argument} must name a tool, not {value!r}")
    for name in names:
        if not name or name.startswith(ALL_TOOLS) or "," in name:
            raise ValueError(f"{argument} must be the name of a tool, not {name!r}")
    return tuple(sorted(set(names)))


def checked_name(value: object, default: str) -> str:
    """A limit's name; the default for an empty one.

    Raises:
        TypeError: It is no string.
        ValueError: It is too long, or not printable.
    """
    if not isinstance(value, str):
        raise TypeError(f"name must be a string, not {value!r}")
    if not value:
        return default
    if len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError(
            f"name must have 1 to {MAX_NAME_LENGTH} printable characters, not {value!r}"
        )
    return value


def check_switch(argument: str, value: object) -> None:
    """Check that a value is one of the two of a switch.

    Args:
        argument: Its name, for the message.
        value: What was given.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, not {value!r}")
