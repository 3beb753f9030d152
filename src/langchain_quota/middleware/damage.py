"""Name the key where a hook fails at a thread's checkpoint that is damaged."""

from pydantic import TypeAdapter, ValidationError

# Pydantic does not read that of `typing` before Python 3.12.
from typing_extensions import TypedDict

from langchain_quota.middleware.state import Ledger, State
from langchain_quota.runtime.store_errors import UNREADABLE


class _Entries(TypedDict, total=False):
    thread_spent: dict[str, int]
    run_spent: dict[str, int]


class _Ledger(Ledger, total=False):
    own: dict[str, _Entries]  # type: ignore[misc]  # those that other modules add up


class _Kept(TypedDict, total=False):
    thread_tool_call_count: dict[str, int] | None
    thread_model_call_count: int | None
    langchain_quota: _Ledger | None


DAMAGES = (*UNREADABLE, ArithmeticError)
"""What a hook raises at a state that is damaged, among other causes."""


def raise_if_damaged(state: State, error: Exception) -> None:
    """Raise a `ValueError` that names the damaged key, if that is why a hook failed."""
    try:
        TypeAdapter(_Kept).validate_python({**state}, strict=True)
    except ValidationError as damage:
        first = damage.errors()[0]
        raise ValueError(
            f"{'.'.join(map(str, first['loc']))} is damaged in the checkpoint of this "
            f"thread: {first['msg']}. Begin another thread, or correct it there"
        ) from error
