"""`with_limits`: one line holds a deep agent and all its sub-agents to the same limits."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, ToolRequest, Turn
from tests.scene import ANN, CONFIG, Scene, model_limiter, recording
from tests.telemetry import Signals, needs_inline

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")

TASK = "Look for it."
RESEARCHER = {"name": "researcher", "description": "Searches.", "system_prompt": "Search."}
FORK = {"name": "fork", "description": "Goes on.", "mode": "fork"}
REMOTE = {"name": "remote", "description": "Far away.", "graph_id": "remote"}

kinds = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)


def asking(
    *names: str, main: Sequence[ToolRequest] = (), child: Any = ("search", "search")
) -> Callable[[Sequence[BaseMessage]], Turn]:
    """A script by which the main agent asks sub-agents, and each does one thing."""
    tasks = [("task", {"description": TASK, "subagent_type": name}) for name in names]

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if messages[-1].type != "human":
            return "done"
        return child if TASK in messages[-1].text else [*main, *tasks]

    return script


def searches(signals: Signals, limit: int = 3, **options: Any) -> QuotaMiddleware[Any, Any]:
    options = {"store": MemoryStore(), **options}
    limits = [ToolCallLimit("search", thread_limit=limit)]
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def deep(signals: Signals, quota: Any, *names: str, **options: Any) -> Scene:
    """A deep agent under limits that asks these sub-agents, each of which searches twice."""
    leave_out = options.pop("leave_out", ())
    create = with_limits(deepagents.create_deep_agent, quota, leave_out=leave_out)
    return Scene(signals, asking(*names), tools=["search"], create=create, **options)


@pytest.mark.filterwarnings("ignore:The feature `forked subagents` is in beta")
@kinds
async def test_one_budget(kind: Any, signals: Signals) -> None:
    """The main agent, `general-purpose`, a declared sub-agent and a fork have one budget."""
    names, store = ["general-purpose", "researcher", "fork"], MemoryStore()
    searching = ToolCallLimit("search", thread_limit=5)
    limits = [searching, ModelCallLimit(quotas=[Quota(50, per="user_id")])]
    quota = kind(limits, store=store, telemetry=signals.telemetry)
    scene = deep(signals, quota, *names, subagents=[RESEARCHER, FORK], context=ANN)
    await scene.play()
    models = 2 + 2 * len(names)
    assert (len(scene.ran), len(scene.model.calls)) == (5, models)
    assert {each.key: each.used for each in store.usages()} == {
        "search:thread:thread-1": 5,
        "model:user_id:ann": models,
    }
    labels = {"limit": "tool:search", "scope": "thread", "decision": "blocked"}
    refused = signals.samples("langchain_quota_limit_decisions_total", **labels)
    assert sum(refused.values()) == 1
    scene.check()


class Prompted(AgentMiddleware[Any, Any, Any]):
    """Takes the place of a middleware of deepagents, and shows that it is there."""

    name = ""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        text = f"{request.system_message.text if request.system_message else ''} {self.name}"
        return await handler(request.override(system_prompt=text))


@pytest.mark.parametrize("option", ["skills", "permissions", "middleware"])
async def test_general_purpose_is_as_deepagents_makes_it(option: str, signals: Signals) -> None:
    """The models are sent what they are sent without limits: prompts, messages and tools."""
    denied = {"operations": ["write"], "paths": ["/**"], "mode": "block"}
    options: dict[str, list[Any]] = {
        "skills": ["/skills/"],
        "permissions": [deepagents.FilesystemPermission(**denied)],
        "middleware": [Prompted("SummarizationMiddleware")],
    }
    limited = with_limits(deepagents.create_deep_agent, searches(signals, 9))
    skill = {"content": "---\nname: knots\ndescription: Knots.\n---\nTie.\n", "encoding": "utf-8"}
    given = {"messages": [("user", "Go!")], "files": {"/skills/knots/SKILL.md": skill}}
    sent = []
    for create in (deepagents.create_deep_agent, limited):
        write = ("write_file", {"file_path": "/notes.txt", "content": "Nothing."})
        model = ScriptedChatModel(script=asking("general-purpose", child=[write, "search"]))
        own: dict[str, Any] = {"system_prompt": "Help.", option: options[option]}
        agent = create(model=model, tools=[recording("search", [])], **own)
        result = await agent.ainvoke(given, CONFIG)
        requests = [
            ([(each.type, each.text) for each in call.messages], sorted(call.tools))
            for call in model.calls
        ]
        sent.append((requests, sorted(result["files"])))
    assert sent[0] == sent[1]
    assert len(sent[0][0]) == 4


async def test_a_quota_of_its_own(signals: Signals) -> None:
    """A sub-agent with a `QuotaMiddleware` keeps it; one with a drop-in gets ours beside it."""
    own = {**RESEARCHER, "middleware": [searches(signals, 1)]}
    both = {**RESEARCHER, "name": "both", "middleware": [model_limiter(signals, run_limit=9)]}
    quota = searches(signals, 0)
    scene = deep(signals, quota, "researcher", "both", subagents=[own, both])
    await scene.play()
    assert scene.ran == ["search"]


def compiled(runnable: Any) -> dict[str, Any]:
    return {"name": "compiled", "description": "Made before.", "runnable": runnable}


def child(signals: Signals, ran: list[str], *middleware: Any) -> Any:
    script = [["search", "search"], "done"]
    tools = [recording("search", ran)]
    return Scene(signals, script, middleware, tools=tools, checkpointer=None).agent


def enclosed(graph: Any) -> Any:
    outer = StateGraph(MessagesState)
    outer.add_node("child", graph)
    outer.add_edge(START, "child")
    return outer.compile()


FORMS = [lambda each: each, enclosed, lambda each: each.with_retry()]


@pytest.mark.parametrize("form", FORMS, ids=["", "graph", "bound"])
async def test_a_compiled_sub_agent(form: Callable[[Any], Any], signals: Signals) -> None:
    """A compiled sub-agent must have limits of ours; with one store they are one budget."""
    ran: list[str] = []
    quota = searches(signals, 1)
    with pytest.raises(ValueError, match=r"'compiled' is compiled .*middleware=\[quota\].*leave_o"):
        deep(signals, quota, subagents=[compiled(form(child(signals, ran)))])
    spec = compiled(form(child(signals, ran, quota)))
    await deep(signals, quota, "compiled", subagents=[spec]).play()
    assert ran == ["search"]


async def test_what_is_left_out(signals: Signals) -> None:
    """Sub-agents that are left out are as deepagents has them: without limits."""
    ran: list[str] = []
    names = ["general-purpose", "researcher", "compiled"]
    subagents = [RESEARCHER, REMOTE, compiled(child(signals, ran))]
    options: dict[str, Any] = {"leave_out": [*names, "remote"], "subagents": subagents}
    quota = searches(signals, 0)
    scene = deep(signals, quota, *names, **options)
    # Every other warning of a test is an error.
    await scene.play()
    assert len(scene.ran) + len(ran) == 6
    # It is left out of that agent alone.
    bare = Scene(signals, asking(), [quota], create=deepagents.create_deep_agent)
    with pytest.warns(QuotaWarning, match="no limits of langchain-quota: 'general-purpose'"):
        await bare.play()


def test_bad_arguments(signals: Signals) -> None:
    """A bad argument is refused, with the argument, the value and the remedy.

    What runs elsewhere, or cannot be seen into, must be left out.
    """
    create, quota = deepagents.create_deep_agent, searches(signals)
    opaque = compiled(RunnableLambda(lambda state: {"messages": [("ai", "Nothing.")]}))
    bad: list[tuple[Any, str]] = [
        ([quota], r"and a QuotaMiddleware, not .* and \[.*: write with_limits\("),
        (searches(signals, store=None), r"quota has no store.*=MemoryStore\(\)"),
    ]
    bad_later: list[tuple[dict[str, Any], str]] = [
        ({"subagents": [opaque]}, "'compiled' is compiled without limits"),
        ({"subagents": [REMOTE]}, r"'remote' runs on another server.*leave_out=\['remote'"),
        ({"middleware": [searches(signals)]}, "middleware has a QuotaMiddleware .* put all limits"),
    ]
    for given, message in bad:
        with pytest.raises((TypeError, ValueError), match=message):
            with_limits(create, given)
    for options, message in bad_later:
        with pytest.raises((TypeError, ValueError), match=message):
            with_limits(create, quota)(model=ScriptedChatModel(script=[]), **options)
    with pytest.raises(ValueError, match=r"leave_out=\['remot'\] .* some of .'general-p.*'remote'"):
        with_limits(create, quota, leave_out=["remot"])(subagents=[REMOTE])


MINE = [Prompted("Mine")]


def declaring(model: str = "", middleware: Any = MINE, subagents: Any = (FORK,), **_: Any) -> Any:
    """Shows the middlewares and the sub-agents that it is given, both declared."""
    return [each.name for each in middleware], [each["name"] for each in subagents]


def passing_on(model: str = "", **options: Any) -> Any:
    """The same, not declared."""
    return declaring(model, **options)


def test_ways_to_give_arguments(signals: Signals) -> None:
    """Middlewares and sub-agents stay, however they are given; so does a quota in its place."""
    ways: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (declaring, (), {"middleware": MINE, "subagents": [FORK]}),
        (declaring, (), {"middleware": iter(MINE), "subagents": iter([FORK])}),
        (declaring, ("model",), {"middleware": MINE}),
        (passing_on, (), {"middleware": MINE, "subagents": [FORK]}),
        (partial(declaring, middleware=MINE, subagents=[FORK]), (), {}),
        (partial(passing_on, middleware=MINE, subagents=[FORK]), (), {}),
        (partial(declaring, "model", middleware=MINE), (), {"subagents": [FORK]}),
        (declaring, (), {}),
    ]
    quota = searches(signals)
    for create, args, options in ways:
        middleware, subagents = with_limits(create, quota)(*args, **options)
        assert middleware == ["Mine", "QuotaMiddleware"]
        assert subagents == ["general-purpose", "fork"]
    listed, _ = with_limits(declaring, quota)(middleware=[quota, *MINE])
    assert listed == ["QuotaMiddleware", "Mine"]


@kinds
async def test_what_is_made(kind: Any, signals: Signals) -> None:
    """The quota is behind those whose hooks can jump, an inline one first, in each sub-agent, too.

    `general-purpose` has the main agent's model as text, by which deepagents finds a profile.
    """
    given: list[Any] = []

    def create(model: str, *, middleware: Any = (), subagents: Any = ()) -> None:
        given.extend([middleware, subagents])

    limits: list[Limit] = [ToolCallLimit(run_limit=3)]
    quota = kind(limits, store=MemoryStore(), telemetry=signals.telemetry)
    spec = {**RESEARCHER, "middleware": MINE}
    with_limits(create, quota)("anthropic:claude", middleware=MINE, subagents=[spec])
    expected = [*MINE, quota] if kind is QuotaMiddleware else [quota, *MINE]
    middleware, (automatic, researcher) = given
    assert middleware == researcher["middleware"] == expected
    assert automatic["model"] == "anthropic:claude"
    assert spec["middleware"] == MINE
