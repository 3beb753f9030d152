"""Calls that no limiter judges, in root runs in which a limiter judges others.

The handler of the root run sees each model and tool that starts. A limiter notes there which agent
it judges, and which tool calls that agent's model has made. No limiter judges the other calls.
"""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from langchain_quota.decision import Kind
from langchain_quota.locks import fork_safe_lock
from langchain_quota.middleware._context import (
    HOOKS,
    graph_of,
    node_of,
    running_agent,
    running_config,
)
from langchain_quota.middleware._history import pending_calls
from langchain_quota.middleware._root_run import RootRun, root_run, watch_root_runs
from langchain_quota.model_runs import DECISION
from langchain_quota.telemetry.unjudged import UnjudgedCalls

MOST_WAITING = 1000
"""How many calls are kept before the first limiter of a root run has run."""

MOST_CALLS = 10_000
"""How many calls of a root run are looked at: something is kept of each until the run ends."""

_MODEL = "model"
"""The node in which `create_agent` calls the model."""

_REACT_MODEL = "agent"
"""The node in which `create_react_agent` calls the model."""

_REACT_HOOKS = ("pre_model_hook", "post_model_hook")

_Metadata = Mapping[str, Any] | None


class _Call(NamedTuple):
    """A call that starts, and where.

    Attributes:
        kind: `"model"` or `"tool"`.
        tool: The tool's name.
        call_id: The id of the tool call; `None` for a tool that is called directly.
        agent: The name of the agent, if it has one.
        task: The namespace of the task in which it starts; empty outside of a graph.
    """

    kind: Kind
    tool: str | None
    call_id: str | None
    agent: str | None
    task: str

    @property
    def graph(self) -> str:
        """The namespace of the graph that the task belongs to."""
        return graph_of(self.task)

    @property
    def node(self) -> str:
        """The node that the task runs."""
        return node_of(self.task)

    @property
    def nodes(self) -> str:
        """The nodes in which it starts, from the outermost in."""
        return " > ".join(each.partition(":")[0] for each in self.task.split("|"))


def _judged_models(hook: str, agent: str | None) -> tuple[str | None, str | None]:
    """The node and the agent whose model calls a limiter judges; `None` for all of the graph.

    Args:
        hook: The node in which the limiter runs.
        agent: The agent that LangChain names there.
    """
    owner, _, name = hook.rpartition(".")
    if hook == _MODEL or (owner and name in HOOKS):
        # A loop that is written by hand may be one of several in its graph.
        prefix = owner.removesuffix("quota") if f".{owner}".endswith(".quota") else ""
        return f"{prefix}{_MODEL}", agent
    # In a graph without middlewares the node of the model has no name of an agent.
    return (_REACT_MODEL if hook in _REACT_HOOKS else None), None


_first = fork_safe_lock()
"""Lets only one thread make the `_Calls` of a root run."""


class _Calls:
    """The calls of a root run.

    Threads that run tools in parallel change it, each by single operations.

    Args:
        resumes: Whether the root run resumes one that was interrupted or that failed.
    """

    def __init__(self, *, resumes: bool) -> None:
        self._resumes = resumes
        self._started = 0
        self._counter: UnjudgedCalls | None = None
        self._waiting: deque[_Call] = deque()
        # By graph: the nodes and agents whose model calls are judged.
        self._agents: dict[str, set[tuple[str | None, str | None]]] = {}
        # By graph: the ids of its judged tool calls. Agents with a thread of their own share one.
        self._judged: dict[str, set[str | None]] = {}
        # By graph: the newest task of each node in which a model was called.
        self._models: dict[str, dict[str, str]] = {}
        # The tasks in which tools were called: their models are called directly.
        self._tools: set[str] = set()
        # By graph: a call whose agent may yet turn out to have a limiter.
        self._held: dict[str, _Call] = {}

    def judge(
        self,
        task: str,
        agent: str | None,
        counter: UnjudgedCalls | None,
        ids: frozenset[str | None] | None,
    ) -> None:
        """Note that an agent has a limiter, and which tool calls it has seen, if any."""
        if self._started >= MOST_CALLS:
            return
        graph = graph_of(task)
        self._agents.setdefault(graph, set()).add(_judged_models(node_of(task), agent))
        if ids is not None:
            self._judged.setdefault(graph, set()).update(ids)
        self._held.pop(graph, None)
        if counter is None:
            return
        with _first:
            is_first = self._counter is None
            self._counter = self._counter or counter
        while is_first and self._waiting:
            self._find(self._waiting.popleft(), counter)

    def start(self, call: _Call) -> None:
        """Count a call that no limiter judges, if a limiter of the root run counts such calls."""
        if self._started >= MOST_CALLS:
            return
        self._started += 1
        if self._counter is not None:
            self._find(call, self._counter)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(call)

    def _find(self, call: _Call, counter: UnjudgedCalls) -> None:
        if not self._is_judged(call):
            for each in (self._held.pop(call.graph, None), call):
                if each is not None:
                    counter.record(each.agent, each.kind, each.tool, each.nodes)

    def _is_judged(self, call: _Call) -> bool:
        """Whether a limiter judges a call, or may judge it, as far as is known."""
        models = self._models.setdefault(call.graph, {})
        if call.kind == "tool":
            return self._is_judged_tool(call, models)
        is_first = not models
        models[call.node] = call.task
        # Before 1.2, LangGraph does not give the hooks of a node that is an agent its name.
        found = {(node, agent) for node in (call.node, None) for agent in (call.agent, None)}
        if not found.isdisjoint(self._agents.get(call.graph, ())):
            return call.task not in self._tools
        if call.node != _MODEL:
            return False
        if self._resumes and is_first:
            # An agent that resumes its run may call only `after_model` from now on.
            self._held[call.graph] = call
            return True
        return False

    def _is_judged_tool(self, call: _Call, models: Mapping[str, str]) -> bool:
        self._tools.add(call.task)
        if call.call_id in self._judged.get(call.graph, ()):
            return True
        if call.call_id is None:
            return False
        # Otherwise its message came from another node, or from this very task, or it is older than
        # the root run. An older one counts as judged, since nothing else is known. After a resume
        # the other node may belong to a limited agent with a thread of its own.
        is_unclear = self._resumes and call.graph in self._agents
        elsewhere = any(node != call.node for node in [*models]) and not is_unclear
        here = models.get(call.node) == call.task and not self._resumes
        return not (elsewhere or here)


