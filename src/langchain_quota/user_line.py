"""Warnings that point at the user's line, even if their cause is found later, in a run."""

import sys
import warnings
from types import FrameType
from typing import NamedTuple

from langchain_quota.errors import QuotaWarning

_NOT_THE_USERS = {"langchain_quota", "typing"}
"""The packages whose lines are skipped; a generic class is made in `typing`."""


class UserLine(NamedTuple):
    """A line of the user's code."""

    # LangGraph runs hooks in tasks and threads of its own. So when a hook warns, the stack may have
    # no line of the user: the line is remembered when the user makes the object that will warn.

    filename: str
    number: int
    module: str

    @classmethod
    def of_caller(cls) -> "UserLine":
        """The newest line on the stack that is not the package's own."""
        frame = sys._getframe()  # noqa: SLF001 - `inspect.currentframe` without the frames' source
        while _module(frame).partition(".")[0] in _NOT_THE_USERS and frame.f_back is not None:
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno, _module(frame))

    def warn(self, text: str) -> None:
        """Warn, and point at this line."""
        # As in `warnings.warn`, a text is shown once for each line.
        known = vars(sys.modules.get(self.module, sys)).setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, QuotaWarning, self.filename, self.number, self.module, known)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
