"""Check the calls of a graph, and remember its runs in place of the graph's state."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack
from uuid import uuid4
from weakref import WeakKeyDictionary

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langgraph.errors import GraphInterrupt

from langchain_quota.agents.inline import InlineQuotaMiddleware, InlineState, make_model_call
from langchain_quota.agents.quota import QuotaMiddleware, SharedOptions
from langchain_quota.core.stops import STOP, StopReason
from langchain_quota.features.reruns import Reruns
from langchain_quota.features.run_telemetry import RunHistograms
from langchain_quota.features.waiting import Waiting
from langchain_quota.limits import Limit
from langchain_quota.limits.calls import ConcurrencyLimit
from langchain_quota.middleware.base import begin_run
from langchain_quota.middleware.calls import Step, Update
from langchain_quota.middleware.conclude import end_again
from langchain_quota.middleware.context import as_json, call_context, digest, running_runtime
from langchain_quota.middleware.feature import Feature, Handler, Request, StepCheck
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import pending_calls, repaired
from langchain_quota.middleware.root_run import RootRun, StoreSequence, root_run
from langchain_quota.middleware.state import (
    LEDGER,
    Charge,
    Ledger,
    State,
    ToolBatch,
    ledger,
    merge_ledgers,
)
from langchain_quota.runtime import compat
from langchain_quota.runtime.sync_async import Mode, newest_dicts
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.keys import CountKey

_Answer = tuple[str, StopReason | None]
"""The text that answers a call which does not run, and why; a list, if it was stored."""
Answers = Mapping[str | None, _Answer | None]
"""The answers to calls which do not run, by the call's id; `None` for a call that runs."""
_CallName = tuple[str | None, str | None, str]
"""The ids of a message and of a call in it, and the name of the tool."""

_MARK = "langchain_quota"
"""The key in a message's `response_metadata` of the answers to its calls that are blocked, and of
what their check has written, if they wait."""
_TAKEN: _Answer = ("\0", None)
"""Marks a call that a task runs: another task with the same call is checked."""
_MAX_RUNS = 10_000
"""How many runs are remembered. The store still has the counts of a run that is forgotten."""
_MAX_MESSAGES = 10_000
"""For how many messages it is remembered what their calls were charged, and when they start."""


class _Run:
    """The memory of a run, in place of a graph's state."""

    def __init__(self, name: str, root: str, state: Update) -> None:
        self.name, self.root, self.state = name, root, state
        self.ended: AIMessage | None = None
        """The answer with which a limit ended the run."""
        self.ended_in, self.ended_at_model = "", False
        """The superstep in which it did so, and whether it refused a call of the model."""
        self.decided: dict[_CallName, _Answer | None] = {}
        """The answers to calls that are checked; `None` for a call that may run."""
        self.taken: dict[str, tuple[str | None, Answers]] = {}
        """The answers to the calls of a task of tools, by the name of its work, and the id of the
        message with which they were checked."""
        self.asked: dict[str, tuple[object, int]] = {}
        """The attempt at a task that asked last for some work, and how often it had before."""

    def again(self, work: str, attempt: object) -> str:
        """Return the name of a task's work: another one if the attempt has asked for it before."""
        last, before = self.asked.get(work, (None, 0))
        before = before + 1 if last is attempt else 0
        self.asked[work] = attempt, before
        return f"{work}/{before}" if before else work

    def end(self, answer: AIMessage, *, at_model: bool) -> None:
        """Note the answer with which a limit ends the run."""
        self.ended, self.ended_in, self.ended_at_model = answer, _superstep(), at_model

    def answer(self, messages: Sequence[AnyMessage]) -> AIMessage | None:
        """Return the answer to a model call of an ended run; `None` if the call is checked."""
        if self.ended is None:
            return None
        ids = [message.id for message in messages]
        if self.ended.id in ids or self.ended_in != _superstep():
            state = {**self.state, "messages": [self.ended]}
            self.learn(end_again(state, running_runtime()) or {})
        elif self.ended_at_model:
            # It is in a node beside that one, and is refused itself.
            return None
        if self.ended.id in ids and ids[-1] != self.ended.id:
            # Edges read the newest message, which this one would not be under its old id.
            return self.ended.model_copy(update={"id": str(uuid4())})
        return self.ended

    def learn(self, update: Update) -> bool:
        """Apply an update of the state; return whether it ends the run."""
        new = {key: value for key, value in update.items() if key not in {"messages", "jump_to"}}
        new_ledger = merge_ledgers(self.state[LEDGER], new.get(LEDGER) or Ledger())
        self.state.update(new, langchain_quota=new_ledger)
        return "jump_to" in update


