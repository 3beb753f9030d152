"""Deep agents with limits; checked by mypy and pyright, never run."""

from collections.abc import Sequence
from typing import Any, assert_type

from langchain_quota import MemoryStore, QuotaMiddleware, ToolCallLimit, with_limits

quota = QuotaMiddleware([ToolCallLimit(run_limit=50)], store=MemoryStore())


def create(
    model: str,
    *,
    middleware: Sequence[Any] = (),
    subagents: Sequence[Any] | None = None,
    name: str | None = None,
) -> list[str]:
    return [model, name or "", *map(str, middleware), *map(str, subagents or ())]


limited = with_limits(create, quota, leave_out=["remote"])
assert_type(limited("scripted", name="boss"), list[str])
limited("scripted", middleware=[quota], subagents=[{"name": "finder"}])

# Not these.
limited("scripted", sub_agents=[])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
limited(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
with_limits(create, ToolCallLimit(run_limit=3))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
