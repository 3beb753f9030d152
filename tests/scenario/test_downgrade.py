"""A cheaper model before the end: from a share of a budget on, calls go to another model."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware, ModelFallbackMiddleware
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langgraph.graph import START, MessagesState, StateGraph

from langchain_quota import CostLimit, GraphQuota, MemoryStore, Quota, TokenLimit, max_usage
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.forked import run_python
from tests.scene import ANN, Scene, Weather, recording
from tests.stores import Clock
from tests.telemetry import Signals
from tests.tokens import MONEY, RETRY, ProviderError, answer, either, spent

METRIC = "langchain_quota_downgraded_calls_total"
DOLLARS_SPENT = "langchain_quota_spent_dollars_total"
OF = {"agent": "unnamed", "limit": "cost"}
DOLLARS = {"dear": Decimal("0.40"), "cheap": Decimal("0.05")}


def prices(used: ModelUsage) -> Decimal | None:
    """What a call of each of the two models costs."""
    return DOLLARS.get(used.request_model)


def model(name: str, *script: Any) -> ScriptedChatModel:
    return ScriptedChatModel(model=name, script=list(script))


@either
@pytest.mark.parametrize("options", [{}, {"reserve": max_usage}, {"quotas": True}])
async def test_from_a_share_on(kind: Any, options: Any, signals: Signals) -> None:
    """The calls from that share on are made, held and charged at the other model's price."""
    store = {"store": MemoryStore(), "context": ANN} if "quotas" in options else {}
    if store:
        options = {"quotas": [Quota(1, per="user_id")]}
    cheap = model("cheap", answer(12, "search"), answer(13))
    dear = model("dear", *[answer(10 + each, "search") for each in range(2)])
    limit = CostLimit(thread_limit=1, downgrade_to=cheap, **options)
    given: Any = {"kind": kind, "prices": prices, "tell_model": True, **store}
    scene = Scene(signals, dear, [limit], **given)
    await scene.play()
    assert (len(dear.calls), len(cheap.calls)) == (2, 2)
    assert spent(scene, MONEY)[0] == 900_000_000
    # It has the tools, and is told.
    assert cheap.calls[0].tools == ("search", "calc")
    assert "a cheaper model answers" in cheap.calls[0].messages[-1].text
    assert "cheaper" not in dear.calls[-1].messages[-1].text
    assert signals.value(METRIC, agent="unnamed", limit="cost") == 2
    spans = [dict(each.attributes or {}) for each in signals.spans()]
    marked = [
        each.get("langchain_quota.downgraded_by")
        for each in spans
        if "gen_ai.tool.name" not in each
    ]
    assert marked == [None, None, "cost", "cost"]


async def test_in_a_graph(signals: Signals) -> None:
    """A graph's model calls go to the other model, too, with the tools and the schema."""
    cheap = model("cheap", answer(12, ("Weather", {"degrees": 20})), answer(12))
    limit = CostLimit(run_limit=1, downgrade_to=cheap, downgrade_at=0.4)
    limits = GraphQuota([limit], prices=prices, telemetry=signals.telemetry)
    limited = limits.model(model("dear", answer(11, ("Weather", {"degrees": 10}))))
    structured, found = limited.with_structured_output(Weather), []

    async def node(_: Any) -> dict[str, Any]:
        found.extend([await structured.ainvoke("hi") for _ in range(2)])
        return {"messages": [await limited.bind_tools([recording("search", [])]).ainvoke("hi")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("node", node).add_edge(START, "node")
    await graph.compile().ainvoke({"messages": []})
    assert found == [Weather(degrees=10), Weather(degrees=20)]
    assert [each.tools for each in cheap.calls] == [("Weather",), ("search",)]
    assert signals.value(DOLLARS_SPENT, model="cheap", **OF) == 0.10


async def test_when_there_is_room_again(signals: Signals) -> None:
    """One scope that is near is enough; when none is any more, the first model comes back."""
    clock = Clock()
    quotas = [Quota(100, per="user_id", window="1h")]
    cheap = model("cheap", answer(5, "search"))
    dear = model("dear", answer(90, "search"), answer(6))

    def wait() -> None:
        if cheap.calls:
            clock.now += 3600

    limit = TokenLimit(run_limit=10_000, thread_limit=10_000, quotas=quotas, downgrade_to=cheap)
    given: Any = {"store": MemoryStore(clock=clock), "context": ANN}
    tools = [recording("search", [], wait)]
    await Scene(signals, dear, [limit], tools=tools, **given).play()
    assert (len(dear.calls), len(cheap.calls)) == (2, 1)


@either
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (ToolStrategy, answer(12, ("Weather", {"degrees": 20}))),
        (ProviderStrategy, answer(12, text='{"degrees": 20}')),
    ],
)
async def test_structured_answers(kind: Any, strategy: Any, said: Any, signals: Signals) -> None:
    """The other model delivers the structured response."""
    limit = CostLimit(run_limit=1, downgrade_to=model("cheap", said), downgrade_at=0.4)
    given: Any = {"kind": kind, "prices": prices, "response_format": strategy(Weather)}
    scene = Scene(signals, model("dear", answer(11, "search")), [limit], **given)
    await scene.play()
    assert scene.state()["structured_response"] == Weather(degrees=20)
    assert spent(scene, MONEY) == (450_000_000, 450_000_000)


