"""Answers that have used so many tokens, and what is charged for them."""

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRetryMiddleware
from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool, StructuredTool

from tests.scene import Scene
from tests.telemetry import Signals

TOTAL = "model.total_tokens"
MONEY = "model.nanodollars"
GLOBAL = f"{TOTAL}:global:"
THREAD = f"{TOTAL}:thread:thread-1"


RETRY = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False, on_failure="error")


class ProviderError(Exception):
    """The model's provider fails."""


def answer(tokens: int, *calls: Any, text: str = "Hello.", **report: Any) -> AIMessage:
    """An answer that has used so many tokens, one of them of output; `report` says it otherwise."""
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens, **report}
    named = [each if isinstance(each, tuple) else (each, {}) for each in calls]
    called = [
        {"name": name, "args": args, "id": f"{name}-{tokens}-{index}"}
        for index, (name, args) in enumerate(named)
    ]
    # A provider may report what is no number.
    return AIMessage(text, tool_calls=called).model_copy(update={"usage_metadata": used})


def spent(scene: Scene, counter: str = TOTAL) -> tuple[int, int]:
    """What the thread and its newest run have used."""
    used = scene.usage()
    return used.spent.get(counter, 0), used.run_spent.get(counter, 0)


def spent_by_agent(signals: Signals) -> dict[str, float]:
    """What the metrics say was spent, by agent, of the limit `tokens`."""
    found = signals.samples("langchain_quota_spent_tokens_total", limit="tokens")
    return {agent: value for (agent, *_), value in found.items()}


class During(AgentMiddleware):
    """Does something when a model call is made: before it, or by default behind it."""

    def __init__(self, do: Callable[[], object], *, before: bool = False) -> None:
        super().__init__()
        self.before: Callable[[], object] = do if before else str
        self.behind: Callable[[], object] = str if before else do

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        self.before()
        response = handler(request)
        self.behind()
        return response

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        self.before()
        response = await handler(request)
        self.behind()
        return response


class Twice(AgentMiddleware):
    """Calls the model twice, and takes the second answer."""

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        await handler(request)
        return await handler(request)


def tool(
    name: str, run: Callable[[], object], arun: Callable[[], Awaitable[object]], **options: Any
) -> BaseTool:
    """A tool of both forms."""

    def do() -> str:
        return str(run())

    async def ado() -> str:
        return str(await arun())

    return StructuredTool.from_function(do, ado, name=name, description=name, **options)


def asking(name: str, model: Any, **options: Any) -> BaseTool:
    """A tool that calls a model."""
    return tool(name, lambda: model.invoke("Hi!"), lambda: model.ainvoke("Hi!"), **options)
