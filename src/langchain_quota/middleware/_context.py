"""The caller, its agent, thread and run, and the limits that depend on them."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from langgraph.config import get_config
from langgraph.runtime import get_runtime

from langchain_quota.decision import ROOT_RUN, RUN, THREAD
from langchain_quota.limit_options import whole_amount
from langchain_quota.limits import Limit
from langchain_quota.middleware._form import Form
from langchain_quota.middleware._form import now as done
from langchain_quota.repeats import RepeatLimit
from langchain_quota.resolved import Check, ResolvedLimit, stored_as, thread_counter
from langchain_quota.state import ledger
from langchain_quota.stores.keys import CountKey, check_prefix
from langchain_quota.telemetry.recorder import Recorder

_ARGUMENTS = ("thread_limit", "run_limit")

_Values = dict[tuple[str, int], Any]
"""What the functions of a limit gave, by argument and, for quotas, the quota's index."""


class CallContext(NamedTuple):
    """The agent and thread of a hook's call."""

    agent: str | None = None
    thread_id: object = None
    task_id: str | None = None
    run_thread_id: object = None
    checkpoint_ns: str = ""
    remembers: bool = True
    invocation: str = ""
    own_name: str | None = None

    @property
    def is_nested(self) -> bool:
        """Whether the agent is a node of another graph, or runs inside one."""
        return "|" in self.checkpoint_ns

    def task(self, middleware: str) -> str | None:
        """The name of one piece of work inside a task of the graph."""
        return None if self.task_id is None else f"{self.task_id}/{middleware}"

    def step(self, middleware: str) -> str:
        """A unique name for a middleware's work in this task; the same when it runs again."""
        # Outside of a graph every call is a step of its own.
        if self.task_id is None:
            return uuid4().hex
        return _digest(str(self.run_thread_id), self.checkpoint_ns, self.task_id, middleware)

    def run(self) -> str:
        """A name for the run that begins in this task; the same if it begins again."""
        # LangGraph runs the task again from its checkpoint, with the same id. The checkpoint of a
        # sub-agent's call may be lost: then the call is made again in the place of the first one.
        if self.invocation:
            return _digest(str(self.run_thread_id), self.invocation)
        return self.step("run")


def call_context(runtime: Any, *, model_name: str | None) -> CallContext:
    """Read the context from what LangGraph gives a running hook; outside of a graph, nothing."""
    config = running_config()
    agent = _agent(config)
    info = getattr(runtime, "execution_info", None)
    if info is None:
        return CallContext(agent, own_name=agent)
    enclosing = info.checkpoint_ns.split("|")[:-1]
    in_a_tool = any(map(runs_tools, enclosing))
    unnamed_inside = in_a_tool and (agent is None or model_name != agent)
    checkpointer = (config.get("configurable") or {}).get("__pregel_checkpointer")
    # A namespace with a task id in it belongs to one invocation.
    is_one_call = any(":" in each for each in enclosing)
    return CallContext(
        agent,
        None if unnamed_inside else info.thread_id,
        info.task_id,
        info.thread_id,
        info.checkpoint_ns,
        remembers=checkpointer is not None and not is_one_call,
        invocation="|".join(enclosing) if checkpointer is not None and is_one_call else "",
        own_name=None if unnamed_inside else agent,
    )


def runs_tools(namespace: str) -> bool:
    """Whether a part of a checkpoint namespace is a node that runs tools: `tools`, `….tools`."""
    return f".{namespace.partition(':')[0]}".endswith(".tools") and ":" in namespace


def graph_of(checkpoint_ns: str) -> str:
    """The namespace of the graph that a task belongs to."""
    return checkpoint_ns.rpartition("|")[0]


def running_agent() -> str | None:
    """The name of the agent that runs, if it has one."""
    return _agent(running_config())


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()


def _agent(config: Mapping[str, Any]) -> str | None:
    name: str | None = (config.get("metadata") or {}).get("lc_agent_name")
    return name


def running_runtime() -> Any:
    """The runtime of the running node; `None` outside of a graph."""
    try:
        return get_runtime()
    except (RuntimeError, KeyError):
        return None


def running_config() -> Mapping[str, Any]:
    """The config of the running node; empty outside of a graph."""
    try:
        return get_config()
    except RuntimeError:
        return {}


def resolve(*args: Any, **options: Any) -> list[ResolvedLimit]:
    """The numbers of limits for this state and runtime; async functions are refused."""
    return done(aresolve(*args, form="", **options))


