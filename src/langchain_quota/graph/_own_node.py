"""A model node of the user's own, in a loop with budgets."""

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.types import Command

from langchain_quota.graph._loop import Loop, State
from langchain_quota.middleware._calls import Update


class ChargedNode(Runnable[Any, Any]):
    """The node; all model runs in it are charged.

    Args:
        loop: Charges.
        node: The node, as LangGraph runs it.
        given: Makes of the state what the node asks for.
    """

    def __init__(self, loop: Loop, node: Runnable[Any, Any], given: Callable[[State], Any]) -> None:
        self._loop = loop
        self._node = node
        self._given = given

    def invoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> Any:  # noqa: A002 - LangChain's name
        """Run the node."""
        given = self._given(input)
        return _with(*self._loop.run_node(input, lambda: self._node.invoke(given, config)))

    async def ainvoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> Any:  # noqa: A002 - the same
        """Run the node."""
        given = self._given(input)
        return _with(*await self._loop.arun_node(input, lambda: self._node.ainvoke(given, config)))


def _with(result: Any, charged: Update) -> Any:
    """What the node writes, with its charge; if that is impossible, the next hook writes it."""
    if result is None:
        return charged
    if isinstance(result, Mapping):
        return {**result, **charged}
    if isinstance(result, Command) and result.graph is None and isinstance(result.update, Mapping):
        return Command(goto=result.goto, resume=result.resume, update={**result.update, **charged})
    return result
