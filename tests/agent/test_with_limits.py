"""`with_limits`: one line holds a deep agent and all its sub-agents to the same limits."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import PrivateAttr

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, ToolRequest, Turn
from tests.scene import CONFIG, check_history, recording
from tests.signals import Signals, needs_inline

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")

TASK = "Look for it."
ANN = {"user_id": "ann"}
RESEARCHER = {"name": "researcher", "description": "Searches.", "system_prompt": "Search."}
FORK = {"name": "fork", "description": "Goes on.", "mode": "fork"}
REMOTE = {"name": "remote", "description": "Far away.", "graph_id": "remote"}


def task(name: str) -> tuple[str, dict[str, Any]]:
    return "task", {"description": TASK, "subagent_type": name}


def asking(
    *names: str,
    main: Sequence[ToolRequest] = (),
    child: Sequence[ToolRequest] = ("search", "search"),
) -> Callable[[Sequence[BaseMessage]], Turn]:
    """A script by which the main agent asks sub-agents, and each does one thing."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if messages[-1].type != "human":
            return "done"
        return child if TASK in messages[-1].text else [*main, *map(task, names)]

    return script


def quota_of(signals: Signals, *limits: Limit, **options: Any) -> QuotaMiddleware[Any, Any]:
    options = {"store": MemoryStore(), **options}
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def searches(signals: Signals, limit: int = 3, **options: Any) -> QuotaMiddleware[Any, Any]:
    return quota_of(signals, ToolCallLimit("search", thread_limit=limit), **options)


async def run(agent: Any, context: Any = None) -> dict[str, Any]:
    given = {"messages": [("user", "Go!")]}
    return dict(await agent.ainvoke(given, CONFIG, context=context))


@pytest.mark.filterwarnings("ignore:The feature `forked subagents` is in beta")
@pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)
async def test_one_budget(kind: Any, signals: Signals) -> None:
    """The main agent, `general-purpose`, a declared sub-agent and a fork have one budget."""
    ran: list[str] = []
    names = ["general-purpose", "researcher", "fork"]
    model = ScriptedChatModel(script=asking(*names, main=["search"]))
    store = MemoryStore()
    limits = [
        ToolCallLimit("search", thread_limit=5),
        ModelCallLimit(quotas=[Quota(50, per="user_id")]),
    ]
    quota = kind(limits, store=store, telemetry=signals.telemetry)
    agent = with_limits(deepagents.create_deep_agent, quota)(
        model, [recording("search", ran)], subagents=[RESEARCHER, FORK]
    )

    result = await run(agent, ANN)

    assert len(ran) == 5
    assert {each.key: each.used for each in store.usages()} == {
        "search:thread:thread-1": 5,
        "model:user_id:ann": len(model.calls),
    }
    assert len(model.calls) == 2 + 2 * len(names)
    agents = ("unnamed", *names)
    refused = {
        name: signals.value(
            "langchain_quota_limit_decisions_total",
            agent=name,
            limit="tool:search",
            scope="thread",
            decision="blocked",
        )
        or 0
        for name in agents
    }
    assert sum(refused.values()) == 2, refused
    for call in model.calls:
        check_history(call.messages)
    check_history(result["messages"])


class Recording(ScriptedChatModel):
    """Records what it is offered as a provider would be sent it."""

    _offered: list[Any] = PrivateAttr(default_factory=list)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        self._offered.append(sorted(map(str, map(convert_to_openai_tool, tools))))
        return super().bind_tools(tools, **kwargs)


SKILL = "---\nname: knots\ndescription: How to tie knots.\n---\nTie them.\n"


