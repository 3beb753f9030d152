"""Which agent, on which thread, a hook is called for."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from langgraph.config import get_config


@dataclass(frozen=True, slots=True)
class Origin:
    """The agent and thread of a hook's call.

    Attributes:
        agent: The agent's name, if it has one.
        thread_id: The thread's id as the caller gave it; `None` without one, and inside another
            agent's tool unless the agent is known to have a name of its own: without one it
            carries its parent's name and thread.
        task_id: The running task's id: the same when LangGraph runs the task again.
        run_thread_id: The thread that the run belongs to, whichever agent in it this is.
        checkpoint_ns: Where in the run's graphs the hook is.
        remembers: Whether the state outlives the run: the agent has a checkpointer, and is no
            sub-agent whose state begins anew at each call.
        invocation: Where a checkpointer keeps what one call of a sub-agent does; empty where none
            does, and where one place is that of all its calls.
    """

    agent: str | None = None
    thread_id: object = None
    task_id: str | None = None
    run_thread_id: object = None
    checkpoint_ns: str = ""
    remembers: bool = True
    invocation: str = ""

    def task(self, judge: str) -> str | None:
        """Names this task of those that a middleware has to do in a task of the graph."""
        return None if self.task_id is None else f"{self.task_id}/{judge}"

    def step(self, middleware: str) -> str:
        """Names what a middleware does in this task, and in no other; the same when it runs again.

        Outside of a graph every call is a step of its own.
        """
        if self.task_id is None:
            return uuid4().hex
        return _digest(str(self.run_thread_id), self.checkpoint_ns, self.task_id, middleware)

    def run(self) -> str:
        """Names the run that begins in this task; the same when it begins again after a crash.

        LangGraph runs the task again from its checkpoint, under the same id. Of a call of a
        sub-agent that checkpoint may be lost: then it is made again where the first one was.
        """
        if self.invocation:
            return _digest(str(self.run_thread_id), self.invocation)
        return self.step("run")


def origin(runtime: Any, *, model_name: str | None) -> Origin:
    """Read the origin from what LangGraph gives a running hook; outside of a graph, nothing.

    Args:
        runtime: The hook's runtime; may be `None` where a hook is called directly.
        model_name: The name on the newest AIMessage that this agent's model made in this run, if
            any: LangChain stamps a named agent's messages, and only that tells a named agent
            inside a tool from one that merely carries its parent's name.
    """
    config = _running_config()
    agent = _agent(config)
    info = getattr(runtime, "execution_info", None)
    if info is None:
        return Origin(agent)
    enclosing = info.checkpoint_ns.split("|")[:-1]
    in_a_tool = any(each.startswith("tools:") for each in enclosing)
    unnamed_inside = in_a_tool and (agent is None or model_name != agent)
    checkpointer = (config.get("configurable") or {}).get("__pregel_checkpointer")
    # A namespace with a task id in it is that of one invocation.
    is_one_call = any(":" in each for each in enclosing)
    return Origin(
        agent,
        None if unnamed_inside else info.thread_id,
        info.task_id,
        info.thread_id,
        info.checkpoint_ns,
        remembers=checkpointer is not None and not is_one_call,
        invocation="|".join(enclosing) if checkpointer is not None and is_one_call else "",
    )


def running_agent() -> str | None:
    """The name of the agent that runs, if it has one."""
    return _agent(_running_config())


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()


def _agent(config: Mapping[str, Any]) -> str | None:
    name: str | None = (config.get("metadata") or {}).get("lc_agent_name")
    return name


def _running_config() -> Mapping[str, Any]:
    try:
        return get_config()
    except RuntimeError:
        return {}
