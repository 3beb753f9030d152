"""Deep agents: their tools and sub-agents under limits; `with_limits` gives them in one line."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, BaseMessage, ToolCall
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
    ToolCallLimitExceededError,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, ToolRequest, Turn
from tests.scene import (
    ANN,
    CONFIG,
    Scene,
    check_history,
    model_limiter,
    recording,
    texts,
    tool_limiter,
)
from tests.telemetry import Signals, needs_inline

# Among the oldest versions there is none.
deepagents = pytest.importorskip("deepagents")

CREATE = deepagents.create_deep_agent
TASK = "Find it!"
SPEC = {"description": "Helps.", "system_prompt": "Help."}
RESEARCHER = {"name": "researcher", **SPEC}
FORK = {"name": "fork", "description": "Goes on.", "mode": "fork"}
REMOTE = {"name": "remote", "description": "Far away.", "graph_id": "remote"}

kinds = pytest.mark.parametrize(
    "kind", [QuotaMiddleware, pytest.param(InlineQuotaMiddleware, marks=needs_inline)]
)


def task(name: str = "general-purpose") -> tuple[str, dict[str, Any]]:
    return "task", {"description": TASK, "subagent_type": name}


def asking(
    *names: str, main: Sequence[ToolRequest] = (), child: Any = ("search", "search")
) -> Callable[[Sequence[BaseMessage]], Turn]:
    """A script by which the main agent asks sub-agents, and each does one thing."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if messages[-1].type != "human":
            return "done"
        return child if TASK in messages[-1].text else [*main, *map(task, names)]

    return script


def searches(signals: Signals, limit: int = 3, **options: Any) -> QuotaMiddleware[Any, Any]:
    options = {"store": MemoryStore(), **options}
    limits = [ToolCallLimit("search", thread_limit=limit)]
    return QuotaMiddleware(limits, telemetry=signals.telemetry, **options)


def deep(signals: Signals, quota: Any, *names: str, **options: Any) -> Scene:
    """A deep agent under limits that asks these sub-agents, each of which searches twice."""
    leave_out = options.pop("leave_out", ())
    create = with_limits(CREATE, quota, leave_out=leave_out)
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
    limited = with_limits(CREATE, searches(signals, 9))
    skill = {"content": "---\nname: knots\ndescription: Knots.\n---\nTie.\n", "encoding": "utf-8"}
    given = {"messages": [("user", "Go!")], "files": {"/skills/knots/SKILL.md": skill}}
    sent = []
    for create in (CREATE, limited):
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
    bare = Scene(signals, asking(), [quota], create=CREATE)
    with pytest.warns(QuotaWarning, match="no limits of langchain-quota: 'general-purpose'"):
        await bare.play()


def test_bad_arguments(signals: Signals) -> None:
    """A bad argument is refused, with the argument, the value and the remedy."""
    create, quota = CREATE, searches(signals)
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


@pytest.mark.filterwarnings("ignore:the sub-agents that the tool 'task'")
async def test_an_error(signals: Signals) -> None:
    """What an `error` stopped is refunded, though its calls are answered before our hooks run."""
    raising = tool_limiter(signals, "search", run_limit=2, exit_behavior="error")
    limits: list[Any] = [raising, ToolCallLimit("search", thread_limit=9, name="thread")]
    scene = Scene(signals, [["search"] * 3, ["search"] * 2, "done"], limits, create=CREATE)
    with pytest.raises(ToolCallLimitExceededError):
        await scene.play()
    result = await scene.play()
    assert scene.ran == ["search"] * 2
    assert scene.usage().tools == {"search": 2}
    check_history(result["messages"])


@pytest.mark.parametrize("own", ["", "So far: nothing."])
@pytest.mark.parametrize(
    "limit",
    [
        ModelCallLimit(run_limit=2, exit_behavior="finalize"),
        ModelCallLimit(run_limit=2),
        ToolCallLimit("search", run_limit=2, exit_behavior="end"),
    ],
)
async def test_a_sub_agent_that_a_limit_ends(limit: Limit, own: str, signals: Signals) -> None:
    """It returns a text: that of its last answer, or the limit's."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        calls = [ToolCall(name="search", args={}, id=uuid4().hex) for _ in range(2)]
        return AIMessage(own, tool_calls=calls)

    held = QuotaMiddleware[Any, Any]([limit], telemetry=signals.telemetry)
    model = ScriptedChatModel(script=script)
    finder = {"name": "finder", "model": model, "middleware": [held], **SPEC}
    scene = Scene(signals, [[task("finder")], "done"], create=CREATE, subagents=[finder])
    (answer,) = texts(await scene.play())
    assert answer == own if own and limit.exit_behavior == "finalize" else "limit" in answer


async def test_the_warning(signals: Signals) -> None:
    """The first model call warns, once, of sub-agents without limits; each agent is looked at."""
    limited = QuotaMiddleware[Any, Any]([ModelCallLimit(run_limit=9)], telemetry=signals.telemetry)
    subagents = [{"name": "limited", "middleware": [limited], **SPEC}, {"name": "bare", **SPEC}]

    def scene(*subagents: Any) -> Scene:
        return Scene(signals, ["done"] * 2, [limited], create=CREATE, subagents=subagents)

    for _ in range(2):
        there = scene(*subagents)
        with pytest.warns(QuotaWarning) as caught:
            await there.play()
        (warning,) = caught
        assert str(warning.message) == (
            "the sub-agents that the tool 'task' of agent 'unnamed' starts have no limits of "
            "langchain-quota: 'general-purpose', 'bare'. Give them their parent's limits: "
            "with_limits(create_deep_agent, quota)(…)"
        )
        # Every other warning of a test is an error.
        await there.play()
    await scene({"name": "general-purpose", "middleware": [limited], **SPEC}).play()