class Prompted(AgentMiddleware[Any, Any, Any]):
    """Takes the place of a middleware of deepagents, and shows that it is there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        text = f"{request.system_message.text if request.system_message else ''} {self.name}"
        return await handler(request.override(system_prompt=text))


def replacing(name: str) -> Mapping[str, Any]:
    return {"middleware": [Prompted(name)]}


OPTIONS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "nothing": dict,
    "a prompt": lambda: {"system_prompt": "You are the main agent."},
    "skills": lambda: {"skills": ["/skills/"]},
    "fewer file tools": lambda: {
        "middleware": [deepagents.FilesystemMiddleware(tools=["ls", "read_file"])]
    },
    "permissions": lambda: {
        "permissions": [
            deepagents.FilesystemPermission(operations=["write"], paths=["/**"], mode="deny")
        ]
    },
    "another sub-agent": lambda: {"subagents": [RESEARCHER]},
    "another middleware": partial(replacing, "Prompted"),
    **{
        f"another {name}": partial(replacing, name)
        for name in (
            "SummarizationMiddleware",
            "PatchToolCallsMiddleware",
            "AnthropicPromptCachingMiddleware",
        )
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
async def test_general_purpose_is_as_deepagents_makes_it(
    options: Callable[[], Mapping[str, Any]], signals: Signals
) -> None:
    """The models are sent what they are sent without limits: prompts, messages and tools."""
    sent = []
    for create in (
        deepagents.create_deep_agent,
        with_limits(deepagents.create_deep_agent, searches(signals, 9)),
    ):
        write = ("write_file", {"file_path": "/notes.txt", "content": "Nothing."})
        model = Recording(script=asking("general-purpose", child=[write, "search"]))
        agent = create(model=model, tools=[recording("search", [])], **options())
        files = {"/skills/knots/SKILL.md": {"content": SKILL, "encoding": "utf-8"}}
        result = await agent.ainvoke({"messages": [("user", "Go!")], "files": files}, CONFIG)
        requests = [[(each.type, each.text) for each in call.messages] for call in model.calls]
        sent.append((requests, model._offered, sorted(result["files"])))

    assert sent[0] == sent[1]
    assert len(sent[0][0]) == 4


async def test_the_models_text_is_handed_on(signals: Signals) -> None:
    """`general-purpose` has the main agent's model as text, by which deepagents finds a profile."""
    given: list[Any] = []

    def create(model: str, *, middleware: Any = (), subagents: Any = ()) -> None:
        given.extend(subagents)

    with_limits(create, searches(signals))("anthropic:claude-haiku-4-5")

    assert [each["model"] for each in given] == ["anthropic:claude-haiku-4-5"]


async def test_a_quota_of_its_own(signals: Signals) -> None:
    """A sub-agent with a `QuotaMiddleware` keeps it; one with a drop-in gets ours beside it."""
    ran: list[str] = []
    own = {**RESEARCHER, "middleware": [searches(signals, 1)]}
    both = {
        **RESEARCHER,
        "name": "both",
        "middleware": [ModelCallLimitMiddleware(run_limit=9, telemetry=signals.telemetry)],
    }
    agent = with_limits(deepagents.create_deep_agent, searches(signals, 0))(
        ScriptedChatModel(script=asking("researcher", "both")),
        [recording("search", ran)],
        subagents=[own, both],
    )

    await run(agent)

    assert ran == ["search"]


async def test_a_quota_in_the_main_agents_list(signals: Signals) -> None:
    """A quota that the caller lists stays in its place, and another one is refused."""
    given: list[Any] = []

    def create(*, middleware: Any = (), subagents: Any = ()) -> None:
        given.extend(middleware)

    quota, other = searches(signals), Prompted("Prompted")
    with_limits(create, quota)(middleware=[quota, other])
    assert given == [quota, other]

    with pytest.raises(ValueError, match=r"middleware has QuotaMiddleware, .* put all limits into"):
        with_limits(create, quota)(middleware=[searches(signals)])


# Sub-agents that cannot be given limits.


def compiled(runnable: Any) -> dict[str, Any]:
    return {"name": "compiled", "description": "Made before.", "runnable": runnable}


def child(ran: list[str], *middleware: Any) -> Any:
    model = ScriptedChatModel(script=[["search", "search"], "done"])
    return create_agent(model, [recording("search", ran)], middleware=middleware)


def enclosed(graph: Any) -> Any:
    outer = StateGraph(MessagesState)
    outer.add_node("child", graph)
    outer.add_edge(START, "child")
    return outer.compile()


@pytest.mark.parametrize(
    "form",
    [lambda each: each, enclosed, lambda each: each.with_retry()],
    ids=["plain", "in a graph", "bound"],
)
async def test_a_compiled_sub_agent(form: Callable[[Any], Any], signals: Signals) -> None:
    """A compiled sub-agent must have limits of ours; with one store they are one budget."""
    ran: list[str] = []
    quota = searches(signals, 1)
    create = with_limits(deepagents.create_deep_agent, quota)
    model = ScriptedChatModel(script=asking("compiled"))

    with pytest.raises(ValueError, match=r"'compiled' is compiled .*middleware=\[quota\].*leave_o"):
        create(model, subagents=[compiled(form(child(ran)))])
    agent = create(model, subagents=[compiled(form(child(ran, quota)))])
    await run(agent)

    assert ran == ["search"]


async def test_what_is_no_graph(signals: Signals) -> None:
    """A sub-agent that is no graph cannot be seen into, and must be left out."""
    spec = compiled(RunnableLambda(lambda state: {"messages": [("ai", "Nothing.")]}))
    with pytest.raises(ValueError, match="'compiled' is compiled without limits"):
        with_limits(deepagents.create_deep_agent, searches(signals))(
            ScriptedChatModel(script=[]), subagents=[spec]
        )


