"""Limits for graphs that take hooks and no middleware: `create_react_agent`, a supervisor."""

from typing import Annotated, Any, NotRequired, cast

from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.constants import END
from langgraph.managed import RemainingSteps
from langgraph.types import Command

from langchain_quota.features.graph.charges import joined
from langchain_quota.features.graph.loop import Loop, State, Tools, merged
from langchain_quota.middleware._calls import Update
from langchain_quota.middleware._context import running_config, running_runtime, runs_tools
from langchain_quota.middleware._form import Form, forms, now
from langchain_quota.state import LEDGER, Ledger, QuotaState, ledger, merge_ledgers

_MANAGED = ("remaining_steps", "is_last_step")
"""What LangGraph itself writes to a state."""


def merge_given_ledgers(old: Ledger, new: Ledger) -> Ledger:
    """The reducer: as `merge_ledgers`, but an empty ledger from a graph around leaves a mark."""
    return merge_ledgers(old, new) or Ledger(in_graph=True)


class ReactState(QuotaState[Any]):
    """The state that `create_react_agent` asks for, with the counts."""

    remaining_steps: NotRequired[RemainingSteps]
    langchain_quota: NotRequired[Annotated[Ledger, PrivateStateAttr, merge_given_ledgers]]


class ReactHooks:
    """The two hooks, and a model that is not called when a run has ended."""

    # `create_react_agent` always goes from the first hook to its model. If the agent is a node of
    # another graph, such as a supervisor's, the hook can lead that graph to its end. Without such a
    # graph, only the model itself can end the run.

    def __init__(self, loop: Loop, *, has_model: bool) -> None:
        self._loop = loop
        self._has_model = has_model

    async def _before(self, form: Form, state: State) -> Update | Command[Any]:
        """Judge the model call; begin the run, if it is a new one."""
        state = self._checked(state)
        first = self._loop.begin_once(state)
        update = joined(first, await self._loop.judge_model(form, merged(state, first)))
        return self._left(state, update)

    before, abefore = forms(_before)

    async def _after(self, form: Form, state: State) -> Update:
        """Judge the tool calls: those without an answer run, and without calls the run ends."""
        return _over(state, await self._loop.judge_tools(form, state))

    after, aafter = forms(_after)

    def _left(self, state: State, update: Update) -> Update | Command[Any]:
        """The update; if a limit ends the run, with the command that leaves the outer graph."""
        ends = update["jump_to"] == "end"
        if not ends or self._has_model:
            return _without_jump(update)
        update = _over(state, update)
        # The outer graph does not have yet what this one wrote.
        after = merged(state, update)
        whole = {key: each for key, each in after.items() if key not in _MANAGED}
        return Command(graph=Command.PARENT, goto=END, update=whole)

    def _checked(self, state: State) -> State:
        """The state without a mark, if a run can be ended before its model."""
        if self._has_model and _has_response_format():
            raise RuntimeError(
                "create_react_agent(**quota.react_hooks(model, tools)) cannot have a "
                "response_format: LangGraph would ask the model for it past the limits. Take "
                "create_agent(model, tools, middleware=[QuotaMiddleware(limits)], "
                "response_format=…), or leave response_format out"
            )
        known = ledger(state)
        unmarked = {key: each for key, each in known.items() if key != "in_graph"}
        info = getattr(running_runtime(), "execution_info", None)
        if self._has_model or info is None or not self._loop.ends_before_model:
            return {**state, LEDGER: unmarked}
        around = info.checkpoint_ns.split("|")[:-1]
        if not known or not around or runs_tools(around[-1]):
            raise RuntimeError(
                "create_react_agent calls its model whatever a hook says. The limit could only "
                "end a graph around it that shares its state, as create_supervisor makes one, and "
                "there is none. Give the model to the hooks: "
                "create_react_agent(**quota.react_hooks(model, tools))"
            )
        return {**state, LEDGER: unmarked}


class ReactModel:
    """A model as `create_react_agent` takes one that depends on the state."""

    def __init__(self, loop: Loop, model: BaseChatModel, tools: Tools) -> None:
        self._loop = loop
        self._model = model
        self._tools = tools

    def __call__(self, state: State, _runtime: Any) -> Runnable[list[AnyMessage], AIMessage]:
        """The model for one call: the message itself, if a limit has just ended the run with it."""
        newest = state["messages"][-1]
        ended = ledger(state).get("ended")
        if ended and ended == newest.id:
            return RunnableLambda(lambda _: cast("AIMessage", newest))

        def ask(messages: list[AnyMessage]) -> AIMessage:
            asked = {**state, "messages": messages}
            message, _ = now(self._loop.ask("", self._model, asked, self._tools, None))
            return message

        async def aask(messages: list[AnyMessage]) -> AIMessage:
            asked = {**state, "messages": messages}
            message, _ = await self._loop.ask("a", self._model, asked, self._tools, None)
            return message

        return RunnableLambda(ask, aask)


def _has_response_format() -> bool:
    """Whether the agent that runs has the node that asks the model for a structured response."""
    # Nothing else says so before the model is called.
    read: Any = (running_config().get("configurable") or {}).get("__pregel_read")
    if read is None:
        return False
    try:
        read("branch:to:generate_structured_response")
    except KeyError:
        return False
    return True


def _without_jump(update: Update) -> Update:
    return {key: each for key, each in update.items() if key != "jump_to"}


def _over(state: State, update: Update) -> Update:
    """The update without its jump, and without the mark that the run has ended."""
    # The graph itself ends: what runs after it is not part of this run.
    update = _without_jump(update)
    if merged(state, update)[LEDGER].get("ended"):
        update = joined(update, {LEDGER: Ledger(ended=None)})
    return update
