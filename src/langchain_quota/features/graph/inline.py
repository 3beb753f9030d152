"""InlineQuotaMiddleware: many limits without a node of the graph."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelResponse
from langchain.agents.middleware.types import ResponseT
from langchain_core.messages import RemoveMessage

from langchain_quota.concurrency import Form
from langchain_quota.errors import ModelCallLimitExceededError
from langchain_quota.features.graph.step import Step, make_model_call
from langchain_quota.middleware.calls import Update
from langchain_quota.middleware.feature import Handler
from langchain_quota.middleware.flow import ContextT
from langchain_quota.middleware.quota import QuotaMiddleware, WrittenResponse
from langchain_quota.state import ledger, run_model, thread_model


class InlineQuotaMiddleware(QuotaMiddleware[ContextT, ResponseT]):
    """`QuotaMiddleware` that adds no graph node to a step; experimental.

    It judges inside the model's own step, and adds one superstep, at the beginning of a run.
    Arguments, counts and telemetry are those of `QuotaMiddleware`, but no limit can `"ask"`. List
    it first: it does not see what a middleware listed before it answers, drops or tries again. It
    needs LangChain 1.4. A run that a limit has ended raises a `ModelCallLimitExceededError` if it
    is led back to the model.

    Examples:
        >>> from langchain_quota import InlineQuotaMiddleware, ModelCallLimit
        >>> quota = InlineQuotaMiddleware([ModelCallLimit(run_limit=10)])
    """

    why_nobody_is_asked = "needs QuotaMiddleware: an interrupted run would call the model again"

    # LangChain makes no node for a hook that is its own base class's.
    before_model = AgentMiddleware.before_model
    abefore_model = AgentMiddleware.abefore_model
    after_model = AgentMiddleware.after_model
    aafter_model = AgentMiddleware.aafter_model

    async def _wrap_model_call(self, form: Form, request: Any, handler: Handler) -> WrittenResponse:
        if isinstance(request.state, Step):
            # Both would write the counts, and neither sees what the other one writes.
            raise RuntimeError(  # noqa: TRY004 - the agent is put together wrongly
                f"{self.name} and another middleware of this agent both judge around the model "
                "call: put all limits into one InlineQuotaMiddleware"
            )
        step = Step(request)
        ended = ledger(step).get("ended")
        if ended and any(each.id == ended for each in step["messages"]):
            # Another middleware, or LangChain itself, leads it back, and could do so forever.
            text, counts = "a limit has ended this run", (thread_model(step), run_model(step))
            raise ModelCallLimitExceededError(*counts, None, None, message=text)
        await make_model_call(self, form, step, handler)
        if "jump_to" not in step.written:
            # When the step runs again, the model may make other calls.
            task = f"{self.name}.tools.{step.made[-1].id}"
            step.write(await self._judge_tools(form, step, request.runtime, task=task))
        made = [*step.made, *map(RemoveMessage, step.overruled)]
        return WrittenResponse(ModelResponse(made, step["structured_response"]), step.written)

    def _begin_run(self, form: Form, state: Mapping[str, Any], runtime: Any) -> Update:
        # In older versions, a graph without `after_model` hooks cannot go from model to model.
        if tuple(map(int, version("langchain").split(".")[:2])) < (1, 4):
            raise RuntimeError(f"{self.name} needs langchain 1.4 or newer: use QuotaMiddleware")
        return super()._begin_run(form, state, runtime)

    def _judging_nodes(self) -> tuple[str, ...]:
        return ("model",)
