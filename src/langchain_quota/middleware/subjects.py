"""Whose calls a quota counts together."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from langchain_quota.limits import THREAD
from langchain_quota.middleware.origin import Origin


def subject_of(what: str, per: str, runtime: Any, caller: Origin) -> str:
    """The subject of a quota that names what it is per.

    Args:
        what: The quota, for messages.
        per: `"thread"`, `"agent"`, `"global"`, or a name in `runtime.context`.
        runtime: The hook's runtime.
        caller: The agent and thread.

    Raises:
        ValueError: There is none.
        TypeError: It is no string, whole number or UUID.
    """
    if per == "global":
        return ""
    if per == THREAD:
        if caller.run_thread_id is None:
            raise ValueError(
                f"{what} is per thread, and this run has none: call the agent with "
                '{"configurable": {"thread_id": …}}'
            )
        return str(caller.run_thread_id)
    if per == "agent":
        if not caller.agent:
            raise ValueError(f"{what} is per agent, and this one has no name: create_agent(name=…)")
        return caller.agent
    context = getattr(runtime, "context", None)
    value = context.get(per) if isinstance(context, Mapping) else getattr(context, per, None)
    if value is None:
        raise ValueError(
            f"{what} needs {per!r} in runtime.context: call the agent with "
            f'context={{"{per}": …}}, or an object that has it'
        )
    return checked_subject(what, value)


def checked_subject(what: str, value: object) -> str:
    """The text of a subject.

    Raises:
        TypeError: It is no string, whole number or UUID, of which equal ones have one text.
        ValueError: It is empty.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(
            f"the subject of {what} must be a string, a whole number or a UUID, not "
            f"{type(value).__name__}"
        )
    if not str(value):
        raise ValueError(f"the subject of {what} must not be empty")
    return str(value)
