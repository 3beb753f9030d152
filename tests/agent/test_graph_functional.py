"""GraphQuota in the functional API: its methods in tasks of an entrypoint."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolCall, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

from langchain_quota import (
    GraphQuota,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import CONFIG, recording
from tests.signals import Signals

TOOLS = [recording("search", [])]


class Functional:
    """An agent as an entrypoint, in both forms, and what it did.

    Args:
        signals: The telemetry.
        script: What the model plays.
        limits: The limits.
        **options: Further arguments of `GraphQuota`.
    """

    def __init__(
        self, signals: Signals, script: Any, limits: Sequence[Limit], **options: Any
    ) -> None:
        self.ran: list[str] = []
        self.model = ScriptedChatModel(script=script)
        self.quota = GraphQuota(limits, telemetry=signals.telemetry, **options)

    def tool(self, call: ToolCall) -> ToolMessage:
        if call["name"] == "ask":
            interrupt("Sure?")
        self.ran.append(call["name"])
        return ToolMessage(f"{call['name']} ran", tool_call_id=call["id"], name=call["name"])

    def sync(self) -> Any:
        quota = self.quota
        begin, before, after = task(quota.begin), task(quota.before_model), task(quota.after_model)
        call, run = task(quota.call_model), task(self.tool)

        @entrypoint(checkpointer=InMemorySaver())
        def agent(new: Any, *, previous: Any = None) -> Any:
            earlier = previous or {"messages": []}
            said: Any = add_messages(earlier["messages"], new)
            state = begin({**earlier, "messages": said}).result()
            while state["jump_to"] != "end":
                state = before(state).result()
                if state["jump_to"] == "end":
                    break
                said = call(self.model, state, TOOLS).result()
                state = after({**state, "messages": [*state["messages"], said]}).result()
                running = [run(each) for each in quota.open_calls(state)]
                answers = [each.result() for each in running]
                state = {**state, "messages": [*state["messages"], *answers]}
            return entrypoint.final(value=state["messages"], save=state)

        return agent

    def as_async(self) -> Any:
        quota = self.quota
        begin, before = task(quota.abegin), task(quota.abefore_model)
        after, call = task(quota.aafter_model), task(quota.acall_model)

        @task
        async def run(each: ToolCall) -> ToolMessage:
            return self.tool(each)

        @entrypoint(checkpointer=InMemorySaver())
        async def agent(new: Any, *, previous: Any = None) -> Any:
            earlier = previous or {"messages": []}
            said: Any = add_messages(earlier["messages"], new)
            state = await begin({**earlier, "messages": said})
            while state["jump_to"] != "end":
                state = await before(state)
                if state["jump_to"] == "end":
                    break
                said = await call(self.model, state, TOOLS)
                state = await after({**state, "messages": [*state["messages"], said]})
                answers = await asyncio.gather(*map(run, quota.open_calls(state)))
                state = {**state, "messages": [*state["messages"], *answers]}
            return entrypoint.final(value=state["messages"], save=state)

        return agent

    async def run(self, form: str, *given: Any) -> list[Any]:
        agent = self.sync() if form == "sync" else self.as_async()
        results = []
        for each in given:
            if form == "sync":
                results.append(await asyncio.to_thread(agent.invoke, each, CONFIG))
            else:
                results.append(await agent.ainvoke(each, CONFIG))
        return results


def said(text: str) -> list[AnyMessage]:
    return [HumanMessage(text)]


async def test_a_loop_that_runs_what_was_refused(signals: Signals) -> None:
    """A loop that does not ask for the open calls, but runs all, is an error at its next step."""
    quota = GraphQuota([ToolCallLimit("search", run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["search", "search"], "done"])
    before, after = task(quota.abefore_model), task(quota.aafter_model)

    @entrypoint()
    async def agent(new: Any) -> Any:
        state = await before(await quota.abegin({"messages": new}))
        answer = await model.ainvoke(state["messages"])
        state = await after({**state, "messages": [*state["messages"], answer]})
        ran = [
            ToolMessage("ran", tool_call_id=each["id"], name=each["name"])
            for each in answer.tool_calls
        ]
        return await before({**state, "messages": [*state["messages"], *ran]})

    with pytest.raises(RuntimeError, match="the tool 'search' ran"):
        await agent.ainvoke(said("go"))


def test_outside_of_a_graph(signals: Signals) -> None:
    """The methods work in a plain loop, too: the state is all that they need."""
    quota = GraphQuota([ToolCallLimit("search", run_limit=1)], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=[["search", "search"], "done"])
    given = {"messages": said("go"), "own": 3}
    state = quota.before_model(quota.begin(given))
    answer = quota.call_model(model, state, TOOLS)
    state = quota.after_model({**state, "messages": [*state["messages"], answer]})
    assert (state["jump_to"], state["own"]) == ("tools", 3)
    assert len(quota.open_calls(state)) == 1
    assert given.keys() == {"messages", "own"}