@pytest.mark.parametrize("kind", ["quota", "graph"])
@pytest.mark.parametrize("how", ["messages", "events"])
async def test_streams(kind: Any, how: str, signals: Signals) -> None:
    """The other model's answer is streamed word by word, and charged at that model's price."""
    cheap = model("cheap", answer(12, text="It is blue."))
    limit = CostLimit(run_limit=1, downgrade_to=cheap, downgrade_at=0.4)
    dear = model("dear", answer(11, "search", text="So what?"))
    scene = Scene(signals, dear, [limit], kind=kind, prices=prices)
    given: Any = {"messages": [("user", "hi")]}
    if how == "messages":
        stream = scene.agent.astream(given, scene.config, stream_mode="messages")
        found = [each[0].text for each in [each async for each in stream] if each[0].type != "tool"]
    else:
        events = [each async for each in scene.agent.astream_events(given, scene.config)]
        chunks = [each for each in events if each["event"] == "on_chat_model_stream"]
        found = [each["data"]["chunk"].text for each in chunks]
    assert [each for each in found if each] == ["So", " what?", "It", " is", " blue."]
    assert signals.value(DOLLARS_SPENT, model="cheap", **OF) == 0.05


class Chooses(AgentMiddleware):
    """Chooses a model for each request."""

    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.chosen = chosen

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        chosen = self.chosen() if callable(self.chosen) else self.chosen
        return await handler(request.override(model=chosen))


@pytest.mark.parametrize(("order", "made"), [(1, (2, 0)), (-1, (1, 1))])
async def test_a_choice_per_request(order: int, made: Any, signals: Signals) -> None:
    """What a middleware behind the limits chooses stays; what one before them chooses does not."""
    cheap, chosen = model("cheap", answer(12)), model("chosen", answer(11, "search"), answer(12))
    limit = TokenLimit(run_limit=100, downgrade_to=cheap, downgrade_at=0.1)
    items: list[Any] = [limit, Chooses(chosen)]
    await Scene(signals, model("dear"), items[::order]).play()
    assert (len(chosen.calls), len(cheap.calls)) == made


async def test_a_model_made_for_each_attempt(signals: Signals) -> None:
    """A retry with a model made anew is no fallback: it goes to the other model, too."""
    failures, dear = [ProviderError()], list[ScriptedChatModel]()

    def fail_once(_: Any) -> Any:
        if failures:
            raise failures.pop()
        return answer(12)

    def choose() -> ScriptedChatModel:
        dear.append(model("dear", answer(11, "search")))
        return dear[-1]

    cheap = model("cheap")
    cheap.script = fail_once
    limit = TokenLimit(run_limit=100, downgrade_to=cheap, downgrade_at=0.1)
    await Scene(signals, model("any"), [RETRY, Chooses(choose), limit]).play()
    assert [len(each.calls) for each in (*dear, cheap)] == [1, 0, 0, 2]


@pytest.mark.parametrize("order", [1, -1])
async def test_a_fallback_stays(order: int, signals: Signals) -> None:
    """If the other model fails, a fallback answers, wherever its middleware is listed."""

    def fail(_: Any) -> Any:
        raise ProviderError

    cheap, spare = model("cheap"), model("spare", answer(12))
    cheap.script = fail
    limit = TokenLimit(run_limit=100, downgrade_to=cheap, downgrade_at=0.1)
    items: list[Any] = [limit, ModelFallbackMiddleware(spare)]
    scene = Scene(signals, model("dear", answer(11, "search")), items[::order])
    await scene.play()
    assert (len(cheap.calls), len(spare.calls)) == (1, 1)


PROGRAM = """
import pickle, sys
from pathlib import Path
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langchain_quota import QuotaMiddleware, TokenLimit
from langchain_quota.testing import ScriptedChatModel
from tests.tokens import answer

saved, saver = Path(sys.argv[1]), InMemorySaver()
config = {"configurable": {"thread_id": "7"}}
if saved.exists():
    storage, writes, blobs = pickle.loads(saved.read_bytes())
    for key, value in storage.items():
        saver.storage[key].update(value)
    saver.writes.update(writes)
    saver.blobs.update(blobs)
dear = ScriptedChatModel(model="dear", script=[answer(90, text="dear")])
cheap = ScriptedChatModel(model="cheap", script=[answer(5, text="cheap")])
quota = QuotaMiddleware([TokenLimit(thread_limit=100, downgrade_to=cheap)])
agent = create_agent(dear, [], middleware=[quota], checkpointer=saver, interrupt_before=["model"])
if not saved.exists():
    for _ in range(2):
        agent.invoke({"messages": [("user", "hi")]}, config)
        if not dear.calls:
            agent.invoke(None, config)
    storage = {key: dict(value) for key, value in saver.storage.items()}
    saved.write_bytes(pickle.dumps((storage, dict(saver.writes), dict(saver.blobs))))
else:
    agent.invoke(None, config)
print(agent.get_state(config).values["messages"][-1].text, len(dear.calls), len(cheap.calls))
"""


def test_resumed_in_another_process(tmp_path: Path) -> None:
    """A call that one process has checked goes to the other model in the process that makes it."""
    done = [run_python(PROGRAM, str(tmp_path / "saved")) for _ in range(2)]
    assert [each.stderr for each in done] == ["", ""]
    assert [each.stdout for each in done] == ["hi 1 0\n", "cheap 0 1\n"]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"downgrade_to": "gpt"}, TypeError, "downgrade_to must be a chat model"),
        ({"downgrade_at": 0}, ValueError, "downgrade_at must be above 0"),
        ({"downgrade_to": model("cheap"), "enforce": False}, ValueError, "needs enforce=True"),
    ],
)
def test_bad_arguments(options: Any, error: type[Exception], said: str) -> None:
    """An argument that cannot be used fails where it is given."""
    with pytest.raises(error, match=said):
        TokenLimit(run_limit=1, **options)
