"""Budgets of tokens: model calls are charged what they have used, and refused when it is all."""

import asyncio
import json
from http.client import IncompleteRead
from typing import Any

import pytest
from langchain_core.messages import AIMessage

from langchain_quota import CostLimit, QuotaMiddleware, QuotaWarning, TokenLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Kind, Order, Scene, in_order, model_limiter, orders
from tests.telemetry import Signals, needs_inline
from tests.tokens import answer, asking, spent, spent_by_agent

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


async def test_a_last_answer_that_says_nothing_is_replaced(signals: Signals) -> None:
    """A last call that asks for tools ends the run with a text that says what is used up."""
    limit = TokenLimit(run_limit=100, exit_behavior="finalize", keep=30)
    scene = Scene(signals, [answer(80, "search"), answer(10, "search", text="")], [limit])
    await scene.play()
    assert scene.last_text().endswith(
        "Token limits exceeded: run limit (80/100 tokens, the rest was kept for the last answer)"
    )
    assert len(scene.model.calls) == 2


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
        and each.values["langchain_quota"].get("run")
    )
    return found


@pytest.mark.parametrize(
    ("kind", "calls", "tokens"),
    [("quota", 0, 3), ("quota", 2, 33), pytest.param("inline", 1, 13, marks=needs_inline)],
)
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
