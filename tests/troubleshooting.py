"""The page of messages, and whether a message is on it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"

_ROW = re.compile(r"^\| `(?P<message>[^`]+)` \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def messages() -> list[str]:
    """What the page says that a user sees: how messages begin, with `…` for what varies."""
    return [row["message"] for row in _ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def begins(seen: str, message: str) -> bool:
    """Whether a text that was seen begins as a message of the page does."""
    return re.match(".+".join(map(re.escape, message.split("…"))), seen) is not None


def raised(error: type[BaseException], make: Callable[[], Any]) -> str:
    """What a user reads of the exception that something raises."""
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)
