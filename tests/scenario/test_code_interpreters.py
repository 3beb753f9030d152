"""A code interpreter calls tools where no limit sees it: no agent calls a limited tool that way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from langchain_quota import (
    ConcurrencyLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import CONFIG, Form, Kind, Order, Scene, either, in_order, orders, recording
from tests.telemetry import Signals

# Among the oldest versions there are none.
deepagents = pytest.importorskip("deepagents")
quickjs = pytest.importorskip("langchain_quickjs")

pytestmark = pytest.mark.filterwarnings("ignore:The class `CodeInterpreterMiddleware` is in beta")

SEARCHES = "for (let i = 0; i < 9; i++) await tools.search({}); 'all ran'"
TASK = "task({description: 'Look for it.', subagentType: 'general-purpose'})"
TASKS = f"const asked = [1, 2, 3, 4].map(() => {TASK}); await Promise.all(asked); 'all ran'"
TWICE = ToolCallLimit("search", run_limit=2)


def interpreter(**options: Any) -> Any:
    # By default it gives code five seconds, which a busy machine may need to begin.
    return quickjs.CodeInterpreterMiddleware(timeout=120, **options)


def script(code: str = SEARCHES, evals: int = 1) -> Any:
    """Code, run so many times in a row; a sub-agent searches twice at once."""

    def play(messages: Sequence[BaseMessage]) -> Turn:
        turns = sum(each.type == "tool" for each in messages)
        if "Look for it." in messages[-1].text:
            return ["search", "search"]
        return "done" if turns >= evals or (turns and evals == 1) else [("eval", {"code": code})]

    return play


def held(signals: Signals, *limits: Limit) -> QuotaMiddleware[Any, Any]:
    return QuotaMiddleware(limits, store=MemoryStore(), telemetry=signals.telemetry)


def deep(signals: Signals, limit: Limit, *middleware: Any, ran: Any = (), **options: Any) -> Any:
    """A deep agent with `with_limits`."""
    create = with_limits(deepagents.create_deep_agent, held(signals, limit))
    model = options.pop("model", None) or ScriptedChatModel(script=script())
    return create(model, [recording("search", ran)], middleware=middleware, **options)


GO: Any = {"messages": [("user", "Go!")]}
FORMS: dict[str, Form] = {"quota": "sync", "inline": "async"}


@pytest.mark.parametrize(
    ("limit", "tools", "names"),
    [
        (TWICE, [recording("search", [])], "'search'"),
        (ConcurrencyLimit("search", max_concurrency=2), ["search"], "'search'"),
        (ToolCallLimit(run_limit=20), ["search", "read_file"], "'search', 'read_file', 'task'"),
    ],
    ids=["calls", "calls at once", "all tools"],
)
async def test_a_deep_agent_does_not_run(
    limit: Limit, tools: Any, names: str, signals: Signals
) -> None:
    """An agent whose code could call a limited tool does not run, and the error says what to do."""
    with pytest.raises(RuntimeError) as caught:
        await deep(signals, limit, interpreter(ptc=tools)).ainvoke(GO, CONFIG)
    assert str(caught.value) == (
        f"limit {limit.name!r} does not see what code calls: CodeInterpreterMiddleware calls "
        f"{names} inside its tool 'eval'. Take tools out of its ptc=[…], and give it "
        "subagents=False for 'task'; or leave them out of a limit of all tools: exclude=(…)"
    )


@pytest.mark.parametrize("own", [False, True])
async def test_a_sub_agent_does_not_run(*, own: bool, signals: Signals) -> None:
    """The code of a declared sub-agent goes past no limit: the common ones, or those of its own."""
    spec: dict[str, Any] = {"name": "coder", "description": "Writes.", "system_prompt": "Write."}
    spec["middleware"] = [interpreter(ptc=["search"]), *([held(signals, TWICE)] if own else [])]
    ran, asked = list[str](), ("task", {"description": "Write.", "subagent_type": "coder"})
    options: dict[str, Any] = {"subagents": [spec], "model": ScriptedChatModel(script=[[asked]])}
    agent = deep(signals, ModelCallLimit(run_limit=9) if own else TWICE, ran=ran, **options)
    with pytest.raises(RuntimeError, match=r"calls 'search' inside its tool 'eval'"):
        await agent.ainvoke(GO, CONFIG)
    assert not ran


async def test_an_interpreter_that_cannot_be_read(signals: Signals) -> None:
    """If its settings have other names, as in another version, its code may call any tool."""
    code = interpreter(subagents=False)
    del code._ptc
    with pytest.raises(RuntimeError, match="does not see what code calls"):
        await Scene(signals, script(), [TWICE, code]).play()


@pytest.mark.parametrize(
    ("limit", "subagents"),
    [
        (ToolCallLimit(run_limit=1, exclude=("search", "task")), True),
        (ToolCallLimit(run_limit=1, exclude=("search",)), False),
        (replace(TWICE, enforce=False), True),
    ],
)
async def test_what_nothing_holds_runs(*, limit: Limit, subagents: bool, signals: Signals) -> None:
    """Code calls what no limit matches, or only one in a dry run, as often as it likes."""
    ran = list[str]()
    code = interpreter(ptc=["search"], subagents=subagents)
    result = await deep(signals, limit, code, ran=ran).ainvoke(GO, CONFIG)
    assert result["messages"][-2].text == "<result>all ran</result>"
    assert len(ran) == 9


async def test_sub_agents_of_code_share_a_budget(signals: Signals) -> None:
    """Sub-agents that code starts at once are held to the limits, and to one budget of the run."""
    limit, ran = ToolCallLimit("search", quotas=[Quota(3, per="root_run")]), list[str]()
    model = ScriptedChatModel(script=script(TASKS))
    await deep(signals, limit, interpreter(), ran=ran, model=model).ainvoke(GO, CONFIG)
    assert len(ran) == 3


async def test_a_bound_for_code(signals: Signals) -> None:
    """A limit on `eval` and `max_ptc_calls` bound together how often code calls a tool."""
    items = [ToolCallLimit("eval", run_limit=2), interpreter(ptc=["search"], max_ptc_calls=3)]
    scene = await Scene(signals, script(evals=4), items).played()
    assert scene.ran == ["search"] * 2 * 3


@either
@orders(2)
async def test_an_agent_does_not_run(kind: Kind, order: Order, signals: Signals) -> None:
    """No run of such an agent calls its model or a tool, in whatever order its middlewares are."""
    items, form = in_order(order, TWICE, interpreter(ptc=["search"])), FORMS[kind]
    scene = Scene(signals, script(), items, kind=kind, form=form)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not see what code calls"):
            await scene.play()
    assert (scene.model.calls, scene.ran) == ((), [])


async def test_a_tool_of_the_same_name(signals: Signals) -> None:
    """A tool that is only called like the interpreter's is a usual tool."""
    limit = ToolCallLimit(run_limit=1, exclude=("search",))
    scene = Scene(signals, ["done"], [limit], tools=("eval", "search"))
    assert (await scene.play())["messages"][-1].text == "done"
