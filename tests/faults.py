"""Every fault of a kind in one message: where it is, what it is, and what mends it."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def no_faults(found: Iterable[str], *, remedy: str) -> None:
    """Fail if there is a fault, with all of them.

    Args:
        found: The faults; each begins with its place.
        remedy: What to do about them.
    """
    faults = list(dict.fromkeys(found))
    if faults:
        pytest.fail("\n  ".join([f"{remedy} Faults: {len(faults)}", *faults]), pytrace=False)


def at(path: Path, text: str | int = "") -> str:
    """A place: a file, and in it a line, or the first line that has a text, or its longest word."""
    line = text if isinstance(text, int) else _line(path, text)
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def at_code(value: Any) -> str:
    """The place where a class, a function or a property is defined."""
    code: Any = value.fget if isinstance(value, property) else value
    _, line = inspect.getsourcelines(code)
    return at(Path(inspect.getfile(code)), line)


def differences(
    page: Path, said: Iterable[str], real: Iterable[str], *, kind: str
) -> Iterable[str]:
    """What a page says twice, what it says and the code has not, and the other way round.

    Args:
        page: The page.
        said: The names on the page.
        real: The names that the code has.
        kind: What they are the names of.
    """
    names, known = list(said), set(real)
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"{at(page, name)}: {kind} {name!r} is there twice"
        if name not in known:
            yield f"{at(page, name)}: {kind} {name!r} is not in the code"
    for name in sorted(known.difference(names)):
        yield f"{at(page)}: {kind} {name!r} of the code is missing"


def _line(path: Path, text: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    for part in (text, max(text.split(), key=len, default="")):
        for number, line in enumerate(lines, 1):
            if part in line:
                return number
    return 1
