"""Budgets of tokens: model calls are charged what they have used, and refused when it is all.

Whatever the form of a provider's report, never less is charged than its total says.
"""

import asyncio
import json
import pickle
from collections.abc import Iterator
from contextlib import suppress
from http.client import IncompleteRead
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from langchain_quota import (
    CostLimit,
    ModelCallLimit,
    ModelCallLimitExceededError,
    Price,
    QuotaMiddleware,
    QuotaWarning,
    TokenLimit,
    ToolCallLimit,
    ToolCallLimitExceededError,
)
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Kind, Order, Scene, each_kind, either, in_order, model_limiter, orders
from tests.telemetry import Signals, telling
from tests.tokens import TOTAL, answer, asking, spent, spent_by_agent

ROOMY = TokenLimit(run_limit=10**6, thread_limit=10**6)


IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 10_000}"}}
TEXT = {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("asked", "said", "tokens"),
    [
        pytest.param("", "x" * 3000, (0, 1000), id="letters"),
        pytest.param("x" * 300_000, "7" * 100_000, (100_000, 33_334), id="long"),
        pytest.param("", "你好世界", (0, 4), id="Chinese"),
        pytest.param("", "\ud800", (0, 1), id="broken"),
        pytest.param([IMAGE], "Yes.", (1000, 2), id="image"),
        pytest.param([IMAGE, TEXT], "", (1002, 0), id="image and text"),
    ],
)
async def test_unreported_tokens_are_a_third_of_the_bytes(
    signals: Signals, asked: Any, said: str, tokens: tuple[int, int]
) -> None:
    """A model that reports nothing is charged a token for three bytes, marked as estimated."""
    limits = [
        TokenLimit(run_limit=10**6, tokens="input"),
        TokenLimit(run_limit=10**6, tokens="output"),
    ]
    scene = Scene(signals, [said], limits, tools=())
    with pytest.warns(QuotaWarning, match="reports no usage"):
        await scene.play(asked)
    used = scene.usage().run_spent
    assert (used["model.input_tokens"], used["model.output_tokens"]) == tokens
    assert runs(signals) == {("estimated",): 1, ("reported",): 0}


async def test_tokens_from_the_cache_need_not_count(signals: Signals) -> None:
    """`uncached` leaves out what the provider reads from its cache, and nothing else."""
    details: Any = {"cache_read": 900, "cache_creation": 50}
    said = answer(1_020, "search", input_tokens=1_000, input_token_details=details)
    limit = TokenLimit(run_limit=240, tokens="uncached", reserve=100)
    scene = await Scene(signals, [said, said, said], [limit]).played()
    assert scene.usage().run_spent == {"model.uncached_tokens": 240}
    assert (scene.ran, scene.last_text()) == (
        ["search", "search"],
        "Token limits exceeded: run limit (240/240 tokens)",
    )


@each_kind
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (ToolCallLimit("search", run_limit=2, exit_behavior="error"), ({"search": 2}, 0, {})),
        (ModelCallLimit(run_limit=3, exit_behavior="error"), ({}, 3, {})),
        (TokenLimit(run_limit=30, exit_behavior="error"), ({}, 3, {TOTAL: 30})),
        (TokenLimit(run_limit=35, exit_behavior="error", reserve=8), ({}, 3, {TOTAL: 30})),
    ],
    ids=["tools", "model", "tokens", "reserve"],
)
async def test_an_error_carries_the_work(
    limit: Limit, expected: Any, kind: Kind, signals: Signals, caplog: Any
) -> None:
    """It has the messages and counts up to the refusal; no text, pickle, log or span has them."""
    script = [answer(10, ("search", {"q": str(n)})) for n in range(4)]
    scene = Scene(signals, script, [limit], kind=kind, checkpointer=None)
    with pytest.raises((ModelCallLimitExceededError, ToolCallLimitExceededError)) as raised:
        await scene.play("my secret")
    error = raised.value
    asked = [each.text for each in error.messages if each.type == "human"]
    answered = [each.text for each in error.messages if each.type == "tool"]
    assert (asked, len(answered)) == (["my secret"], len(scene.ran))
    used = error.usage
    assert used is not None
    counted = (used.run_tools, used.run_model, used.run_spent)
    assert counted == expected
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    assert (copied.messages, copied.usage, copied.decision) == ((), None, error.decision)
    spans = [span.to_json() for span in signals.spans()]
    assert "my secret" not in f"{error!r}{error}{pickle.dumps(error)!r}{caplog.text}{spans}"