class CountingRootRun(RootRun):
    """A root run that sees each model and tool that starts."""

    # It sees every chain: for callbacks a decision model is one.
    ignore_chain = ignore_llm = ignore_chat_model = ignore_agent = False

    @property
    def calls(self) -> _Calls:
        """Its calls; made when the first one starts."""
        known: _Calls | None = vars(self).get("_calls")
        if known is None:
            # Two threads may come here at the same time.
            known = vars(self).setdefault("_calls", _Calls(resumes=self.resumes))
        return known

    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,
        inputs: object,
        *,
        run_type: object = None,
        metadata: _Metadata = None,
        **more: object,
    ) -> None:
        """Learn how the root run begins, and see a call of a decision model."""
        if not self.key:
            super().on_chain_start(serialized, inputs, metadata=metadata, **more)
        if run_type == DECISION:
            self._start("model", None, None, metadata)

    def on_chat_model_start(
        self,
        serialized: object,  # noqa: ARG002 - LangChain gives it by position
        messages: object,  # noqa: ARG002 - the same
        *,
        metadata: _Metadata = None,
        **_: object,
    ) -> None:
        """See a model call."""
        self._start("model", None, None, metadata)

    def on_llm_start(
        self,
        serialized: object,  # noqa: ARG002 - LangChain gives it by position
        prompts: object,  # noqa: ARG002 - the same
        *,
        metadata: _Metadata = None,
        **_: object,
    ) -> None:
        """See a model call."""
        self._start("model", None, None, metadata)

    def on_tool_start(
        self,
        serialized: Mapping[str, Any] | None,
        input_str: str,  # noqa: ARG002 - LangChain gives it by position
        *,
        metadata: _Metadata = None,
        tool_call_id: str | None = None,
        name: str | None = None,
        **_: object,
    ) -> None:
        """See a tool call."""
        tool = name or (serialized or {}).get("name") or ""
        self._start("tool", tool, tool_call_id, metadata)

    def _start(self, kind: Kind, tool: str | None, call_id: str | None, given: _Metadata) -> None:
        metadata = given or {}
        task = metadata.get("langgraph_checkpoint_ns") or ""
        self.calls.start(_Call(kind, tool, call_id, metadata.get("lc_agent_name"), task))


_counting = threading.Event()


def count_unjudged_calls() -> None:
    """Look for such calls in every root run that begins from now on."""
    if not _counting.is_set():
        _counting.set()
        watch_root_runs(CountingRootRun)


def mark_judged(counter: UnjudgedCalls | None, state: Mapping[str, Any] | None = None) -> None:
    """Note that a limiter judges the calls of the running agent.

    Args:
        counter: Where the limiter counts unjudged calls, if it does.
        state: The agent's state, if the model has just made the calls of its newest message.
    """
    if not _counting.is_set():
        return
    run = root_run()
    if not isinstance(run, CountingRootRun):
        return
    ids = None
    if state is not None:
        pending = pending_calls(state)
        calls = pending.message.tool_calls if pending else ()
        ids = frozenset(each["id"] for each in calls)
    task = running_config().get("configurable", {}).get("checkpoint_ns") or ""
    run.calls.judge(task, running_agent(), counter, ids)
