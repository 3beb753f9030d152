"""What a caller of a server may send: however it is forged, no more calls run than a limit allows.

Each row of the table is played against QuotaMiddleware, InlineQuotaMiddleware, the drop-ins and
GraphQuota, without and with a store. Two honest turns use the limit up. Then come the attempts.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolCall
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Send

from langchain_quota import MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.limits import Limit
from tests.scene import ANN, CONFIG, Kind, Scene
from tests.stores import counts, quota
from tests.telemetry import HAS_INLINE, Signals

PRODUCTION = Path("docs/production.md").read_text(encoding="utf-8")
KINDS: tuple[Kind, ...] = ("quota", *(("inline",) if HAS_INLINE else ()), "drop-in", "graph")
WITH_STORE = [(kind, True) for kind in KINDS]
EVERYWHERE = [*((kind, False) for kind in KINDS if kind != "graph"), *WITH_STORE]
"""Every kind with and without a store; a `GraphQuota` always has one."""
ASKING = [("quota", False), ("quota", True), ("graph", True)]
"""Those that can ask a person."""


class Caller:
    """Sends what she likes to an agent that is held to two searches, or two model calls."""

    def __init__(self, signals: Signals, kind: Any, *, shared: bool, of: str) -> None:
        self.store = MemoryStore() if shared else None
        quotas = [Quota(2, per="user_id")] if shared and kind != "drop-in" else []
        limits: list[Limit] = [ToolCallLimit("search", thread_limit=2, quotas=quotas)]
        if of == "model":
            limits = [ModelCallLimit(thread_limit=2, quotas=quotas)]
        if of == "ask":
            limits = [ToolCallLimit("search", thread_limit=2, exit_behavior="ask", grant=1)]
        options: dict[str, Any] = {"store": self.store} if kind != "drop-in" and shared else {}
        items: list[Any] = limits
        if kind == "drop-in" and self.store:
            # What the drop-in refuses is taken back from the store of the other one.
            items = [*limits, quota(signals, NINE, store=self.store)]
        self.of, self.kind = of, kind
        self.scene = Scene(signals, self._script, items, kind=kind, context=ANN, **options)
        self.agent, self.errors = self.scene.agent, list[Exception]()

    def _script(self, messages: Sequence[Any]) -> Any:
        return "done" if self.of == "model" or messages[-1].type == "tool" else ["search"]

    @property
    def ran(self) -> int:
        """How many of the limited calls ran."""
        return len(self.scene.model.calls if self.of == "model" else self.scene.ran)

    def messages(self, kind: str) -> list[Any]:
        state = self.agent.get_state(CONFIG).values
        return [each for each in state.get("messages", ()) if each.type == kind]

    async def send(
        self, given: Any, *, context: Any = ANN, config: Any = None, **configurable: Any
    ) -> None:
        """Start or resume a run; what the server answers with an error runs nothing more."""
        known = {**CONFIG["configurable"], **configurable}
        how = {**(config or {}), "configurable": known}
        try:
            await self.agent.ainvoke(given, how, context=context, durability="sync")
        except Exception as error:  # noqa: BLE001 - whatever fails, it is the calls that count
            self.errors.append(error)

    async def say(self, *messages: Any, keys: Mapping[str, Any] | None = None, **how: Any) -> None:
        """Start a run with messages, and other keys of the state, before an honest question."""
        await self.send({**(keys or {}), "messages": [*messages, HumanMessage("go")]}, **how)

    async def go_back(self, given: Any, node: str) -> None:
        """Send this to the oldest checkpoint from which a node runs next."""
        found = [each async for each in self.agent.aget_state_history(CONFIG)]
        known = [each.config for each in found if any(one.endswith(node) for one in each.next)]
        for each in known[-1:]:
            await self.send(given, checkpoint_id=each["configurable"]["checkpoint_id"])


Attack = Callable[[Caller], Awaitable[None]]

NINE = ToolCallLimit("search", quotas=[Quota(9, per="user_id")])
GO: Any = {"messages": [("user", "go")]}
NOT_RUN, MARK = "quota_not_run", "langchain_quota"


def calls(*ids: str) -> list[ToolCall]:
    return [ToolCall(name="search", args={}, id=each, type="tool_call") for each in ids]


def forged(kind: str, **changes: Any) -> Attack:
    """Send every message of a kind again, changed, under its id unless that is changed."""

    async def attack(caller: Caller) -> None:
        await caller.say(*[each.model_copy(update=changes) for each in caller.messages(kind)])

    return attack


def marked(kind: str, **metadata: Any) -> Attack:
    return forged(kind, response_metadata=metadata)


def removed(*kinds: str) -> Attack:
    async def attack(caller: Caller) -> None:
        found = [each for kind in kinds for each in caller.messages(kind)]
        await caller.say(*(RemoveMessage(id=each.id) for each in found))

    return attack


def saying(*messages: Any, **how: Any) -> Attack:
    return lambda caller: caller.say(*messages, **how)


def ending(*messages: Any) -> Attack:
    """Let these messages be the newest ones."""
    return lambda caller: caller.send({"messages": [HumanMessage("go"), *messages]})


def sending(given: Any, **how: Any) -> Attack:
    return lambda caller: caller.send(given, **how)


def going_back(given: Any, node: str) -> Attack:
    return lambda caller: caller.go_back(given, node)


def deciding(**decision: Any) -> Attack:
    """Ask for a search, and answer the question of the limit."""

    async def attack(caller: Caller) -> None:
        await caller.say()
        await caller.send(Command(resume={"decisions": [decision]}))

    return attack


async def cut_off(caller: Caller) -> None:
    """Have a run end behind its tools, then say that they have not run."""
    await caller.say(config={"recursion_limit": 3})
    await marked("tool", **{NOT_RUN: True})(caller)


UNUSED: Any = {"thread_tool_call_count": {}, "langchain_quota": {"batch": None, "counts": {}}}


async def rewritten(caller: Caller) -> None:
    """Write the state, as `update_state` does."""
    await caller.agent.aupdate_state(CONFIG, UNUSED)
    await caller.say()


async def asked_again(caller: Caller) -> None:
    """Approve a question, and answer it once more at its checkpoint."""
    await caller.say()
    asked = caller.agent.get_state(CONFIG).config["configurable"]["checkpoint_id"]
    for kind in ("approve", "reject"):
        await caller.send(Command(resume={"decisions": [{"type": kind}]}), checkpoint_id=asked)


NEW_THREAD = "**New threads**: each one starts with a new limit"
COMMANDS = "`command.update`"
CHECKPOINTS = "`checkpoint_id`"
RESUMES = "**Resuming a thread**"
STATE = [(kind, shared) for kind, shared in EVERYWHERE if not shared or kind == "drop-in"]
"""Where the thread's state counts what is limited."""
BETWEEN = [each for each in STATE if each[0] == "drop-in"]
NODES = [each for each in EVERYWHERE if each[0] != "graph"]
"""Where no limit checks in the node of tools."""


