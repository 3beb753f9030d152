"""A model node of the user's own."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.types import Command

from langchain_quota.features.graph.charges import joined
from langchain_quota.features.graph.loop import CALLED, Loop, State
from langchain_quota.middleware._calls import Update
from langchain_quota.middleware._form import Form, ask, now


class ChargedNode(Runnable[Any, Any]):
    """The node; all model runs in it are charged."""

    def __init__(self, loop: Loop, node: Runnable[Any, Any], given: Callable[[State], Any]) -> None:
        self._loop = loop
        self._node = node
        self._given = given

    def invoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> Any:  # noqa: A002 - LangChain's name
        """Run the node."""
        return now(self._run("", input, config))

    async def ainvoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> Any:  # noqa: A002 - the same
        """Run the node."""
        return await self._run("a", input, config)

    async def _run(self, form: Form, state: State, config: RunnableConfig | None) -> Any:
        run = partial(ask, form, self._node, "invoke", self._given(state), config)
        if not self._loop.has_budgets:
            return _with(await run(), {})
        return _with(*await self._loop.run_node(form, state, run))


def _with(result: Any, charged: Update) -> Any:
    """What the node writes, with its charge; if that is impossible, the next hook writes it."""
    charged = joined(charged, CALLED)
    if result is None:
        return charged
    if isinstance(result, Mapping):
        return {**result, **charged}
    if isinstance(result, Command) and result.graph is None and isinstance(result.update, Mapping):
        return Command(goto=result.goto, resume=result.resume, update={**result.update, **charged})
    results = result if isinstance(result, list | tuple) else [result]
    return [*results, Command(update=CALLED)]
