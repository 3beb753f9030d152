"""Completes subclasses of limiting middlewares: both forms of a hook, and the begin of runs."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from langchain_quota.middleware._calls import Update
from langchain_quota.state import LEDGER

Hook = Callable[..., Update | None]
AsyncHook = Callable[..., Awaitable[Update | None]]
AnyHook = TypeVar("AnyHook", bound=Callable[..., object])

_HOOKS = ("before_agent", "before_model", "after_model", "after_agent")

_BEGINS = "__begins_runs__"
"""The mark on a `before_agent` that begins runs."""


def begins_runs(hook: AnyHook) -> AnyHook:
    """Mark a `before_agent` that begins runs itself."""
    setattr(hook, _BEGINS, True)
    return hook


def complete(cls: type) -> None:
    """Make a subclass's sync hooks work in async runs, and its runs begin without `super()`.

    Args:
        cls: The subclass; changed in place.

    Raises:
        TypeError: It overrides `wrap_model_call`, and not `awrap_model_call`.
    """
    for hook in _HOOKS:
        if _owner(cls, hook) < _owner(cls, f"a{hook}"):
            form = _async_form(getattr(cls, hook), getattr(cls, f"a{hook}"))
            setattr(cls, f"a{hook}", form)
    if _owner(cls, "wrap_model_call") < _owner(cls, "awrap_model_call"):
        raise TypeError(
            f"{cls.__name__} overrides wrap_model_call: override awrap_model_call, too, or "
            "ainvoke would not call it"
        )
    for hook, beginning in (("before_agent", _beginning), ("abefore_agent", _abeginning)):
        if not hasattr(getattr(cls, hook), _BEGINS):
            setattr(cls, hook, begins_runs(beginning(getattr(cls, hook))))


def _owner(cls: type, hook: str) -> int:
    """How far up among the class's ancestors a hook is defined."""
    return next(index for index, each in enumerate(cls.__mro__) if hook in each.__dict__)


def _async_form(hook: Hook, inherited: AsyncHook) -> AsyncHook:
    """The async form of a hook that a subclass overrides in its sync form only.

    The sync hook runs in a worker thread, since it may block.
    """

    @wraps(hook)
    async def ahook(self: Any, state: Any, runtime: Any) -> Update | None:
        return await asyncio.to_thread(hook, self, state, runtime)

    jumps = getattr(hook, "__can_jump_to__", getattr(inherited, "__can_jump_to__", None))
    if jumps is not None:
        ahook.__can_jump_to__ = jumps  # type: ignore[attr-defined]
    return ahook


def _beginning(hook: Hook) -> Hook:
    @wraps(hook)
    def before_agent(self: Any, state: Any, runtime: Any) -> Update | None:
        return _with_beginning(self, state, runtime, hook(self, state, runtime))

    return before_agent


def _abeginning(hook: AsyncHook) -> AsyncHook:
    @wraps(hook)
    async def abefore_agent(self: Any, state: Any, runtime: Any) -> Update | None:
        return _with_beginning(self, state, runtime, await hook(self, state, runtime))

    return abefore_agent


def _with_beginning(self: Any, state: Any, runtime: Any, own: Update | None) -> Update:
    """What a subclass's `before_agent` returns, with the run's beginning if it forgot `super()`."""
    if own is not None and LEDGER in own:
        return own
    beginning: Update = self._begin_run(state, runtime)
    merged = {**beginning, **(own or {})}
    if own and "messages" in own and "messages" in beginning:
        merged["messages"] = [*beginning["messages"], *own["messages"]]
    return merged
