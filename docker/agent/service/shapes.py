"""What goes in and out: the shapes of the API."""

import math
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from langchain_quota import Decision
from langchain_quota.core.decision import LimitStatus

MAX_ID = 128
MAX_TEXT = 8_000

STORE = "store"
"""The scope of a refusal because the shared store could not be asked."""

STORE_RETRY_SECONDS = 5

REPLACEMENT = "\ufffd"
"""Replaces bytes that are no text. It is refused in ids: two ids could become one."""

NANODOLLARS = 1_000_000_000
"""Limits count money in whole billionths of a dollar."""

Unit = Literal["calls", "tokens", "dollars", "seconds"]
Amount = int | float
"""Dollars and seconds have decimals."""


def _printable(value: str) -> str:
    if not value.isprintable() or REPLACEMENT in value:
        raise ValueError("must be printable characters on one line")
    return value


Id = Annotated[str, Field(min_length=1, max_length=MAX_ID), AfterValidator(_printable)]


class Shape(BaseModel):
    """What all shapes share."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Question(Shape):
    """A message to the agent."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    user_id: Id


class Refusal(Shape):
    """A blocked call.

    Attributes:
        type: Says what this is.
        limit: The limit's name.
        scope: What is used up: `run`, `thread`, a quota's name, or `store` if nobody knows.
        kind, tool: The call.
        unit: What the limit counts.
        used, limit_value: The count and the limit, in that unit; `None` for the scope `store`.
        resets_at: When a call could be admitted again; `None` if waiting does not help.
        message: The same in words.
    """

    type: Literal["quota_exceeded"] = "quota_exceeded"
    limit: str
    scope: str
    kind: str
    tool: str | None
    unit: Unit
    used: Amount | None
    limit_value: Amount | None
    resets_at: datetime | None
    message: str

    @property
    def status(self) -> int:
        """The HTTP status of a run that ended so."""
        if self.scope == STORE:
            return 503
        return 403 if self.resets_at is None else 429

    def headers(self) -> dict[str, str]:
        """The HTTP headers of a run that ended so."""
        if self.scope == STORE:
            return {"Retry-After": str(STORE_RETRY_SECONDS)}
        if self.resets_at is None:
            return {}
        seconds = (self.resets_at - datetime.now(UTC)).total_seconds()
        return {"Retry-After": str(max(1, math.ceil(seconds)))}


class Answer(Shape):
    """The agent's answer, and the calls that were refused on the way to it."""

    thread_id: str
    text: str
    refusals: list[Refusal]


class Refused(Shape):
    """The run was ended by a limit, after perhaps other refusals."""

    error: Refusal
    thread_id: str
    refusals: list[Refusal]


class Problem(Shape):
    """The codes of all other errors."""

    type: str
    message: str


class Failed(Shape):
    """The request was not served."""

    error: Problem


class Counts(Shape):
    """Calls by what is counted, and what those of the model used."""

    model: int
    tools: dict[str, int]
    tokens: int
    dollars: float


class Limited(Shape):
    """How much of a limit the thread has used."""

    limit: str
    scope: Literal["thread"] = "thread"
    unit: Unit
    used: Amount
    limit_value: Amount


class Usage(Shape):
    """What a thread has used."""

    thread_id: str
    thread: Counts
    run: Counts
    limits: list[Limited]


def refusal(decision: Decision) -> Refusal:
    """What a blocked call looks like.

    Of several limits that refuse it, one is shown: first one that no waiting helps against, then
    one that could not be checked, then one with a window.
    """
    refusing = [each for each in decision.refused_by if each.enforced]
    shown = min(refusing, key=_patience)
    scope = str(shown.refusal_scope)
    unknown = scope == STORE
    unit = unit_of(shown.unit)
    count = None if unknown else shown.count_of(scope)
    used = count and amount(count.used, unit)
    limit = count and amount(count.limit or 0, unit)
    resets_at = None if unknown else decision.resets_at
    if unknown:
        message = f"the limit {shown.limit!r} could not be checked"
    else:
        shares = f"{_worded(used, unit)} of {_worded(limit, unit)}"
        message = f"the {scope} limit of {shown.limit!r} is used up ({shares} {unit})"
    return Refusal(
        limit=shown.limit,
        scope=scope,
        kind=decision.call.kind,
        tool=decision.call.tool,
        unit=unit,
        used=used,
        limit_value=limit,
        resets_at=resets_at,
        message=message,
    )


def unit_of(counted: Literal["calls", "tokens", "nanodollars", "milliseconds"]) -> Unit:
    """The unit in which the API shows what a limit counts.

    Args:
        counted: What it counts.
    """
    if counted == "milliseconds":
        return "seconds"
    return "dollars" if counted == "nanodollars" else counted


def amount(count: int | None, unit: Unit) -> Amount | None:
    """A count in the unit of the API.

    Args:
        count: What the limit has counted.
        unit: The unit.
    """
    if count is not None and unit == "seconds":
        return count / 1000
    return count / NANODOLLARS if count is not None and unit == "dollars" else count


def _worded(shown: Amount | None, unit: Unit) -> str:
    return f"{shown:.9f}".rstrip("0").rstrip(".") if unit == "dollars" else str(shown)


def ends_run(decision: Decision) -> bool:
    """Whether a blocked call ends its run."""
    return any(each.enforced and each.exit_behavior != "continue" for each in decision.refused_by)


def _patience(status: LimitStatus) -> int:
    if status.reason == "store":
        return 1
    return 0 if status.resets_at is None else 2
