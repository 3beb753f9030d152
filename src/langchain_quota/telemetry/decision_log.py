"""The log of decisions: JSON lines, which `langchain-quota replay` checks under other limits."""

import json
from collections.abc import Callable, Mapping
from logging import Handler, LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from os import SEEK_END, PathLike
from pathlib import Path

from langchain_quota.core.decision import Decision
from langchain_quota.runtime.arguments import validate_sync_function, validate_type


class DecisionLog:
    """Writes the decisions of one middleware; see `log_decisions`."""

    def __init__(self, handler: Handler, subject_label: Callable[[str], str]) -> None:
        self._handler, self._label = handler, subject_label

    def __call__(self, decision: Decision) -> None:  # noqa: ARG002 - an observer
        """Raise, because a line needs all decisions about the calls that are checked together."""
        raise TypeError("a decision log cannot be called: write on_decision=log_decisions(…)")

    def close(self) -> None:
        """Close the file or handler, after the last run."""
        self._handler.close()

    def write(self, line: Mapping[str, object], subjects: Mapping[str, str]) -> None:
        """Write a line, with labels of the subjects."""
        if subjects:
            line = {**line, "subjects": {per: self._label(of) for per, of in subjects.items()}}
        self._handler.handle(makeLogRecord({"msg": json.dumps(line, separators=(",", ":"))}))


def log_decisions(
    to: str | PathLike[str] | Handler, *, subject_label: Callable[[str], str] = str
) -> DecisionLog:
    """Return an observer that logs every decision, and what calls have used, for a replay.

    Give it to `on_decision`. Each middleware and each process needs a file of its own. A line is
    written before the agent goes on, in less than 0.1 ms. An error is counted and logged, and the
    run goes on.

    Args:
        to: The file. At 100 MB it is renamed, and nine older ones are kept. Or a handler of the
            standard library, such as a `TimedRotatingFileHandler`, or a `QueueHandler`, which
            leaves the writing to a thread.
        subject_label: Returns what is written for an agent, thread, user or other subject, such as
            `hmac_label(key)`; by default the subject itself.

    Raises:
        OSError: The file cannot be opened.
        TypeError: An argument has the wrong type.

    Examples:
        >>> from langchain_quota import QuotaMiddleware, ToolCallLimit, log_decisions
        >>> limits = [ToolCallLimit("search", run_limit=3, enforce=False)]
        >>> log = log_decisions("/tmp/decisions.jsonl")
        >>> quota = QuotaMiddleware(limits, on_decision=log)
        >>> log.close()
    """
    validate_type("to", to, str | PathLike | Handler, "a path or a logging.Handler")
    validate_type("subject_label", subject_label, Callable, "a function of the subject")
    validate_sync_function("subject_label", subject_label, "subject")
    return DecisionLog(to if isinstance(to, Handler) else _File(to), subject_label)


class _File(RotatingFileHandler):
    """A file whose errors are raised, so that telemetry counts them."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path, maxBytes=100 * 10**6, backupCount=9, encoding="utf-8")
        file = Path(path)
        if file.is_file() and file.stat().st_size:
            with file.open("rb") as written:
                written.seek(-1, SEEK_END)
                if written.read() != b"\n" and self.stream is not None:
                    # A process that was killed has left a part of a line.
                    self.stream.write("\n")

    def handleError(self, record: LogRecord) -> None:  # noqa: ARG002, N802 - of the standard library
        raise  # noqa: PLE0704 - the error that is being handled