async def test_what_is_left_out(signals: Signals) -> None:
    """Sub-agents that are left out are as deepagents has them: without limits."""
    ran: list[str] = []
    names = ["general-purpose", "researcher", "compiled"]
    create = with_limits(
        deepagents.create_deep_agent, searches(signals, 0), leave_out=[*names, "remote"]
    )
    agent = create(
        ScriptedChatModel(script=asking(*names)),
        [recording("search", ran)],
        subagents=[RESEARCHER, REMOTE, compiled(child(ran))],
    )

    await run(agent)

    assert len(ran) == 6


async def test_left_out_of_one_agent(signals: Signals) -> None:
    """What is left out of one agent is still warned of in others with the same quota."""
    quota = searches(signals)
    create = deepagents.create_deep_agent
    model = ScriptedChatModel(script=lambda _: "done")

    def create_within(**options: Any) -> Any:
        return enclosed(create(**options))

    # Every other warning of a test is an error.
    for each in (create, create_within):
        await run(with_limits(each, quota, leave_out=["general-purpose"])(model=model))
    with pytest.warns(QuotaWarning, match="no limits of langchain-quota: 'general-purpose'"):
        await run(create(model, middleware=[quota]))


async def test_a_remote_sub_agent(signals: Signals) -> None:
    """A remote sub-agent must be left out: its server holds it to limits, or nobody."""
    with pytest.raises(
        ValueError, match=r"'remote' runs on another server.*leave_out=\['remote'\]"
    ):
        with_limits(deepagents.create_deep_agent, searches(signals))(
            ScriptedChatModel(script=[]), subagents=[REMOTE]
        )


# Arguments.


def test_bad_arguments(signals: Signals) -> None:
    """A bad argument is refused, with the argument, the value and the remedy."""
    create, quota = deepagents.create_deep_agent, searches(signals)
    without_store = QuotaMiddleware([ToolCallLimit(run_limit=3)], telemetry=signals.telemetry)

    with pytest.raises(
        TypeError, match=r"create must be create_deep_agent.*not <function create_a"
    ):
        with_limits(create_agent, quota)
    with pytest.raises(TypeError, match=r"create must be create_deep_agent.*not 7"):
        with_limits(7, quota)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"quota must be a QuotaMiddleware, not \["):
        with_limits(create, [quota])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"quota has no store.*store=MemoryStore\(\)"):
        with_limits(create, without_store)
    with pytest.raises(TypeError, match="leave_out must be several names, not 'remote'"):
        with_limits(create, quota, leave_out="remote")
    with pytest.raises(
        ValueError, match=r"leave_out names 'remot'.* one of 'general-p.*, 'remote'"
    ):
        with_limits(create, quota, leave_out=["remot"])(subagents=[REMOTE])
    with pytest.raises(TypeError, match="subagents must be dicts, each with a name, not 'resear"):
        with_limits(create, quota)(subagents=["researcher"])


MINE = [Prompted("Mine")]


def declaring(model: str = "", middleware: Any = (), subagents: Any = (), **_: Any) -> Any:
    """Shows the middlewares and the sub-agents that it is given, both declared."""
    return model, [each.name for each in middleware], [each["name"] for each in subagents]


def passing_on(model: str = "", **options: Any) -> Any:
    """The same, not declared."""
    return declaring(model, **options)


def with_defaults(
    model: str = "", *, middleware: Any = MINE, subagents: Any = (RESEARCHER,)
) -> Any:
    """The same, with some of its own."""
    return declaring(model, middleware, subagents)


@pytest.mark.parametrize(
    ("create", "args", "options"),
    [
        (declaring, (), {"middleware": MINE, "subagents": [RESEARCHER]}),
        (declaring, (), {"middleware": iter(MINE), "subagents": iter([RESEARCHER])}),
        (declaring, ("model", MINE, [RESEARCHER]), {}),
        (passing_on, (), {"middleware": MINE, "subagents": [RESEARCHER]}),
        (partial(declaring, middleware=MINE, subagents=[RESEARCHER]), (), {}),
        (partial(passing_on, middleware=MINE, subagents=[RESEARCHER]), (), {}),
        (partial(declaring, "model", MINE), (), {"subagents": [RESEARCHER]}),
        (with_defaults, (), {}),
    ],
    ids=[
        "by name",
        "iterators",
        "by position",
        "by **kwargs",
        "preset",
        "preset for **kwargs",
        "preset by position",
        "by default",
    ],
)
def test_ways_to_give_arguments(
    create: Any, args: tuple[Any, ...], options: dict[str, Any], signals: Signals
) -> None:
    """Middlewares and sub-agents stay, however they are given."""
    _, middleware, subagents = with_limits(create, searches(signals))(*args, **options)

    assert middleware == ["Mine", "QuotaMiddleware"]
    assert subagents == ["general-purpose", "researcher"]
