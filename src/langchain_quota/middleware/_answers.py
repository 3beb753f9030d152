"""The answer to a question at a limit, as a person or an interface writes it."""

from collections.abc import Mapping

from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt

from langchain_quota.decision import Answer
from langchain_quota.limit_options import whole_amount
from langchain_quota.limits import Limit
from langchain_quota.middleware._context import running_config
from langchain_quota.stores.grants import MAX_AMOUNT

ACTION = "raise_limits"
"""The name of the action that a person approves, edits or rejects."""

KEPT = (
    "the store could not be asked, and the answer of a person waits for it: resume the run again "
    "when the store answers; the answer is kept"
)
"""The message if the store fails that has to grant what a person answered."""

_ANSWERS = (
    '{"decisions": [{"type": "approve"}]}, or with "reject", or with "edit" and '
    f'{{"edited_action": {{"name": "{ACTION}", "args": …}}}}'
)


def is_answered() -> bool:
    """Whether a question of the running task has been answered."""
    try:
        interrupt(None)
    except GraphInterrupt:
        return False
    return True


def read_answer(resumed: object, offered: Mapping[str, int], limits: Mapping[str, Limit]) -> Answer:
    """The answer that a run is resumed with, as LangChain's `HITLResponse` has it.

    A limit may have room since the person was asked: for example, the same answer has raised it
    before. An edit may name such a limit, and grants it nothing more.

    Args:
        resumed: What the run is resumed with.
        offered: How much an approval grants, by the name of the limit.
        limits: The limits that an edit may name, by name.

    Raises:
        ValueError: It is no such answer.
    """
    match resumed:
        case {"decisions": [{"type": "approve" | "edit" | "reject" as kind, **said}], **others}:
            pass
        case _:
            raise ValueError(f"it must be {_ANSWERS}, not {resumed!r}")
    user = (running_config().get("configurable") or {}).get("langgraph_auth_user_id")
    # A user that the server has checked wins over a name that the answer claims.
    by = user or said.get("by") or others.get("by") or ""
    # Agent Inbox sends an edited action and what a person says as "args".
    inbox = said.get("args")
    message = said.get("message") or (inbox if isinstance(inbox, str) else "")
    granted: Mapping[str, int] = {}
    if kind == "approve":
        granted = offered
    elif kind == "edit":
        edited = _edited(said.get("edited_action") or inbox, limits)
        granted = {name: amount for name, amount in edited.items() if name in offered}
    return Answer(kind, granted, str(by), str(message))


def _edited(action: object, limits: Mapping[str, Limit]) -> dict[str, int]:
    """The amounts of an edited action; a limit that it leaves out is granted nothing.

    Raises:
        ValueError: It is no action, it names another limit, or an amount is not valid.
    """
    given = action.get("args") if isinstance(action, Mapping) else None
    if not isinstance(given, Mapping) or not given.keys() <= limits.keys():
        names = ", ".join(map(repr, limits))
        raise ValueError(
            f'"edited_action" must have "args" with amounts for {names}, not {action!r}'
        )
    return {name: _amount(limits[name], value) for name, value in given.items()}


def _amount(limit: Limit, value: object) -> int:
    """An amount as a person writes it: forms often give numbers as text.

    Raises:
        ValueError: It is no amount.
    """
    text = str(value).strip().removeprefix("$").replace(",", "")
    try:
        given: object = text if limit.unit == "microdollars" else int(text)
        amount = whole_amount(limit.unit, "amount", given)
    except (TypeError, ValueError):
        amount = -1
    if not 0 <= amount <= MAX_AMOUNT:
        unit = "dollars" if limit.unit == "microdollars" else limit.unit
        raise ValueError(
            f"the amount for limit {limit.name!r} must be {unit} from 0, not {value!r}"
        )
    return amount
