"""The answer to a question at a limit, as a person or an interface writes it."""

from collections.abc import Mapping

from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt

from langchain_quota.decision import Answer
from langchain_quota.limits.options import whole_amount
from langchain_quota.middleware.context import running_config
from langchain_quota.stores.grants import MAX_AMOUNT
from langchain_quota.units import Unit

ACTION = "raise_limits"
"""The name of the action that a person approves or rejects."""

KEPT = (
    "the store could not be asked, and the answer of a person waits for it: resume the run again "
    "when the store answers; the answer is kept"
)
"""The message if the store fails that has to grant what a person answered."""

_ANSWERS = (
    '{"decisions": [{"type": "approve"}]}, or with "reject", or with "approve" and an "amount"'
)


def is_answered() -> bool:
    """Whether a question of the running task has been answered."""
    try:
        interrupt(None)
    except GraphInterrupt:
        return False
    return True


def read_answer(resumed: object, offered: Mapping[str, int], units: Mapping[str, Unit]) -> Answer:
    """The answer that a run is resumed with: a `HITLResponse`, which may have an amount."""
    match resumed:
        case {"decisions": [{"type": "approve" | "reject" as kind, **said}], **others}:
            pass
        case _:
            raise ValueError(f"it must be {_ANSWERS}, not {resumed!r}")
    user = (running_config().get("configurable") or {}).get("langgraph_auth_user_id")
    # A user that the server has checked wins over a name that the answer claims.
    by = user or said.get("by") or others.get("by") or ""
    # Agent Inbox sends what a person says as "args".
    inbox = said.get("args")
    message = said.get("message") or (inbox if isinstance(inbox, str) else "")
    granted: Mapping[str, int] = {}
    if kind == "approve":
        given = said.get("amount")
        granted = offered if given is None else dict.fromkeys(offered, _amount(given, units))
    return Answer(kind, granted, str(by), str(message))


def _amount(value: object, units: Mapping[str, Unit]) -> int:
    """The amount that a person gives to each limit of the question."""
    unit, *others = sorted(set(units.values()))
    if others:
        names = ", ".join(map(repr, units))
        raise ValueError(f'limits {names} do not count the same: approve without an "amount"')
    try:
        amount = whole_amount(unit, '"amount"', value)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if amount > MAX_AMOUNT:
        raise ValueError(f'"amount" must be at most {MAX_AMOUNT}, not {value!r}')
    return amount
