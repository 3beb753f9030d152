"""A code interpreter calls tools where no limit sees it: no agent calls a limited tool that way."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import (
    InlineQuotaMiddleware,
    MemoryStore,
    ModelCallLimit,
    ModelCallLimitMiddleware,
    QuotaMiddleware,
    QuotaWarning,
    RepeatLimit,
    Telemetry,
    ToolCallLimit,
    with_limits,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel, Turn
from tests.scene import CONFIG, Form, both_forms, recording
from tests.signals import needs_inline

# Among the oldest versions there are none.
deepagents = pytest.importorskip("deepagents")
quickjs = pytest.importorskip("langchain_quickjs")

pytestmark = pytest.mark.filterwarnings("ignore:The class `CodeInterpreterMiddleware` is in beta")

GO: dict[str, Any] = {"messages": [("user", "Go!")]}
SEARCHES = "for (let i = 0; i < 30; i++) await tools.search({}); 'all ran'"
TASKS = (
    "for (let i = 0; i < 3; i++) "
    "await task({description: 'Look for it.', subagentType: 'general-purpose'}); 'all ran'"
)
UNSEEN = (
    "limit {limit!r} does not see what code calls: CodeInterpreterMiddleware calls {names} inside "
    "its tool 'eval'. So {remedy}"
)


def interpreter(**options: Any) -> Any:
    # By default it gives code five seconds, which a busy machine may need to begin.
    return quickjs.CodeInterpreterMiddleware(timeout=120, **options)


def model(code: str = SEARCHES, *, evals: int = 1) -> ScriptedChatModel:
    """A model that runs code, so many times in a row; a sub-agent searches once."""

    def script(messages: Sequence[BaseMessage]) -> Turn:
        if "Look for it." in messages[-1].text:
            return ["search"]
        turns = sum(each.type == "tool" for each in messages)
        return [("eval", {"code": code})] if turns < evals else "done"

    return ScriptedChatModel(script=script)


class Bench:
    """Agents that search, and what became of it."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.search = recording("search", self.ran)
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(registry=self.registry, count_unjudged_calls=True)

    def quota(
        self, *limits: Limit, kind: Callable[..., Any] = QuotaMiddleware, **options: Any
    ) -> Any:
        return kind(limits, telemetry=self.telemetry, **options)

    def deep_agent(
        self, limit: Limit, *middleware: Any, code: str = SEARCHES, **options: Any
    ) -> Any:
        create = with_limits(deepagents.create_deep_agent, self.quota(limit, store=MemoryStore()))
        return create(model(code), [self.search], middleware=middleware, **options)

    def agent(self, *middleware: Any, playing: ScriptedChatModel | None = None) -> Any:
        playing = playing or model()
        saver = InMemorySaver()
        return create_agent(playing, [self.search], middleware=middleware, checkpointer=saver)

    @property
    def unjudged(self) -> dict[str, float]:
        """How many calls no limit judged, by kind."""
        return {
            sample.labels["kind"]: sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "langchain_quota_unjudged_calls_total"
        }


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def run(agent: Any, form: Form = "async") -> list[BaseMessage]:
    result = agent.invoke(GO, CONFIG) if form == "sync" else await agent.ainvoke(GO, CONFIG)
    messages: list[BaseMessage] = result["messages"]
    return messages


def says(limit: str, names: str, remedy: str) -> str:
    return UNSEEN.format(limit=limit, names=names, remedy=remedy)


