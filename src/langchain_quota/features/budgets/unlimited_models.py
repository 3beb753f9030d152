"""Model calls that no limit of a `QuotaMiddleware` judges: recorded without a graph node."""

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest

from langchain_quota.features.budgets.charged_response import ChargedResponse
from langchain_quota.middleware import _model_calls as model_calls
from langchain_quota.middleware._calls import Update
from langchain_quota.middleware._form import now


def leave_out_before_model(middleware: Any) -> None:
    """Record model calls in `wrap_model_call`: `create_agent` adds no `before_model` node."""
    # LangChain adds a node for each hook that the class overrides. So the middleware gets another
    # class, in which `before_model` is that of LangChain's base class. The object itself keeps its
    # hook, for a graph that is wired by hand.
    own: Any = type(middleware)
    for hook in ("before_model", "abefore_model"):
        vars(middleware)[hook] = getattr(middleware, hook)
    middleware.__class__ = _without_before_model(own)


@cache
def _without_before_model(cls: Any) -> type:
    """The same class without `before_model`."""

    def before_agent(self: Any, state: Any, runtime: Any) -> Update | None:
        # Around the model call, another middleware could take the error for one of the model.
        self._observers.check("")
        begun: Update | None = cls.before_agent(self, state, runtime)
        return begun

    def wrap_model_call(
        self: Any, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]
    ) -> Any:
        # There are no limits. But a quota per root run begins with the run's first call.
        limits = now(self._resolve("", "model", request.state, request.runtime))
        unlimited = model_calls.unlimited(request, limits, task=self.name)
        update = now(self._take_effect("", *unlimited))
        response = cls.wrap_model_call(self, request, handler)
        return response if update is None else ChargedResponse(response, update)

    async def awrap_model_call(
        self: Any,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[Any]],
    ) -> Any:
        limits = await self._resolve("a", "model", request.state, request.runtime)
        unlimited = model_calls.unlimited(request, limits, task=self.name)
        update = await self._take_effect("a", *unlimited)
        response = await cls.awrap_model_call(self, request, handler)
        return response if update is None else ChargedResponse(response, update)

    own: dict[str, object] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # The class of an object can change only to one with the same layout.
        "__slots__": (),
        "before_agent": before_agent,
        "abefore_agent": cls.abefore_agent,
        "before_model": AgentMiddleware.before_model,
        "abefore_model": AgentMiddleware.abefore_model,
        "wrap_model_call": wrap_model_call,
        "awrap_model_call": awrap_model_call,
    }
    made: type = type(cls)(cls.__name__, (cls,), own)
    return made
