"""Collects the decisions of a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from langchain_quota.decision import Decision

captures: ContextVar[tuple[list[Decision], ...]] = ContextVar("captures", default=())


@contextmanager
def capturing(decisions: list[Decision]) -> Iterator[None]:
    """Append every decision made in this context, and in tasks started from it, to the list."""
    token = captures.set((*captures.get(), decisions))
    try:
        yield
    finally:
        captures.reset(token)