TAKE_OUT = "take 'search' out of its ptc=[…]"
BUILDS: dict[str, tuple[Limit, dict[str, Any], str]] = {
    "a name": (
        ToolCallLimit("search", run_limit=2),
        {"ptc": ["search"]},
        says("tool:search", "'search'", TAKE_OUT),
    ),
    "a tool": (
        ToolCallLimit("search", run_limit=2),
        {"ptc": [recording("search", [])]},
        says("tool:search", "'search'", TAKE_OUT),
    ),
    "calls at once": (
        ToolCallLimit("search", at_once=2),
        {"ptc": ["search"], "subagents": False},
        says("tool:search", "'search'", TAKE_OUT),
    ),
    "repeats": (
        RepeatLimit(2, tools="search"),
        {"ptc": ["search"], "subagents": False},
        says("repeats", "'search'", TAKE_OUT),
    ),
    "sub-agents": (
        ToolCallLimit("task", run_limit=2),
        {},
        says("tool:task", "'task'", "give it subagents=False"),
    ),
    "all tools": (
        ToolCallLimit(run_limit=20),
        {"ptc": ["search", "read_file"]},
        says(
            "tool:*",
            "'search', 'read_file', 'task'",
            "take 'search', 'read_file' out of its ptc=[…] and give it subagents=False. Or leave "
            "them out of the limit: exclude=('search', 'read_file', 'task')",
        ),
    ),
    "all tools but one": (
        ToolCallLimit(run_limit=20, exclude=("task",)),
        {"ptc": ["search"]},
        says(
            "tool:*-task",
            "'search'",
            f"{TAKE_OUT}. Or leave them out of the limit: exclude=('search',)",
        ),
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_a_deep_agent_is_not_built(case: str, bench: Bench) -> None:
    """An agent whose code could call a limited tool is not built, and the error says what to do."""
    limit, options, text = BUILDS[case]
    with pytest.raises(ValueError, match="main agent") as caught:
        bench.deep_agent(limit, interpreter(**options))

    assert str(caught.value) == f"the main agent: {text}"


@pytest.mark.parametrize("limits", ["common", "own"])
def test_a_sub_agent_is_not_built(limits: str, bench: Bench) -> None:
    """The code of a declared sub-agent goes past no limit: the common ones, or those of its own."""
    search = ToolCallLimit("search", run_limit=2)
    middleware = [interpreter(ptc=["search"])]
    common: Limit = search
    if limits == "own":
        common = ModelCallLimit(run_limit=9)
        middleware.append(bench.quota(search))
    spec = {
        "name": "coder",
        "description": "Writes code.",
        "system_prompt": "Write code.",
        "middleware": middleware,
    }
    with pytest.raises(ValueError, match="sub-agent") as caught:
        bench.deep_agent(common, subagents=[spec])

    text = says("tool:search", "'search'", TAKE_OUT)
    assert str(caught.value) == f"sub-agent 'coder': {text}"


def test_an_interpreter_from_a_function_of_the_callers(bench: Bench) -> None:
    """An interpreter that the caller's own function adds is found, too."""

    def create(*args: Any, middleware: Sequence[Any] = (), **options: Any) -> Any:
        middleware = [*middleware, interpreter(ptc=["search"])]
        return deepagents.create_deep_agent(*args, middleware=middleware, **options)

    limit = ToolCallLimit("search", run_limit=2)
    limited = with_limits(create, bench.quota(limit, store=MemoryStore()))
    with pytest.raises(ValueError, match="limit 'tool:search' does not see what code calls"):
        limited(model(), [bench.search])


FREE: dict[str, tuple[Limit, dict[str, Any], str, dict[str, float]]] = {
    "no limit of tools": (ModelCallLimit(run_limit=99), {}, SEARCHES, {"tool": 30}),
    "another tool": (ToolCallLimit("read_file", run_limit=1), {}, SEARCHES, {"tool": 30}),
    "excluded": (
        ToolCallLimit(run_limit=1, exclude=("search", "task")),
        {},
        SEARCHES,
        {"tool": 30},
    ),
    "no sub-agents": (
        ToolCallLimit(run_limit=1, exclude=("search",)),
        {"subagents": False},
        SEARCHES,
        {"tool": 30},
    ),
    "no tools": (ToolCallLimit("search", run_limit=1), {"ptc": None}, TASKS, {"tool": 3}),
}


@pytest.mark.parametrize("case", FREE)
async def test_what_no_limit_matches_runs(case: str, bench: Bench) -> None:
    """Code calls what no limit matches, as often as it likes; its calls of tools are counted."""
    limit, options, code, unjudged = FREE[case]
    agent = bench.deep_agent(limit, interpreter(**{"ptc": ["search"], **options}), code=code)

    answer = (await run(agent))[-2]

    assert answer.text == "<result>all ran</result>"
    assert len(bench.ran) == (30 if code == SEARCHES else 3)
    assert bench.unjudged == unjudged


@both_forms
async def test_a_bound_for_code(form: Form, bench: Bench) -> None:
    """A limit on `eval` and `max_ptc_calls` bound together how often code calls a tool."""
    limit = ToolCallLimit("eval", run_limit=2)
    code = interpreter(ptc=["search"], max_ptc_calls=3)
    agent = bench.agent(bench.quota(limit), code, playing=model(evals=4))

    await run(agent, form)

    assert len(bench.ran) == 2 * 3


LIMITERS: dict[str, Callable[[Bench, Limit], Any]] = {
    "quota": lambda bench, limit: bench.quota(limit),
    "inline": lambda bench, limit: bench.quota(limit, kind=InlineQuotaMiddleware),
}


@both_forms
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("limiter", ["quota", pytest.param("inline", marks=needs_inline)])
async def test_an_agent_does_not_run(limiter: str, place: str, form: Form, bench: Bench) -> None:
    """No run of such an agent calls its model or a tool, in whatever order its middlewares are."""
    middleware = [
        LIMITERS[limiter](bench, ToolCallLimit("search", run_limit=2)),
        interpreter(ptc=["search"]),
    ]
    playing = model()
    agent = bench.agent(*(middleware if place == "before" else middleware[::-1]), playing=playing)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not see what code calls"):
            await run(agent, form)

    assert (playing.calls, bench.ran) == ((), [])


async def test_a_deep_agent_without_with_limits_does_not_run(bench: Bench) -> None:
    """The limits of a deep agent's own middleware are not gone past by `task()` either."""
    quota = bench.quota(ToolCallLimit("task", run_limit=1))
    agent = deepagents.create_deep_agent(
        model(TASKS), [bench.search], middleware=[quota, interpreter()]
    )

    # Its sub-agents have no limits, which is said, too.
    with (
        pytest.warns(QuotaWarning, match="the sub-agents"),
        pytest.raises(RuntimeError, match="give it subagents=False"),
    ):
        await run(agent)

    assert bench.ran == []


async def test_a_compiled_sub_agent_does_not_run(bench: Bench) -> None:
    """A compiled sub-agent's code goes past no limit: its first run says so."""
    limit = ToolCallLimit("search", run_limit=2)
    coder = bench.agent(bench.quota(limit), interpreter(ptc=["search"]))
    spec = {"name": "general-purpose", "description": "Writes code.", "runnable": coder}
    asked = {"description": "Write code.", "subagent_type": "general-purpose"}
    agent = with_limits(
        deepagents.create_deep_agent, bench.quota(ModelCallLimit(run_limit=9), store=MemoryStore())
    )(ScriptedChatModel(script=[[("task", asked)], "done"]), subagents=[spec])

    with pytest.raises(RuntimeError, match="does not see what code calls"):
        await run(agent)

    assert bench.ran == []


async def test_a_limit_on_trial_warns(bench: Bench) -> None:
    """A limit on trial stops no agent; a warning says that it does not see what code calls."""
    limit = ToolCallLimit("search", run_limit=2, enforce=False)
    agent = bench.agent(bench.quota(limit), interpreter(ptc=["search"]))

    with pytest.warns(QuotaWarning) as caught:
        await run(agent)

    (warning,) = caught
    assert str(warning.message) == says("tool:search", "'search'", TAKE_OUT)
    assert len(bench.ran) == 30
    assert bench.unjudged == {"tool": 30}


async def test_a_limit_of_models_only(bench: Bench) -> None:
    """A middleware that limits model calls alone lets code call any tool."""
    limiter = ModelCallLimitMiddleware(run_limit=9, telemetry=bench.telemetry)

    await run(bench.agent(limiter, interpreter(ptc=["search"])))

    assert len(bench.ran) == 30


def test_an_interpreter_that_cannot_be_read(bench: Bench) -> None:
    """If its settings have other names, as in another version, its code may call any tool."""
    code = interpreter(subagents=False)
    del code._ptc
    with pytest.raises(ValueError, match="does not see what code calls"):
        bench.deep_agent(ToolCallLimit("search", run_limit=2), code)


async def test_tools_of_the_same_names(bench: Bench) -> None:
    """A tool that is only called like the interpreter's, or like deepagents', is a usual tool."""

    def task(name: str) -> str:
        """Do a task."""
        return name

    evaluate = recording("eval", bench.ran)
    quota = bench.quota(ToolCallLimit(run_limit=1, exclude=("search",)))
    for given, code in (([evaluate, bench.search], ()), ([task], (interpreter(),))):
        playing = ScriptedChatModel(script=["done"])
        agent = create_agent(playing, given, middleware=[quota, *code])
        assert (await run(agent))[-1].text == "done"