def runs(signals: Signals) -> dict[tuple[str, ...], float]:
    """The model runs, by whether their use was estimated."""
    name = "langchain_quota_model_runs_total"
    return signals.samples(name, agent="unnamed", model="unnamed", price="none")


@pytest.mark.filterwarnings("ignore:model 'unnamed' reports no usage")
@pytest.mark.parametrize(
    ("name", "nonsense"),
    [("input_tokens", -5), ("input_tokens", "1"), ("total_tokens", True), ("input_tokens", 10**30)],
)
async def test_what_is_no_report(signals: Signals, name: str, nonsense: Any) -> None:
    """A number that tokens cannot have makes the report worthless: the run is estimated."""
    script = [answer(900, **{name: nonsense})]
    # Such a report cannot be kept in a checkpoint.
    scene = Scene(signals, script, [TokenLimit(run_limit=10**6)], tools=(), checkpointer=None)
    await scene.play()
    assert spent_by_agent(signals) == {"unnamed": 3}
    assert runs(signals) == {("estimated",): 1, ("reported",): 0}


def named(name: str, *kinds: type[BaseException], **attributes: Any) -> BaseException:
    """An error as a client's package has it, with the names of its classes."""
    kind: type[BaseException] = type(name, kinds or (Exception,), attributes)
    return kind("It failed.")


HTTP_ERROR: Any = type("HTTPError", (OSError,), {})
GOOGLE: Any = type("GoogleAPICallError", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "is_paid"),
    [
        (named("ChunkedEncodingError"), True),
        (IncompleteRead(b""), True),
        (asyncio.IncompleteReadError(b"", 5), True),
        (json.JSONDecodeError("no answer", "{", 1), True),
        (named("ConnectionClosedError", code=1011), True),
        (named("DeadlineExceeded", GOOGLE, code=504), True),
        (named("Failed", code=503), False),
        (named("TooManyRequests", HTTP_ERROR, code=429), False),
        (named("APIStatusError", status_code=503), False),
        (named("NewConnectionError", TimeoutError), False),
    ],
    ids=repr,
)
async def test_an_error_shows_whether_the_call_may_be_paid(
    signals: Signals, error: BaseException, *, is_paid: bool
) -> None:
    """What breaks when something was sent may be paid; what was refused or not sent is not."""
    scene = Scene(signals, [error], [ROOMY], tools=())
    with pytest.raises(type(error)):
        await scene.play("How do you do?")
    assert spent_by_agent(signals).get("unnamed", 0) == (5 if is_paid else 0)


@orders(2)
async def test_beside_a_second_limit_of_models(order: Order, signals: Signals) -> None:
    """A second middleware that counts model calls is an error, which says what to do."""
    costs = CostLimit(run_limit=1)
    # LangChain tells two middlewares apart by their classes.
    second = type("OtherQuota", (QuotaMiddleware,), {})
    quota = second([costs], prices=lambda _: None, telemetry=signals.telemetry)
    for other in (quota, model_limiter(signals, run_limit=4)):
        scene = Scene(signals, [], in_order(order, ROOMY, other))
        with pytest.raises(RuntimeError, match="all model limits into one QuotaMiddleware"):
            await scene.play()


BRANCHED = TokenLimit(run_limit=1000, thread_limit=1000)


def before_call(scene: Scene, calls: int) -> Any:
    """The oldest checkpoint with so many answers of the model."""
    *_, found = (
        each.config
        for each in scene.agent.get_state_history(scene.config)
        if sum(isinstance(one, AIMessage) for one in each.values.get("messages", ())) == calls
        and each.values.get("langchain_quota", {}).get("run")
    )
    return found


@either
@pytest.mark.parametrize(("calls", "tokens"), [(0, 3), (1, 13), (2, 33)])
async def test_a_branch_has_what_came_before_it(
    signals: Signals, kind: Kind, calls: int, tokens: int
) -> None:
    """A branch is charged what came before it and its own, and not refused for what it replaces."""
    script = [answer(10, "search"), answer(20, "search"), answer(970), answer(3)]
    scene = await Scene(signals, script, [BRANCHED], kind=kind).played()
    assert spent(scene)[0] == 1000
    await scene.agent.ainvoke(None, before_call(scene, calls))
    assert spent(scene)[0] == tokens