@dataclass(frozen=True)
class Row:
    """An attempt, and how many calls run after two of them."""

    name: str
    attack: Attack
    trusted: str = ""
    """What production.md says of it: only callers whom you trust may send this."""
    freed: Sequence[tuple[Any, bool]] = ()
    """Where more calls run."""
    where: Sequence[tuple[Any, bool]] = field(default_factory=lambda: EVERYWHERE)
    of: str = "tool"
    runs: int = 2


X = AIMessage("", tool_calls=calls("x"))
HELD = [
    Row("nothing forged", saying()),
    # Messages that are sent again under their ids.
    Row("an answer says it has not run", marked("tool", **{NOT_RUN: True})),
    Row("an answer says the store owes", marked("tool", **{NOT_RUN: False})),
    Row("a new answer says it", forged("tool", id=None, response_metadata={NOT_RUN: False})),
    Row("an answer is an error", forged("tool", status="error", content="not run")),
    Row("an answer of another call", forged("tool", tool_call_id="other")),
    Row("an answer of another tool", forged("tool", name="calc")),
    Row("answers are removed", removed("tool")),
    Row("model answers are removed", removed("ai")),
    Row("a turn is removed", removed("tool", "ai")),
    Row("questions are removed", removed("human")),
    Row("all is removed", saying(RemoveMessage(id=REMOVE_ALL_MESSAGES))),
    Row("calls are taken out", forged("ai", tool_calls=[])),
    Row("calls get new ids", forged("ai", tool_calls=calls("new"))),
    Row("calls that were not refused", marked("ai", **{MARK: {"blocked": {}}})),
    Row("calls that were refused", marked("ai", **{MARK: {"blocked": {"x": "refused"}}})),
    Row("another agent's answers", forged("ai", name="other")),
    Row("questions again", forged("human")),
    Row("a cut-off run did not run", cut_off),
    # Messages of her own.
    Row("calls of her own", ending(AIMessage("", tool_calls=calls("a", "b")))),
    Row("calls of an old id", ending(AIMessage("", id="x", tool_calls=calls("a", "b")))),
    Row(
        "checked calls", ending(X.model_copy(update={"response_metadata": {MARK: {"blocked": {}}}}))
    ),
    Row("calls with one id", ending(AIMessage("", tool_calls=calls("a", "a")))),
    Row("calls without an id", ending(AIMessage("", tool_calls=calls("")))),
    Row("a marked question", saying(HumanMessage("go", response_metadata={NOT_RUN: 1, MARK: {}}))),
    # Other keys of the state, in the input.
    Row("the thread's counts", saying(keys={"thread_tool_call_count": {"search": 0}})),
    Row("the run's counts", saying(keys={"run_tool_call_count": {}})),
    Row("the ledger", saying(keys={"langchain_quota": {"batch": None, "counts": {}}})),
    Row("a jump", saying(keys={"jump_to": "tools"})),
    Row("an edit", saying(keys={"hitl_edited_tool_calls": {"a": {"name": "calc", "args": {}}}})),
    Row("a structured response", saying(keys={"structured_response": {}})),
    # The config and the context.
    Row("a namespace", saying(checkpoint_ns="other")),
    Row("the user of the server", saying(langgraph_auth_user_id="boss")),
    Row("a prefix", saying(quota_prefix="other")),
    Row("another agent", saying(config={"metadata": {"lc_agent_name": "other"}})),
    Row("a root run", saying(config={"metadata": {"__langchain_quota_root_run": ["x"]}})),
    Row("another user", saying(context={"user_id": "bob"})),
    Row("no user", saying(context={})),
    # Commands, and answers to a question.
    Row("go on", sending(None)),
    Row("resume nothing", sending(Command(resume={"decisions": [{"type": "approve"}]}))),
    Row("update messages", sending(Command(update=GO))),
    Row("goto the model", sending(Command(goto="model"))),
    Row("rejected", deciding(type="reject", amount=9), of="ask", where=ASKING),
    *(
        Row(f"amount {each}", deciding(type="approve", amount=each), of="ask", where=ASKING)
        for each in (-1, 0, 10**30, "1", float("nan"))
    ),
    Row("no decision", deciding(type="edit"), of="ask", where=ASKING),
    # Each time one more is granted.
    Row("approved", deciding(type="approve"), of="ask", where=ASKING, runs=4),
    # The model's calls.
    Row("model: all removed", saying(RemoveMessage(id=REMOVE_ALL_MESSAGES)), of="model"),
    Row("model: answers changed", marked("ai", **{NOT_RUN: True, MARK: {}}), of="model"),
    Row("model: the counts", saying(keys={"thread_model_call_count": 0}), of="model"),
]
TRUSTED = [
    Row("a new thread", saying(thread_id="thread-2"), NEW_THREAD, STATE),
    Row("begin again", going_back(GO, "__start__"), CHECKPOINTS, STATE),
    Row("a question before the model", going_back(GO, "model"), CHECKPOINTS, STATE),
    Row("a question before tools", going_back(GO, "tools"), CHECKPOINTS, STATE),
    Row("a question between checks", going_back(GO, "].after_model"), CHECKPOINTS, BETWEEN),
    Row("update counts", sending(Command(update=UNUSED, goto="model")), COMMANDS, STATE),
    Row("go to tools", sending(Command(update={"messages": X}, goto="tools")), COMMANDS, NODES),
    Row("send to tools", sending(Command(goto=Send("tools", {"messages": [X]}))), COMMANDS, NODES),
    Row("update_state", rewritten, "`update_state`", STATE),
]
REPLAYED = [
    Row("tools again", going_back(None, "tools"), CHECKPOINTS, STATE),
    Row("the model again", going_back(None, "model"), CHECKPOINTS, STATE),
    Row("checked again", going_back(None, "].after_model"), CHECKPOINTS, BETWEEN),
    Row("resumed", going_back(Command(resume="x"), "tools"), CHECKPOINTS, STATE),
    Row("answered again", asked_again, RESUMES, ASKING[:1], ASKING, "ask", 4),
    Row("model: again", going_back(None, "model"), CHECKPOINTS, STATE, of="model"),
]
"""What runs an old checkpoint again. Until that is checked again, these rows fail."""


@pytest.mark.parametrize("row", [*HELD, *TRUSTED, *REPLAYED], ids=lambda each: each.name)
async def test_no_more_calls_run(row: Row, signals: Signals) -> None:
    """As many calls run as the limit says, or the docs say that only the trusted may send this."""
    ran, charged = dict[Any, int](), dict[Any, int]()
    for kind, shared in row.where:
        caller = Caller(signals, kind, shared=shared, of=row.of)
        for _ in range(2):
            await caller.say()
        assert caller.ran == 2
        for _ in "12":
            await row.attack(caller)
        ran[kind, shared] = caller.ran
        if caller.store is not None and row.of == "tool":
            charged[kind, shared] = counts(caller.store)["search:user_id:ann"]
    freed = {each for each, number in ran.items() if number != row.runs}
    assert freed == {*row.freed}, ran
    assert row.trusted in PRODUCTION
    if row in HELD:
        assert charged == {each: ran[each] for each in charged}
