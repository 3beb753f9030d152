"""One step of the model, and what it has written before the graph sees it."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

from langchain_quota.concurrency import Form
from langchain_quota.middleware.calls import Update, with_state
from langchain_quota.middleware.feature import Handler
from langchain_quota.middleware.history import identified
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.state import ledger, merge_ledgers


class Step(dict[str, Any]):
    """The state in one step of the model, with what the step has written."""

    def __init__(self, request: ModelRequest[Any]) -> None:
        known = request.state.get("messages") or []
        self.made: list[Any] = []
        self.written: Update = {}
        self.overruled = sorted(_overruled(known))
        super().__init__(request.state, messages=self._kept(known), structured_response=None)
        self.request = with_state(request, self)
        if self.overruled:
            self.request = self.request.override(messages=self._kept(request.messages))

    def _kept(self, messages: list[Any]) -> list[Any]:
        return [each for each in messages if each.id not in self.overruled]

    def write(self, update: Update | None) -> None:
        """Take in what is to be written to the state."""
        new = {**(update or {})}
        made = new.pop("messages", [])
        self.made += made
        self["messages"] = [*self["messages"], *made]
        for each in (self, self.written):
            each.update(new, langchain_quota=merge_ledgers(ledger(each), ledger(new)))

    def answer(self, response: ModelResponse[Any]) -> None:
        """Add the model's answer, with the ids under which charges are kept."""
        answered = {each.tool_call_id for each in response.result if isinstance(each, ToolMessage)}
        for message in response.result:
            made = message
            if isinstance(made, AIMessage):
                # A copy: a cache may give the same message again.
                made = identified(made.model_copy(update={"id": made.id or str(uuid4())}), answered)
            self.write({"messages": [made]})
        self["structured_response"] = response.structured_response


async def make_model_call(
    limits: QuotaMiddleware[Any, Any], form: Form, step: Step, handler: Handler
) -> None:
    """Judge a model call, and make it if it is let through."""
    step.write(await limits._judge_model(form, step, step.request.runtime))  # noqa: SLF001 - ours
    if "jump_to" in step.written:
        return
    limits._learn_tools(step.request)  # noqa: SLF001 - the same
    written = Update()
    response = await limits._call_model(form, step.request, handler, written)  # noqa: SLF001 - the same
    step.write(written)
    if response is not None:
        step.answer(response)
    # The graph may drop what this step writes.
    limits._learn_answer(step, saved=False)  # noqa: SLF001 - the same


def _overruled(messages: Sequence[AnyMessage]) -> set[str]:
    """The ids of our refusals whose calls a reviewer has answered, too."""
    refusals: dict[str, str] = {}
    answered: set[str] = set()
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            ids = [call["id"] for call in message.tool_calls]
            # Two calls under one id have two answers.
            return {each for each, call_id in refusals.items() if ids.count(call_id) == 1}
        if isinstance(message, ToolMessage):
            if message.tool_call_id in answered and message.status == "error" and message.id:
                refusals[message.id] = message.tool_call_id
            answered.add(message.tool_call_id)
    return set()