async def aresolve(  # noqa: PLR0913 - keyword-only, with defaults
    limits: Sequence[Limit],
    state: Any,
    runtime: Any,
    recorder: Recorder,
    *,
    form: Form = "a",
    now: float | None = None,
    root_run: str = "",
    prefix: str = "",
) -> list[ResolvedLimit]:
    """The numbers of limits for this state and runtime; async functions are awaited."""
    found = []
    caller = call_context(runtime, model_name=None)
    for limit in limits:
        values: _Values = {}
        for key, function in _functions(limit):
            try:
                value = function(state, runtime)
                if form and inspect.isawaitable(value):
                    value = await value
            except Exception as error:
                _name(limit, key[0], error, recorder)
                raise
            if inspect.iscoroutine(value):
                value.close()
            if inspect.isawaitable(value):
                raise RuntimeError(
                    f"{key[0]} of limit {limit.name!r} is async: call the agent with ainvoke or "
                    "astream"
                )
            values[key] = value
        found.append(
            _resolved(
                limit,
                values,
                state,
                runtime,
                caller=caller,
                now=now,
                root_run=root_run,
                prefix=prefix,
            )
        )
    return found


def store_prefix(prefix: object, state: Any, runtime: Any) -> str:
    """What the store's keys begin with; empty where its prefix is no function."""
    if not callable(prefix):
        return ""
    try:
        value = prefix(state, runtime)
    except Exception as error:
        error.add_note("raised by the function for prefix of the store")
        raise
    if inspect.iscoroutine(value):
        value.close()
    return check_prefix("what the function for prefix of the store gives", value)


def _name(limit: Limit, argument: str, error: Exception, recorder: Recorder) -> None:
    """Count what a function of a limit raises, and name the limit in the traceback."""
    error.add_note(f"raised by the function for {argument} of limit {limit.name!r}")
    recorder.record_error("dynamic_limit", error)


def _functions(
    limit: Limit,
) -> Iterator[tuple[tuple[str, int], Callable[[Any, Any], Awaitable[Any] | Any]]]:
    for argument in _ARGUMENTS:
        if callable(function := getattr(limit, argument)):
            yield (argument, 0), function
    for index, quota in enumerate(limit.quotas):
        if callable(quota.limit):
            yield ("limit", index), quota.limit
        if callable(quota.per):
            yield ("per", index), quota.per


def _resolved(  # noqa: PLR0913 - what a hook knows
    limit: Limit,
    values: _Values,
    state: Any,
    runtime: Any,
    *,
    caller: CallContext,
    now: float | None,
    root_run: str,
    prefix: str,
) -> ResolvedLimit:
    computed = {argument: values[argument, 0] for argument in _ARGUMENTS if (argument, 0) in values}
    if now is None or isinstance(limit, RepeatLimit):
        return ResolvedLimit.of(limit, **computed)
    counter = stored_as(limit)
    thread, run = caller.run_thread_id, ledger(state).get("run")
    quotas = []
    for index, quota in enumerate(limit.quotas):
        number = values.get(("limit", index), quota.limit)
        if number is None:
            continue
        what = f"quota {quota.name!r} of limit {limit.name!r}"
        number = whole_amount(limit.unit, f"limit of {what}", number)
        if ("per", index) in values:
            subject = checked_subject(what, values["per", index])
        else:
            subject = root_run
            if quota.per != ROOT_RUN:
                subject = subject_of(what, str(quota.per), runtime, caller)
        key = CountKey.at(counter, quota.dimension, subject, quota.window, now, prefix=prefix)
        quotas.append(
            Check(
                quota.name,
                # A thread's use in all is one count, for every limit.
                thread_counter(limit)
                if quota.dimension == THREAD and key.resets_at is None
                else str(key),
                number,
                str(key),
                # The handler of the root run has its count, too.
                mirrored=quota.per == ROOT_RUN,
                computed=callable(quota.limit),
                per=quota.dimension,
                subject=subject,
                resets_at=key.resets_at,
            )
        )
    of_thread = None if thread is None else CountKey(counter, THREAD, str(thread), prefix=prefix)
    of_run = None if run is None else CountKey(counter, RUN, run, prefix=prefix)
    return ResolvedLimit.of(
        limit,
        thread_key=None if of_thread is None else str(of_thread),
        run_key=None if of_run is None else str(of_run),
        quotas=tuple(quotas),
        remembers=caller.remembers,
        **computed,
    )


def subject_of(what: str, per: str, runtime: Any, caller: CallContext) -> str:
    """The subject of a quota whose `per` is a name."""
    if per == "global":
        return ""
    if per == THREAD:
        if caller.run_thread_id is None:
            raise ValueError(
                f"{what} is per thread, and this run has none: call the agent with "
                '{"configurable": {"thread_id": …}}'
            )
        return str(caller.run_thread_id)
    if per == "agent":
        if not caller.agent:
            raise ValueError(f"{what} is per agent, and this one has no name: create_agent(name=…)")
        return caller.agent
    context = getattr(runtime, "context", None)
    value = context.get(per) if isinstance(context, Mapping) else getattr(context, per, None)
    if value is None:
        raise ValueError(
            f"{what} needs {per!r} in runtime.context: call the agent with "
            f'context={{"{per}": …}}, or an object that has it'
        )
    return checked_subject(what, value)


def checked_subject(what: str, value: object) -> str:
    """The text of a subject."""
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(
            f"the subject of {what} must be a string, a whole number or a UUID, not "
            f"{type(value).__name__}"
        )
    if not str(value):
        raise ValueError(f"the subject of {what} must not be empty")
    return str(value)
