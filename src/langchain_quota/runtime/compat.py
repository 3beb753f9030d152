"""The private ground of other packages that this package relies on.

Each function names the package and what it relies on. `tests/rule/test_compat.py` has or names a
test of each function, which fails with a version in which that has changed. The functions
import packages when they are called, so that the command line starts fast.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from functools import partial
from threading import Event
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID, uuid5

if TYPE_CHECKING:
    from langchain.agents.middleware.types import ModelRequest
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, ToolCall
    from langchain_core.tools import BaseTool
    from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
    from langgraph.errors import GraphInterrupt
    from langgraph.pregel import Pregel

Metric = TypeVar("Metric")
Metadata = Mapping[str, Any] | None
_Hook = Callable[..., Awaitable[Any]]

AGENT_NAME = "lc_agent_name"
"""The key of an agent's name in the metadata of its config; see `agent_name`."""

# LangChain


def agent_name(metadata: Metadata) -> str | None:
    """Return the name of the agent that runs, from the metadata of its config.

    LangChain: `create_agent(name=…)` adds the name to the metadata under `lc_agent_name`.
    """
    return (metadata or {}).get(AGENT_NAME)


def is_from_create_agent(graph: "Pregel[Any, Any, Any, Any]") -> bool:
    """Return whether `create_agent` has made a graph.

    LangChain: `create_agent` adds `ls_integration` to the metadata of its graph.
    """
    return "ls_integration" in ((graph.config or {}).get("metadata") or {})


def is_from_factory(frame: FrameType | None) -> bool:
    """Return whether LangChain's `create_agent`, which is in this module, calls a function."""
    caller = frame and frame.f_back
    return caller is not None and caller.f_globals["__name__"] == "langchain.agents.factory"


def hide_raised(handler: str) -> None:
    """Keep LangChain's manager of callbacks from logging what handlers of this class raise."""
    log = logging.getLogger("langchain_core.callbacks.manager")
    log.addFilter(lambda record: handler not in tuple(record.args or ())[:1])


def with_state(request: "ModelRequest[Any]", state: object) -> "ModelRequest[Any]":
    """Return the request with another state.

    LangChain: a `ModelRequest` is a dataclass without slots. Its method `override` is slower, and
    switches warnings off for all threads while it works; an assignment to the attribute warns.
    """
    copied = copy(request)
    vars(copied)["state"] = state
    return copied


def untraced(middleware: object, hook: str) -> _Hook:
    """Return a stand-in for an async hook that is not itself a coroutine function.

    LangChain: a hook that is no coroutine function gets no wrapper for tracing, which costs two
    trips through threads for each call. LangSmith computes the signature of a hook at each call if
    it has none.
    """
    stand_in: Any = partial(_call_hook, middleware, hook)
    stand_in.__signature__ = inspect.signature(stand_in)
    return cast("_Hook", stand_in)


def _call_hook(middleware: object, hook: str, request: object, handler: object) -> object:
    return getattr(type(middleware), hook)(middleware, request, handler)


TRACED = Event()
"""It is set once a run of this process is traced."""


def note_tracers(callbacks: Any) -> None:
    """Note that runs are traced, if these callbacks have a tracer.

    LangChain: a callback manager has `handlers`. Tracers, LangSmith's among them, are `BaseTracer`.
    """
    from langchain_core.tracers.base import BaseTracer

    if any(isinstance(handler, BaseTracer) for handler in getattr(callbacks, "handlers", ())):
        TRACED.set()


def small_traces() -> Any:
    """Return the `trace_policy` by which hooks' inputs are left out of traces, or `None`.

    What the user gives to `configure_trace_policy` applies instead. Where nothing is traced, the
    policy returns each payload itself, which costs nothing.

    LangChain: older versions have no `trace_policy`. A middleware's overrides the user's, which is
    `_trace_policy._DEFAULT_TRACE_POLICY`.
    """
    try:
        from langchain.agents.middleware import _trace_policy
        from langgraph.types import TracePolicy
    except ImportError:
        return None

    def process(field: str, payload: Any) -> Any:
        policy = _trace_policy._DEFAULT_TRACE_POLICY
        if policy is None:
            return {} if field == "process_inputs" and TRACED.is_set() else payload
        change = getattr(policy, field)
        return payload if change is None else change(payload)

    fields = ("process_inputs", "process_outputs")
    return TracePolicy(**{field: partial(process, field) for field in fields})


_RUN_METHODS = ("invoke", "ainvoke", "run", "arun", "_arun")


def runs_in_thread(tool: object, mode: str = "a") -> bool:
    """Return whether LangChain runs a tool in a thread: in async mode, or if a sync run did so.

    LangChain: a tool runs in a thread unless it has a coroutine, or overrides one of the methods
    of `BaseTool` by which tools run.
    """
    methods = (getattr(type(tool), name, None) for name in _RUN_METHODS)
    has_coroutine = mode and getattr(tool, "coroutine", None)
    return not has_coroutine and all(
        str(getattr(method, "__module__", None)).startswith("langchain_core.") for method in methods
    )


