"""Checks that a graph that is wired by hand does what the hooks say."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage

from langchain_quota.middleware._context import (
    HOOKS,
    call_context,
    graph_of,
    node_of,
    running_config,
    running_runtime,
)
from langchain_quota.middleware._history import since
from langchain_quota.state import Batch, ledger

REMEDY = (
    "Let GraphQuota(limits).add_to(graph, model=…, tools=…) put the nodes and edges in, or take "
    "create_react_agent(**GraphQuota(limits).react_hooks(model, tools))"
)
_ROUTED = tuple(f".{hook}" for hook in HOOKS)
"""The ends of the names of nodes that create_agent makes for hooks; it routes their jumps."""
_KEPT = 1000
"""The most places that are remembered at a time."""


class _Place(NamedTuple):
    """Where a hook runs."""

    invocation: tuple[object, str]
    thread: tuple[object, str] | None
    step: int

    @classmethod
    def of(cls, runtime: Any, info: Any) -> "_Place":
        """The place in which a hook has a runtime, and the information about it."""
        context = call_context(runtime, model_name=None)
        graph = graph_of(info.checkpoint_ns)
        # A hook that is called by hand may get less than from LangGraph.
        writer = getattr(runtime, "stream_writer", None)
        return cls(
            (writer and ref(writer), graph),
            (info.thread_id, graph) if context.remembers else None,
            (running_config().get("metadata") or {}).get("langgraph_step", 0),
        )

    def is_followed_by(self, later: "_Place") -> bool:
        """Whether the state that is written here is the one that is read there."""
        is_same = self.invocation == later.invocation or (
            self.thread is not None and self.thread == later.thread
        )
        return is_same and self.step < later.step


class Wiring:
    """What one middleware's hooks have seen of graphs in which they are nodes of other names."""

    def __init__(self) -> None:
        self._written: deque[tuple[_Place, str]] = deque(maxlen=_KEPT)
        """Where a hook wrote the first ledger of a state, and the state's newest message."""

    def check(self, state: Mapping[str, Any], runtime: Any, *, middleware: str) -> bool:
        """Check that what the limits refused did not run."""
        known = ledger(state)
        batch = known.get("batch")
        ended = known.get("ended")
        if known.get("begun_by") and not ended and not (batch and batch.get("refused")):
            return False
        info = getattr(runtime, "execution_info", None)
        if info is None or node_of(info.checkpoint_ns).endswith(_ROUTED):
            return False
        messages: Sequence[AnyMessage] = state.get("messages") or ()
        ran = _behind_the_end(messages, ended) if ended else []
        if batch:
            ran += _ran_though_refused(messages, batch)
        if ran:
            raise RuntimeError(
                f"{middleware} refused a call, and {' and '.join(dict.fromkeys(ran))} ran. "
                f"The graph does not go where the hook's jump_to says. {REMEDY}"
            )
        if "begun_by" in known:
            return False
        here = _Place.of(runtime, info)
        if not known:
            self._check_kept(messages, here, middleware)
            return False
        began_here = any(place.invocation == here.invocation for place, _ in self._written)
        return not began_here and _is_new_turn(messages)

    def _check_kept(self, messages: Sequence[AnyMessage], here: _Place, middleware: str) -> None:
        """Check that the state keeps what a hook wrote: the graph has gone on since."""
        written = {newest for place, newest in self._written if place.is_followed_by(here)}
        has_gone_on = False
        for message in reversed(messages):
            if has_gone_on and message.id in written:
                raise RuntimeError(
                    f"{middleware} counts calls, and the graph's state does not keep the "
                    f"counts: no limit holds. {REMEDY}"
                )
            has_gone_on = has_gone_on or isinstance(message, AIMessage | ToolMessage)

    def wrote(self, state: Mapping[str, Any]) -> None:
        """Note that a hook writes the first ledger of a state."""
        messages: Sequence[AnyMessage] = state.get("messages") or ()
        runtime = running_runtime()
        info = getattr(runtime, "execution_info", None)
        if info is not None and messages and messages[-1].id is not None:
            self._written.append((_Place.of(runtime, info), messages[-1].id))


def _behind_the_end(messages: Sequence[AnyMessage], ended: str) -> list[str]:
    """What ran after the message that ended the run."""
    return [
        f"the tool {message.name!r}" if isinstance(message, ToolMessage) else "the model"
        for message in since(messages, ended) or ()
        if isinstance(message, AIMessage | ToolMessage)
    ]


def _ran_though_refused(messages: Sequence[AnyMessage], batch: Batch) -> list[str]:
    """The tools that ran though their calls were refused: they have an answer beside ours."""
    refused = set(batch.get("refused", ()))
    answers: list[ToolMessage] = []
    for message in reversed(messages) if refused else ():
        if isinstance(message, ToolMessage):
            answers.append(message)
        elif isinstance(message, AIMessage):
            if message.id == batch["message"]:
                ids = [each.tool_call_id for each in answers]
                return [
                    f"the tool {each.name!r}"
                    for each in answers
                    if each.tool_call_id in refused and ids.count(each.tool_call_id) > 1
                ][:1]
            answers = []
    return []


def _is_new_turn(messages: Sequence[AnyMessage]) -> bool:
    """Whether the newest message is the user's, and the model has answered before it."""
    spoken = [message for message in messages if not isinstance(message, AIMessage)]
    return (
        bool(spoken)
        and isinstance(spoken[-1], HumanMessage)
        and any(isinstance(each, AIMessage) for each in messages[: messages.index(spoken[-1])])
    )