async def test_models_of_tools_belong_to_their_branch(signals: Signals) -> None:
    """With `charge_all_models` a branch is charged its own tools' models, and no other's."""
    model = ScriptedChatModel(script=[answer(100), answer(200), answer(300)])
    tools = [asking("search", model, return_direct=True)]
    script = [answer(10, "search"), answer(20, "search"), answer(3)]
    scene = await Scene(signals, script, [BRANCHED], tools=tools, charge_all_models=True).played()
    await scene.agent.ainvoke(None, before_call(scene, 0))
    await scene.play()
    assert spent(scene)[0] == 223


PRICE: Any = {"input": 1, "output": 10, "cache_read": "0.1", "cache_creation": "1.25"}
TABLE = {"claude": Price(**PRICE, cache_creation_1h=2)}
LIMITS: list[Limit] = [
    *(TokenLimit(enforce=False, tokens=kind) for kind in ("input", "output", "total")),
    CostLimit(enforce=False),
]
LONG = "word " * 600
"""3,000 bytes, which are estimated as 1,000 tokens."""


def said(*tokens: int, text: Any = "Yes.", args: Any = None, **more: Any) -> AIMessage:
    """An answer that reports input, output and perhaps a total; `more` are details, or its own."""
    details = {name: more.pop(name) for name in [*more] if isinstance(more[name], int)}
    calls = [{"name": "none", "args": args, "id": "1"}] if args else []
    return AIMessage(text, tool_calls=calls, usage_metadata=report(*tokens, **details), **more)


def report(given: int, made: int, total: int = 0, reasoning: int = 0, **details: int) -> Any:
    told = {"input_tokens": given, "output_tokens": made, "total_tokens": total or given + made}
    parts = {"output_token_details": {"reasoning": reasoning}, "input_token_details": details}
    return told | parts


def part(text: Any = "", *tokens: int) -> AIMessageChunk:
    """A chunk of a stream, with a report or without one."""
    return AIMessageChunk(content=text, usage_metadata=report(*tokens) if tokens else None)