def with_run(
    tool: "BaseTool", wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> "BaseTool":
    """Return a copy of a tool that runs a wrapped method; `wrap` keeps the method's signature.

    LangChain: all sync methods by which a tool runs call its attribute `_run`.
    """
    copied = copy(tool)
    vars(copied)["_run"] = wrap(tool._run)
    return copied


def asks_before_run(question: "GraphInterrupt", call: "ToolCall") -> bool:
    """Return whether an interrupt asks a person about a tool call before its tool runs.

    LangChain: with `interrupt_mode="per_call"`, `HumanInTheLoopMiddleware` asks around the tool.
    """
    names = {"type": "tool_approval", "tool_call_id": call["id"], "name": call["name"]}
    asked = [each.value for each in question.args[0]]
    return any(isinstance(one, dict) and names.items() <= one.items() for one in asked)


def model_parameters(model: "BaseChatModel", settings: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the provider and the name of the model that a call with these settings reaches.

    LangChain: `_get_ls_params`, by which callbacks and LangChain's own middlewares learn these.
    """
    return cast("Mapping[str, object]", model._get_ls_params(**settings))


def response_hooks(model: "BaseChatModel", mode: str) -> list[Callable[..., Any]] | None:
    """Return the functions that a chat model's HTTP client calls with each response.

    The list is that of the client, so a function can be added; `None` if no such client is known.

    langchain-openai: the SDK's clients are `root_client` and `root_async_client`.
    langchain-anthropic: they are `_client` and `_async_client`. Both SDKs: a client has an HTTP
    client as `_client`, whose `event_hooks` has lists.
    """
    for attribute in ("root_async_client", "_async_client") if mode else ("root_client", "_client"):
        client = getattr(getattr(model, attribute, None), "_client", None)
        hooks = getattr(client, "event_hooks", None)
        if isinstance(hooks, dict):
            return cast("list[Callable[..., Any]]", hooks["response"])
    return None


# LangGraph


def checkpointer(configurable: Metadata) -> "BaseCheckpointSaver[Any] | None":
    """Return the checkpointer of the running graph, or of one around it; `None` without one.

    LangGraph: the checkpointer is in `configurable` under `__pregel_checkpointer`.
    """
    return (configurable or {}).get("__pregel_checkpointer")


def is_resumed_step(configurable: Metadata) -> bool:
    """Return whether a task runs in the first step of a run that continues from a checkpoint.

    LangGraph: `configurable` has `__pregel_resuming` in that step, and only there.
    """
    return bool((configurable or {}).get("__pregel_resuming"))


def checkpoint_ids(configurable: Metadata) -> Mapping[str, str]:
    """Return the ids of the checkpoints at which the running graphs stand, by their namespaces.

    LangGraph: they are in `configurable` under `checkpoint_map`.
    """
    return (configurable or {}).get("checkpoint_map") or {}


def finished_tasks(checkpoint: "CheckpointTuple") -> set[str]:
    """Return the ids of the tasks of the step at a checkpoint that have finished.

    LangGraph: a task that has not finished writes to the channels of `WRITES_IDX_MAP` alone.
    `update_state` writes as a task, too, whose id it makes from the checkpoint's.
    """
    from langgraph.checkpoint.base import WRITES_IDX_MAP

    writes, checkpoint_id = checkpoint.pending_writes or (), UUID(checkpoint.checkpoint["id"])
    names = ["__input__", "__interrupt__", *(f"__interrupt__:{n}" for n in range(len(writes)))]
    updates = {str(uuid5(checkpoint_id, name)) for name in names}
    return {task for task, channel, _ in writes if channel not in WRITES_IDX_MAP} - updates


def task_namespace(metadata: Metadata) -> str:
    """Return the checkpoint namespace of the task that starts a run, from the run's metadata.

    LangGraph: the metadata have it under `langgraph_checkpoint_ns`.
    """
    return (metadata or {}).get("langgraph_checkpoint_ns") or ""


def is_in_node(metadata: Metadata) -> bool:
    """Return whether a run begins inside a node of a graph.

    LangGraph: the metadata of such a run name the node under `langgraph_node`.
    """
    return "langgraph_node" in (metadata or {})


def enclosing_tasks(checkpoint_ns: str) -> list[str]:
    """Return the tasks around a task, the outermost first.

    LangGraph: a checkpoint namespace is a path of tasks, joined by `|`; the last one is the task.
    """
    return checkpoint_ns.split("|")[:-1]


def node_of(task: str) -> str:
    """Return the node's name of a part of a checkpoint namespace.

    LangGraph: a part is the node's name, with `:` and the task's id if each call has its own state.
    """
    return task.partition(":")[0]


def runs_tools(task: str) -> bool:
    """Return whether a part of a checkpoint namespace is a node that runs tools.

    LangChain: `create_agent` names this node `tools`; agents within a graph have `….tools`.
    """
    node = node_of(task)
    return node != task and f".{node}".endswith(".tools")


def nodes(configurable: Metadata) -> Mapping[str, object]:
    """Return what the nodes of the running graph run, by their names and in their order.

    LangGraph: `configurable` has a partial function under `__pregel_call`, and its argument
    `schedule_task` is a method of the loop, which has the nodes. A node runs its `bound`.
    """
    options = getattr((configurable or {}).get("__pregel_call"), "keywords", {})
    loop = getattr(options.get("schedule_task"), "__self__", None)
    return {name: node.bound for name, node in getattr(loop, "nodes", {}).items()}


def ask(question: object, answer_schema: dict[str, Any]) -> Any:
    """Interrupt the running task with a question; return the answer when the task is resumed.

    LangGraph: in newer versions, `interrupt` takes a `response_schema`, which may be a dict. Then
    it checks no answer.
    """
    from langgraph.types import interrupt

    if "response_schema" in inspect.signature(interrupt).parameters:
        return interrupt(question, response_schema=answer_schema)
    return interrupt(question)


def is_answered() -> bool:
    """Return whether the next question of the running task has an answer, and take the answer.

    LangGraph: `interrupt` gives the answers of a task in their order, and raises without one.
    """
    from langgraph.errors import GraphInterrupt
    from langgraph.types import interrupt

    try:
        interrupt(None)
    except GraphInterrupt:
        return False
    return True


def for_parent(error: Exception, answer: "AIMessage", *, in_tool: bool) -> Exception:
    """Return what a nested agent raises in place of an error, so that its parent gets an answer.

    LangGraph: by default a `ToolNode` answers with the `message` of a `ToolInvocationError`, and
    raises other errors. In another node, a `ParentCommand` writes its update as the node's result.
    """
    from langgraph.errors import ParentCommand
    from langgraph.prebuilt.tool_node import ToolInvocationError
    from langgraph.types import Command

    if not in_tool:
        return ParentCommand(Command(graph=Command.PARENT, update={"messages": [answer]}))
    kind = type(type(error).__name__, (type(error), ToolInvocationError), {})
    answered = kind.__new__(kind, *error.args)
    vars(answered).update(vars(error), message=str(error))
    return cast("Exception", answered)


# deepagents and langchain-quickjs


def starts_sub_agents(function: object) -> bool:
    """Return whether a tool's function starts the sub-agents of a deep agent.

    deepagents: the function of its tool `task` is defined in its module of sub-agents.
    """
    module = "deepagents.middleware.subagents"
    return isinstance(function, FunctionType) and function.__module__ == module


def sub_agents_of(function: FunctionType) -> Mapping[str, object]:
    """Return the sub-agents by name that a function of `starts_sub_agents` starts.

    deepagents: the function is a closure over `subagent_graphs`.
    """
    agents = inspect.getclosurevars(function).nonlocals.get("subagent_graphs")
    return agents if isinstance(agents, Mapping) else {}


def interpreter_settings(function: object) -> tuple[list[str], bool] | None:
    """Return the tools that an interpreter's code calls, and whether it can start sub-agents.

    Return `([], False)` if the function is not that of an interpreter, and `None` if it is one of
    another version, whose settings are unknown.

    langchain-quickjs: the function of its tool, in the package `langchain_quickjs`, is a closure
    over its middleware, which has the tools as `_ptc`, and `_subagents`.
    """
    # What `exec` has made may have no module.
    module = str(getattr(function, "__module__", None))
    if not (inspect.isfunction(function) and module.startswith("langchain_quickjs.")):
        return [], False
    settings = vars(inspect.getclosurevars(function).nonlocals.get("middleware", object))
    if not {"_ptc", "_subagents"} <= settings.keys():
        return None
    tools = [getattr(tool, "name", tool) for tool in settings["_ptc"] or ()]
    return tools, bool(settings["_subagents"])


# prometheus_client


def without_created(metric: type[Metric]) -> type[Metric]:
    """Return a type of metric that has no series of times of creation, which double the series.

    prometheus_client: `_child_samples` gives the samples; those of creation are named `_created`.
    """
    base: Any = metric

    def samples(self: object) -> list[Any]:
        return [sample for sample in base._child_samples(self) if sample.name != "_created"]

    kind = type(metric.__name__, (metric,), {"_child_samples": samples})
    return cast("type[Metric]", kind)


def is_multiprocess() -> bool:
    """Return whether prometheus_client keeps its values in files that processes share.

    prometheus_client: it decides this when it is imported, as `values.ValueClass._multiprocess`.
    """
    from prometheus_client import values

    return bool(values.ValueClass._multiprocess)


# Python


def reset_lock(lock: Any) -> None:
    """Free a lock in a forked child.

    Python: `_at_fork_reinit`, by which the standard library resets its locks. A release would not
    repair a lock that a thread was just waiting for.
    """
    lock._at_fork_reinit()
