"""Finds limited tools that a code interpreter calls, where no hook of a middleware sees the call.

`CodeInterpreterMiddleware` of langchain-quickjs calls them inside one call of its tool `eval`.
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool

from langchain_quota.decision import Call
from langchain_quota.limits import Limit

_PACKAGE = "langchain_quickjs"
_SUB_AGENTS = "task"
"""The function by which code starts sub-agents, and the tool that it calls."""


def unseen_calls(limits: Iterable[Limit], tools: Sequence[Any]) -> str | None:
    """Says which limit a code interpreter would go past, and what to do; `None` for none."""
    if _PACKAGE not in sys.modules:
        return None
    for interpreter in tools:
        called = _called(interpreter, tools)
        for limit in limits:
            unseen = [name for name in called if limit.matches(Call("tool", name))]
            if unseen:
                return _said(interpreter.name, unseen, limit)
    return None


def _called(interpreter: object, tools: Sequence[Any]) -> list[str]:
    """The names of the tools that the code of an interpreter's tool can call."""
    if not isinstance(interpreter, StructuredTool):
        return []
    function = interpreter.func or interpreter.coroutine
    if not (inspect.isfunction(function) and function.__module__.startswith(f"{_PACKAGE}.")):
        return []
    others = [
        each for each in tools if isinstance(each, BaseTool) and each.name != interpreter.name
    ]
    settings = vars(inspect.getclosurevars(function).nonlocals.get("middleware", object))
    if not {"_ptc", "_subagents"} <= settings.keys():
        # It is another version of the package: its code may call any tool.
        return [each.name for each in others]
    names = [getattr(each, "name", each) for each in settings["_ptc"] or ()]
    if settings["_subagents"] and any(map(_starts_sub_agents, others)):
        names.append(_SUB_AGENTS)
    return [name for name in names if name != interpreter.name]


def _starts_sub_agents(tool: BaseTool) -> bool:
    """Whether the interpreter takes a tool for the one that starts sub-agents."""
    return tool.name == _SUB_AGENTS and {"description", "subagent_type"} <= tool.args.keys()


def _said(interpreter: str, unseen: Sequence[str], limit: Limit) -> str:
    remedies = []
    names = [name for name in unseen if name != _SUB_AGENTS]
    if names:
        remedies.append(f"take {', '.join(map(repr, names))} out of its ptc=[…]")
    if len(names) < len(unseen):
        remedies.append("give it subagents=False")
    excluding = ""
    if not limit.tools:
        excluding = f". Or leave them out of the limit: exclude={tuple(unseen)!r}"
    return (
        f"limit {limit.name!r} does not see what code calls: CodeInterpreterMiddleware calls "
        f"{', '.join(map(repr, unseen))} inside its tool {interpreter!r}. So "
        f"{' and '.join(remedies)}{excluding}"
    )
