"""A quota: how much somebody or something may use, in a window or in all."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from langchain_quota.arguments import check_count
from langchain_quota.decision import AT_ONCE, ROOT_RUN, RUN, STORE, THREAD
from langchain_quota.money import Dollars, checked_microdollars

_FIXED = (THREAD, "agent", "global", ROOT_RUN)
_RESERVED = (RUN, STORE, AT_ONCE, "none")
_SCOPE_NAME = re.compile(r"[a-z_]{1,32}")


@dataclass(frozen=True, slots=True)
class Quota:
    """How many calls somebody or something may make, counted in a store that runs share.

    Quotas on the same calls with the same `per` (of functions: the same name) and the same window
    are thresholds over one count, whichever limit or agent of the store they belong to.

    Args:
        limit: Most calls in a window, a whole number from 0 (which forbids); in a `TokenLimit`
            most tokens, in a `CostLimit` most dollars. Or a function of the agent's state and
            runtime, sync or async, that gives it, or `None` for no limit now.
        per: Whose calls are counted together: those of a `"thread"`, of a `"root_run"` (the
            outermost run, with every sub-agent and sub-graph that it starts), of an `"agent"` (by
            its name), of all (`"global"`), of a value in `runtime.context` under this name (a
            user, a tenant), or of what a function of state and runtime, sync or async, gives.
            Values are strings (not empty), whole numbers or UUIDs; equal texts are one subject. A
            value that is missing or of another type fails the run, and nothing is charged.
        window: How long a count lasts, in whole seconds from 1. Windows are fixed and aligned to
            the Unix epoch in UTC: a window of a day begins at midnight UTC, one of a week on a
            Thursday. So around an edge up to twice the limit can run. `None`: until it is reset.
            A quota per `"root_run"` has none.
        name: The quota's scope in metrics, spans and messages, `[a-z_]{1,32}`; by default `per`.
            A function needs one. Two quotas of one limit need different ones, and none may take
            `"run"`, `"store"`, `"at_once"` or `"none"`, nor a fixed `per` that is not its own. Nor
            may `per` be `"run"`: that is a `run_limit`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds. The message names the argument and the value.

    Examples:
        >>> from datetime import timedelta
        >>> from langchain_quota import Quota, ToolCallLimit
        >>> daily = Quota(5, per="user_id", window=timedelta(days=1))
        >>> ToolCallLimit("email", quotas=[daily]).quotas[0].name
        'user_id'
    """

    limit: "Dollars | Callable[[Any, Any], Dollars | Awaitable[Dollars | None] | None]"
    _: KW_ONLY
    per: "str | Callable[[Any, Any], object]" = THREAD
    window: timedelta | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        if not isinstance(self.per, str) and not callable(self.per):
            raise TypeError(f"per must be a string or a function, not {self.per!r}")
        if self.window is not None and not isinstance(self.window, timedelta):
            raise TypeError(f"window must be a timedelta or None, not {self.window!r}")
        if self.window is not None and (
            self.window < timedelta(seconds=1) or self.window.microseconds
        ):
            raise ValueError(f"window must be whole seconds, from 1, not {self.window!r}")
        if self.window is not None and self.per == ROOT_RUN:
            raise ValueError(
                f"window={self.window!r} does not go with per={ROOT_RUN!r}: a run's count ends "
                "with the run"
            )
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, not {self.name!r}")
        if not self.name and not isinstance(self.per, str):
            raise ValueError(f"per={self.per!r} is a function: give the quota a name")
        name = self.name or str(self.per)
        if not _SCOPE_NAME.fullmatch(name):
            argument = "name" if self.name else "per, without a name,"
            hint = "" if self.name else ": give the quota a name, the scope in metrics"
            raise ValueError(f"{argument} must match [a-z_]{{1,32}}, not {name!r}{hint}")
        _check_free(name, self.per)
        object.__setattr__(self, "name", name)

    @property
    def dimension(self) -> str:
        """Under which name its subjects are kept: quotas with one dimension share a count."""
        return self.per if isinstance(self.per, str) else self.name


def _check_limit(limit: object) -> None:
    """Check that a number is one of calls, tokens or dollars: which of them, the limit says.

    Raises:
        TypeError: It is none.
        ValueError: It is out of bounds, or cannot be read.
    """
    if limit is None:
        raise TypeError("limit must be a whole number or a function, not None")
    if isinstance(limit, float):
        raise TypeError(f"limit must be a whole number, or dollars as a string, not {limit!r}")
    if isinstance(limit, str | Decimal):
        checked_microdollars("limit", limit)
    elif not callable(limit):
        check_count("limit", limit)


def _check_free(name: str, per: object) -> None:
    """Check that a quota is neither shown nor kept as something else is.

    Raises:
        ValueError: It would be.
    """
    if name in _RESERVED or (name in _FIXED and name != per):
        raise ValueError(f"name must not be {name!r}: it has a meaning of its own")
    if per == RUN:
        raise ValueError(
            f"per must not be {per!r}, under which a store counts runs: give a function that reads "
            "the value from the context, and a name"
        )
