"""The caller of a hook: its agent, thread, run and task."""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config
from langgraph.pregel import Pregel
from langgraph.runtime import Runtime, get_runtime

from langchain_quota.runtime import compat

CompiledGraph = Pregel[Any, Any, Any, Any]

NodeRuntime = Runtime[Any]
"""LangGraph's runtime of a node, whatever the context of its graph."""


class CallContext(NamedTuple):
    """The agent and thread of a hook's call; inside a tool, they may be those of its caller."""

    # Who telemetry says makes the call.
    agent: str | None = None
    # Of the running task: its id, and the namespace that tells which graphs it is in.
    task_id: str | None = None
    # The thread in which the run's state is saved, even if another agent's run is saved there.
    run_thread_id: object = None
    checkpoint_ns: str = ""
    # Whether a checkpointer keeps the state for the thread's next run.
    remembers: bool = True
    # Names a sub-agent's run that no checkpoint outlives, by the tasks around it.
    invocation: str = ""
    # The thread of the call; `None` in a tool, where it could be the caller's.
    thread_id: object = None
    # The agent's name, if it is known to be its own, and not its caller's.
    own_name: str | None = None

    @property
    def is_nested(self) -> bool:
        """Whether the agent is a node of another graph or runs inside one."""
        return bool(compat.enclosing_tasks(self.checkpoint_ns))

    @property
    def graph(self) -> list[str]:
        """Name of the running graph; the same if its node is entered again, but not in tools."""
        tasks = compat.enclosing_tasks(self.checkpoint_ns)
        return [task if compat.runs_tools(task) else compat.node_of(task) for task in tasks]

    def answered_by(self, model_name: str | None) -> "CallContext":
        """Return the context of an agent whose model's answers have this name."""
        if self.own_name == self.agent or model_name is None or model_name != self.agent:
            return self
        return self._replace(thread_id=self.run_thread_id, own_name=self.agent)

    def task(self, work: str) -> str | None:
        """Return the name of some work inside a task of the graph."""
        return None if self.task_id is None else f"{self.task_id}/{work}"

    def step(self, work: str) -> str:
        """Return a unique name of some work in this task; the same in a re-run."""
        # Outside of a graph every call is a step of its own.
        if self.task_id is None:
            return uuid4().hex
        return digest(str(self.run_thread_id), self.checkpoint_ns, self.task_id, work)

    def run(self) -> str:
        """Return the name of the run that begins in this task; the same in a re-run."""
        # LangGraph runs the task again from its checkpoint, with the same id. The checkpoint of a
        # sub-agent's call may be lost: then the call is made again in the place of the first one.
        if self.invocation:
            return digest(str(self.run_thread_id), self.invocation)
        return self.step("run")


def call_context(runtime: object) -> CallContext:
    """Return the context of a running hook; outside of a graph, an empty one."""
    config = running_config()
    agent = compat.agent_name(config.get("metadata"))
    info = getattr(runtime, "execution_info", None)
    if info is None:
        return CallContext(agent, own_name=agent)
    enclosing = compat.enclosing_tasks(info.checkpoint_ns)
    in_a_tool = any(map(compat.runs_tools, enclosing))
    is_saved = compat.checkpointer(config.get("configurable")) is not None
    # A task that belongs to one invocation has more than its node's name.
    is_one_call = [*map(compat.node_of, enclosing)] != enclosing
    return CallContext(
        agent,
        # A task that runs again, after a failure or an interrupt, has the same id.
        info.task_id,
        info.thread_id,
        info.checkpoint_ns,
        remembers=is_saved and not is_one_call,
        invocation="|".join(enclosing) if is_saved and is_one_call else "",
        thread_id=None if in_a_tool else info.thread_id,
        own_name=None if in_a_tool else agent,
    )


def running_agent() -> str | None:
    """Return the name of the running agent, if it has one."""
    return compat.agent_name(running_config().get("metadata"))


def digest(*parts: str) -> str:
    """Return a digest of the parts."""
    return sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()


def as_json(decisions: Mapping[Any, object]) -> str:
    """Return decisions as text: the same after a store of messages has sorted the keys of JSON."""
    return json.dumps([*decisions.items()], sort_keys=True, default=repr)


def running_runtime(work: str = "") -> NodeRuntime | None:
    """Return the runtime of the running node, as if `work` in it were a task of its own.

    `None` outside of a graph.
    """
    try:
        runtime: NodeRuntime = get_runtime()
    except (RuntimeError, KeyError):
        return None
    info = runtime.execution_info
    if not work or info is None:
        return runtime
    return runtime.override(execution_info=replace(info, task_id=f"{info.task_id}/{work}"))


def running_config() -> RunnableConfig:
    """Return the config of the running node; empty outside of a graph."""
    try:
        return get_config()
    except RuntimeError:
        return RunnableConfig()