def iterations(*tokens: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """What Anthropic says beside its sum: input, output and written cache of each iteration."""
    names = ("input_tokens", "output_tokens", "cache_creation_input_tokens")
    parts = [{**dict(zip(names, each, strict=True)), **more} for each in tokens]
    return {"response_metadata": {"usage": {"iterations": parts}}}


COMPACTED = [{"type": "compaction", "content": "w" * 300, "index": 0}]
CUT_OFF = [*[part(LONG)] * 3, ConnectionError()]
TWICE = iterations(*[(50, 10, 100)] * 2, cache_creation={"ephemeral_1h_input_tokens": 100})
LONG_REASONING = {"additional_kwargs": {"reasoning_content": LONG}}
FORMS: dict[str, tuple[Any, Any]] = {
    # The answer; its tokens of input and of output, and their price in millionths of a dollar.
    "OpenAI": (said(1_207, 31, cache_read=1_024, reasoning=20), [1_207, 31, 595.4]),
    "OpenAI, flex": (said(100, 50, 350, flex_cache_read=200), [300, 50, 620]),
    "Gemini by ChatOpenAI": (said(17, 24, 1_426), [17, 1_409, 14_107]),
    "Grok by ChatOpenAI": (said(1_000, 500, 1_800, reasoning=300), [1_000, 800, 9_000]),
    "Grok, and its cache": (
        *(said(100, 50, 1_350, cache_read=1_000, reasoning=200), [1_100, 250, 2_700]),
    ),
    "two alike: the dearer": (
        *(said(2_000, 50, 3_050, cache_read=1_000, reasoning=1_000), [2_000, 1_050, 11_600]),
    ),
    "Bedrock": (said(20_000, 100, 58_100, cache_read=38_000), [58_000, 100, 24_800]),
    "Bedrock, written": (
        *(said(19, 100, 39_119, cache_read=38_000, cache_creation=1_000), [39_019, 100, 6_069]),
    ),
    "cache in no total": (said(19, 100, cache_read=38_000), [38_019, 100, 4_819]),
    "reasoning in no total": (said(17, 24, reasoning=1_385), [17, 1_409, 14_107]),
    "compaction": (
        said(23_000, 1_000, **iterations((180_000, 3_500, 0), (23_000, 1_000, 0))),
        [203_000, 4_500, 248_000],
    ),
    "written twice": (said(150, 10, cache_creation=100, **TWICE), [300, 20, 700]),
    "compaction, streamed": ([part(COMPACTED), part([], 5_000, 50)], [6_000, 150, 7_500]),
    "no input": (said(0, 50), [1_000, 50, 1_500]),
    "no output": (said(20, 0, text=LONG), [20, 1_000, 10_020]),
    "a placeholder": ([part("", 20, 1), part(LONG)], [20, 1_000, 10_020]),
    "hidden by reasoning": (said(20, 1, text="", **LONG_REASONING), [20, 1_000, 10_020]),
    "hidden by arguments": (said(20, 1, text="", args={"q": LONG}), [20, 1_023, 10_250]),
    "one token": (said(20, 1), [20, 1, 30]),
    "cut off": (CUT_OFF, [1_000, 3_000, 31_000]),
    "cut off behind the prompt": ([part("", 900, 1), *CUT_OFF], [900, 3_000, 30_900]),
    "cut off at the end": ([part("", 900, 5_000), *CUT_OFF], [900, 5_000, 50_900]),
}


class Streams(ScriptedChatModel):
    """Streams the script as chunks of one answer."""

    def _stream(self, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        for chunk in self.script:
            if isinstance(chunk, Exception):
                raise chunk
            yield ChatGenerationChunk(message=chunk)


async def charged(signals: Signals, answer: Any, prices: Any) -> list[float]:
    """What the tokens of input and of output are, and the millionths of a dollar."""
    streams = isinstance(answer, list)
    kind = Streams if streams else ScriptedChatModel
    model = kind(model="claude", script=answer if streams else [answer])
    scene = Scene(signals, model, LIMITS, tools=(), checkpointer=None, prices=prices)
    mode = "messages" if streams else "values"
    with suppress(ConnectionError):
        async for _ in scene.agent.astream({"messages": [("user", LONG)]}, stream_mode=mode):
            pass

    def spent(limit: str, unit: str = "tokens") -> float:
        return sum(signals.samples(f"langchain_quota_spent_{unit}_total", limit=limit).values())

    given, made = spent("input_tokens"), spent("output_tokens")
    assert spent("tokens") == given + made
    return [given, made, round(spent("cost", "dollars") * 10**6, 3)]


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_is_charged_in_full(signals: Signals, form: str) -> None:
    """Tokens that only the total, a detail or a text shows are charged, each once, at its price."""
    answer, expected = FORMS[form]
    assert await charged(signals, answer, TABLE) == expected


COUNT = st.integers(0, 30)


@given(st.tuples(*[COUNT] * 6))
def test_no_report_is_charged_below_its_total(numbers: tuple[int, ...]) -> None:
    """Whatever a report says: no token of its total, of a side or of a detail is left out."""
    given, made, more, read, written, reasoning = numbers
    details = {"cache_read": read, "cache_creation": written, "reasoning": reasoning}
    answer = said(given, made, given + made + more, **details)
    model = ScriptedChatModel(model="claude", script=[answer])
    scene = Scene(telling(), model, LIMITS, tools=(), prices=TABLE)
    with scene.quota.receipt() as bill:
        scene.agent.invoke({"messages": [("user", "Hi!")]}, scene.config)

    line = bill.total("model")
    assert line.total_tokens == line.input_tokens + line.output_tokens >= given + made + more
    assert line.input_tokens >= max(given, read + written)
    assert line.output_tokens >= max(made, reasoning)


@pytest.mark.parametrize(
    ("price", "written", "shown"),
    [
        (Price(**PRICE), {"ephemeral_1h_input_tokens": 400}, "unknown"),
        (Price(**PRICE, cache_creation_1h=2), {"ephemeral_1h_input_tokens": 400}, "known"),
        (Price(**PRICE), {"ephemeral_5m_input_tokens": 400}, "known"),
        (Price(input=1, output=10), {"cache_creation": 400}, "unknown"),
        (Price(input=0, output=0), {"cache_creation": 400}, "known"),
    ],
)
async def test_a_table_without_the_price_of_a_dearer_part_is_uncertain(
    signals: Signals, caplog: pytest.LogCaptureFixture, price: Price, written: Any, shown: str
) -> None:
    """Writing a cache costs more than what a table without its price charges: that is shown."""
    for _ in range(2):
        await charged(signals, said(1_000, 50, **written), {"claude": price})

    runs = signals.samples("langchain_quota_model_runs_total", usage="reported")
    assert runs == {("unnamed", "claude", shown): 2}
    lines = [each.getMessage() for each in caplog.records if "so too little" in each.getMessage()]
    assert len(lines) == (shown == "unknown")
