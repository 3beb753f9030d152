"""Limits around the model call: one step of the model, and `InlineQuotaMiddleware`."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from langchain.agents.middleware import AgentMiddleware, ModelResponse
from langchain.agents.middleware.types import ResponseT
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, RemoveMessage, ToolMessage

from langchain_quota.agents.quota import QuotaMiddleware
from langchain_quota.features.reruns import Reruns, ToolReruns
from langchain_quota.middleware.base import ContextT, WrittenResponse
from langchain_quota.middleware.calls import Update
from langchain_quota.middleware.feature import Handler, Request, Response
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import EDITED_CALLS, identified
from langchain_quota.middleware.state import ledger, merge_ledgers
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode

_LANGCHAIN = tuple(map(int, version("langchain").split(".")[:2]))


class InlineState(dict[str, Any]):
    """The state in one step of the model, with what the step has written."""

    def __init__(self, request: Request) -> None:
        messages = request.state.get("messages") or []
        self.new_messages: list[AnyMessage] = []
        self.written: Update = {}
        self.overruled = sorted(_overruled(messages))
        # A reviewer has edited the calls of earlier messages only, which may have the same ids.
        earlier = {"structured_response": None, EDITED_CALLS: None}
        super().__init__({**request.state, **earlier, "messages": self._not_overruled(messages)})
        self.request = compat.with_state(request, self)
        if self.overruled:
            self.request = self.request.override(messages=self._not_overruled(request.messages))

    def _not_overruled(self, messages: list[AnyMessage]) -> list[AnyMessage]:
        if not self.overruled:
            return messages
        return [message for message in messages if message.id not in self.overruled]

    def write(self, update: Update | None) -> None:
        """Apply an update of the state."""
        new = {**(update or {})}
        messages = new.pop("messages", [])
        if messages:
            self.new_messages += messages
            self["messages"] = [*self["messages"], *messages]
        for target in (self, self.written) if new else ():
            target.update(new, langchain_quota=merge_ledgers(ledger(target), ledger(new)))

    def answer(self, response: Response) -> None:
        """Add the model's answer, with the ids under which charges are kept."""
        result = response.result
        answered = {reply.tool_call_id for reply in result if isinstance(reply, ToolMessage)}
        messages: list[BaseMessage] = []
        for message in result:
            named = message
            if isinstance(named, AIMessage):
                if named.id is None:
                    # A copy: a cache may give the same message again.
                    named = named.model_copy(update={"id": str(uuid4())})
                named = identified(named, answered)
            messages.append(named)
        self.write({"messages": messages})
        self["structured_response"] = response.structured_response


async def make_model_call(kernel: Kernel, mode: Mode, step: InlineState, handler: Handler) -> None:
    """Check a model call, and make it if it is allowed."""
    request = step.request
    step.write(await kernel.check_model_call(mode, step, request.runtime, request))
    if "jump_to" in step.written:
        return
    written = Update()
    response = await kernel.call_model(mode, step.request, handler, written)
    step.write(written)
    if response is not None:
        step.answer(response)
    # The graph may drop what this step writes.
    kernel.learn_answer(step, saved=False)


def _overruled(messages: Sequence[AnyMessage]) -> set[str]:
    """Return the ids of our refusals whose calls a reviewer has answered, too."""
    refusals: dict[str, str] = {}
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            ids = [call["id"] for call in message.tool_calls]
            # Two calls under one id have two answers.
            return {key for key, call_id in refusals.items() if ids.count(call_id) == 1}
        if isinstance(message, ToolMessage):
            if message.tool_call_id in answered and message.status == "error" and message.id:
                refusals[message.id] = message.tool_call_id
            answered.add(message.tool_call_id)
    return set()


class InlineQuotaMiddleware(QuotaMiddleware[ContextT, ResponseT]):
    """`QuotaMiddleware` that adds no graph node to a step.

    It checks calls inside the model's own step, and adds one superstep, at the beginning of a run.
    Arguments, counts and telemetry are those of `QuotaMiddleware`, but no limit can `"ask"`. List
    it first: it does not see what a middleware listed before it answers, drops or tries again. A
    tool call that a reviewer rejects or edits after its check counts as requested, so an edit can
    run a tool over its limit. It needs LangChain 1.4.

    Examples:
        >>> from langchain_quota import InlineQuotaMiddleware, ModelCallLimit
        >>> quota = InlineQuotaMiddleware([ModelCallLimit(run_limit=10)])
    """

    feature_kinds = tuple(
        ToolReruns if kind is Reruns else kind for kind in QuotaMiddleware.feature_kinds
    )
    checks_inline = True
    why_nobody_is_asked = "needs QuotaMiddleware: an interrupted run would call the model again"

    # LangChain makes no node for a hook that is its own base class's.
    before_model = AgentMiddleware.before_model
    abefore_model = AgentMiddleware.abefore_model
    after_model = AgentMiddleware.after_model
    aafter_model = AgentMiddleware.aafter_model

    async def _call_model(self, mode: Mode, request: Request, handler: Handler) -> WrittenResponse:
        # In older versions, a graph without `after_model` hooks cannot go from model to model.
        if _LANGCHAIN < (1, 4):
            raise RuntimeError(f"{self.name} needs langchain 1.4 or newer: use QuotaMiddleware")
        if isinstance(request.state, InlineState):
            # Both would write the counts, and neither sees what the other one writes.
            raise RuntimeError(  # noqa: TRY004 - the agent is put together wrongly
                f"{self.name} and another middleware of this agent both check around the model "
                "call: put all limits into one InlineQuotaMiddleware"
            )
        step = InlineState(request)
        await make_model_call(self.kernel, mode, step, handler)
        if "jump_to" not in step.written:
            # When the step runs again, the model may make other calls.
            task = f"{self.name}.tools.{step.new_messages[-1].id}"
            step.write(await self.kernel.check_tool_calls(mode, step, request.runtime, task=task))
        messages: list[BaseMessage] = [*step.new_messages, *map(RemoveMessage, step.overruled)]
        return WrittenResponse(ModelResponse(messages, step["structured_response"]), step.written)