class _StoredQuestions(Feature):
    """Stores which questions people are asked, and drops answers that are no longer needed."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        assert isinstance(kernel.middleware, GraphLimits)  # noqa: S101 - for the type checker
        self._graph = kernel.middleware

    async def admit(self, mode: Mode, step: Step, admit: StepCheck) -> Step:
        """Store the question, or drop a person's answer to it once it is not needed."""
        graph = self._graph
        if step.is_second:
            return await admit(mode, step)
        question = step.message or (step.question if graph.asks else "")
        # Before anything is charged, for the store may not answer.
        was_asked = await graph.was_asked(mode, question)
        try:
            step = await admit(mode, step)
        except GraphInterrupt:
            await graph.sequence.note(mode, "asked", question)
            raise
        if was_asked and step.answer is None:
            compat.is_answered()
        return step


class GraphLimits(QuotaMiddleware):
    """Checks the calls of a graph."""

    name = "GraphQuota"
    # Nothing says when a run of a graph ends.
    feature_kinds = (
        _StoredQuestions,
        *(kind for kind in InlineQuotaMiddleware.feature_kinds if kind is not RunHistograms),
    )

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        agent: str | None,
        shared: bool,
        store: QuotaStore,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(limits, store=store, **options)
        self.agent, self._is_shared = agent, shared
        self.kernel.runs_tools = self.kernel.repeats_model_calls = False
        asking = {limit.kind for limit in limits if limit.exit_behavior == "ask"}
        self.asks, self._asks_at_tools = bool(asking), bool(asking - {"model"})
        assert self.kernel.store is not None  # noqa: S101 - for the type checker
        self._has_slots = any(isinstance(limit, ConcurrencyLimit) for limit in limits)
        is_needed = self.kernel.on_store_error == "block"
        self.sequence = StoreSequence(self.kernel.store, is_needed=is_needed)
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._roots: WeakKeyDictionary[RootRun, str] = WeakKeyDictionary()
        # What the checks of messages have written. Nodes may call the tools of several messages
        # at the same time, and the ledger of their run has the charges of the newest one only.
        self._checks: Callable[[Hashable], dict[str, Ledger]] = newest_dicts(_MAX_MESSAGES)

    async def call_model(self, mode: Mode, request: Request, handler: Handler) -> AIMessage:
        """Return the answer of a model, or of the limits in its place.

        The messages of the request are the history; its state and runtime are set here.

        Raises:
            RuntimeError: A tool call is blocked, and no node of tools answers it.
        """
        with running_as(self.agent):
            run, messages = await self._run(mode, request.messages), request.messages
            if ended := run.answer(messages):
                return ended
            state: Any = {**run.state, "messages": messages}
            # Each call is charged, even if a node calls its model twice or runs again.
            runtime: Any = running_runtime(uuid4().hex)
            history = repaired(state, is_shared=False) or messages
            step = InlineState(replace(request, messages=history, state=state, runtime=runtime))
            await make_model_call(self.kernel, mode, step, handler)
            answer = step.new_messages[-1]
            assert isinstance(answer, AIMessage)  # noqa: S101 - for the type checker
            run.learn(step.written)
            if run.state[LEDGER].get("ended") == answer.id:
                run.end(answer, at_model=True)
            if not answer.tool_calls:
                return answer
            final, blocked = None, dict[str | None, _Answer]()
            # A question after the model's call would make the node call the model again.
            if not self._asks_at_tools:
                final, blocked = await self._check(mode, run, step, uuid4().hex)
            if (blocked or self._asks_at_tools) and not (final or self.kernel.runs_tools):
                raise RuntimeError(
                    "a limit refuses a tool call, and nothing answers it: give the graph "
                    "limits.tools([…]) of the same GraphQuota in place of its ToolNode"
                )
            if final or self._asks_at_tools:
                return final or answer
            decided = _decided(answer, blocked)
            run.decided |= decided
            mark: dict[str, Any] = {"blocked": blocked} if blocked else {}
            if self._is_shared:
                sealed = [_seal(run, decided)]
                written = self._checks((run.name, answer.id)).get("written")
                if written and (self._has_slots or Waiting.name in written["own"]):
                    # Another process may have to delay or refund the calls.
                    mark["written"] = _with_keys(written, _without_subject)
                    sealed.append(_seal(run, decided, mark["written"]))
                await self.sequence.note(mode, "checked", *sealed)
            if not mark:
                return answer
            marked = {**answer.response_metadata, _MARK: mark}
            return answer.model_copy(update={"response_metadata": marked})

    async def check_tools(
        self, mode: Mode, requests: Sequence[ToolCallRequest], key: str
    ) -> tuple[State, Answers]:
        """Return the state in which a task's tool calls run, and the answers to blocked ones.

        Args:
            mode: Sync or async.
            requests: The requests for the calls, at least one.
            key: The key of the messages in the graph's state.
        """
        state, calls = requests[0].state, [request.tool_call for request in requests]
        state = state.get(key) if isinstance(state, Mapping) else getattr(state, key, state)
        history = [message for message in state or () if not isinstance(message, dict)]
        run = await self._run(mode, history)
        pending = pending_calls({"messages": history})
        ids = {call["id"] for call in pending.calls} if pending else set[str | None]()
        message = pending.message if pending and ids.issuperset(c["id"] for c in calls) else None
        message_id = None if message is None else message.id
        names = [(message_id, call["id"], call["name"]) for call in calls]
        runtime: Any = running_runtime()
        # A node may call its tools in a loop, with calls that no id tells apart. If the node runs
        # again, which has a new info, it comes to them in the same order.
        work = call_context(runtime).step(repr(names))
        work = run.again(work, runtime.execution_info)
        if work in run.taken:
            if await self.was_asked(mode, work):
                compat.is_answered()
        else:
            if message is not None and names[0] not in run.decided:
                await self._read_mark(mode, run, message, history)
            checked = message_id
            answers: Answers = {name[1]: run.decided.get(name, _TAKEN) for name in names}
            run.decided |= dict.fromkeys(names, _TAKEN)
            if _TAKEN in answers.values():
                checked, unchecked = work, AIMessage("", id=work, tool_calls=calls)
                call_state = {**run.state, "messages": [*history, unchecked]}
                _, answers = await self._check(mode, run, call_state, work)
            run.taken[work] = checked, answers
        checked, answers = run.taken[work]
        # Of calls that another process has checked, nothing may be known: not what the newest check
        # of this process says of others, which may have the same ids.
        nothing = ToolBatch(message=checked or "", calls={}, waiting=[])
        unknown = Ledger(batch=nothing, own={Reruns.name: {"tool": ""}})
        written = self._checks((run.name, checked)).get("written", unknown)
        calls_ledger = merge_ledgers(run.state[LEDGER], written)
        return {**run.state, "messages": history, LEDGER: calls_ledger}, answers

    async def _read_mark(
        self, mode: Mode, run: _Run, message: AIMessage, history: Sequence[AnyMessage]
    ) -> None:
        """Read another process's decisions from a message, if the store confirms them."""
        mark = message.response_metadata.get(_MARK, {})
        blocked = mark.get("blocked", {}) if isinstance(mark, dict) else None
        if not self._is_shared or not isinstance(blocked, dict):
            return
        decided = _decided(message, blocked)
        if await self.sequence.read(mode, "checked", _seal(run, decided)) is None:
            return
        written = mark.get("written")
        if written is not None:
            seal = _seal(run, decided, written)
            if await self.sequence.read(mode, "checked", seal) is not None:
                state = {**run.state, "messages": history}
                runtime = running_runtime()
                _, places = await self.kernel.resolve_limits(mode, "tool", state, runtime)
                keys = {_without_subject(place.key): place.key for place in places.values()}
                self._checks((run.name, message.id))["written"] = _with_keys(written, keys.get)
        # Last, for then the calls of other tasks run.
        run.decided = {**decided, **run.decided}

    async def _check(
        self, mode: Mode, run: _Run, state: State, work: str
    ) -> tuple[AIMessage | None, dict[str | None, _Answer]]:
        """Check the newest calls; return the final text if the run ends, and answers to calls."""
        update = await self.kernel.check_tool_calls(mode, state, running_runtime(work)) or {}
        answers: list[AnyMessage] = update.get("messages") or []
        final = answers[-1] if run.learn(update) else None
        written = ledger(update)
        if (batch := written.get("batch")) and batch["calls"]:
            own = written.get("own", {})
            self._checks((run.name, batch["message"]))["written"] = Ledger(batch=batch, own=own)
        final = final if isinstance(final, AIMessage) else None
        if final is not None:
            run.end(final, at_model=False)
        return final, {
            answer.tool_call_id: (answer.text, answer.artifact and answer.artifact[STOP])
            for answer in answers
            if isinstance(answer, ToolMessage)
        }

    async def was_asked(self, mode: Mode, question: str) -> bool:
        """Return whether a person was asked before; a tool's question must not get the answer."""
        resumes = self.asks and getattr(root_run(), "resumes", False)
        return resumes and await self.sequence.read(mode, "asked", question) is not None

    async def _run(self, mode: Mode, messages: Sequence[AnyMessage]) -> _Run:
        """Return the memory of the current run: of this graph, in this root run."""
        root = root_run()
        if root is None:
            raise RuntimeError(
                "a limited model or tool was called outside of a run, or the run began before its "
                "GraphQuota was made: call it in a node, a task or an entrypoint"
            )
        caller = call_context(running_runtime())
        if root not in self._roots:
            ask = partial(self.sequence.numbered, mode, root, caller)
            # A resumed run is found by the number alone, so a lost reply is asked for again.
            self._roots[root] = await ask() or await ask() or root.key
        name = digest(self._roots[root], *caller.graph)
        if name not in self._runs:
            new_state = begin_run(self.kernel, mode, {"messages": messages}, running_runtime())
            new_state[LEDGER]["run"] = name
            new_state.pop("messages", None)  # each call has its own history
            self._runs.setdefault(name, _Run(name, self._roots[root], new_state))
        while len(self._runs) > _MAX_RUNS:
            self._runs.popitem(last=False)
        return self._runs[name]


def _superstep() -> str:
    """Return the name of the running superstep, which nodes that run side by side share."""
    runtime: Any = running_runtime()
    return str(runtime.execution_info.checkpoint_id)


@contextmanager
def running_as(agent: str | None, config: RunnableConfig | None = None) -> Iterator[RunnableConfig]:
    """Run under an agent's name, as LangGraph does for an agent that has one."""
    named = None if agent is None else RunnableConfig(metadata={compat.AGENT_NAME: agent})
    merged = merge_configs(ensure_config(config), named)
    token = var_child_runnable_config.set(merged)
    try:
        yield merged
    finally:
        var_child_runnable_config.reset(token)


def _seal(run: _Run, decided: Mapping[_CallName, _Answer | None], written: object = None) -> str:
    """Return the name under which the store confirms what a message's mark says."""
    return digest(run.root, as_json(decided), as_json({"written": written}))


def _without_subject(key: str) -> str:
    """Return a count's key as a message may show it: without the names of customers."""
    return str(replace(CountKey.parse(key), subject="", prefix=""))


def _with_keys(written: Ledger, renamed: Callable[[str], str | None]) -> Ledger:
    """Return what a check has written with other keys, and without those that have none."""
    batch = written["batch"]
    assert batch is not None  # noqa: S101 - for the type checker
    calls: dict[str, Charge] = {
        call_id: {
            **charge,
            "keys": {new: n for key, n in charge["keys"].items() if (new := renamed(key))},
        }
        for call_id, charge in batch["calls"].items()
    }
    return {**written, "batch": {**batch, "calls": calls}}


def _decided(
    message: AIMessage, blocked: Mapping[str | None, _Answer]
) -> dict[_CallName, _Answer | None]:
    """Return the decision about each call of a message: its answer, or `None` if it may run."""
    return {(message.id, c["id"], c["name"]): blocked.get(c["id"]) for c in message.tool_calls}
