"""Model calls at the pace that a provider names: headers, pauses, and what never happens."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents.middleware import (
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    wrap_model_call,
)
from langchain_core.messages import AIMessage, BaseMessage

from langchain_quota import MemoryStore, ModelPaceMiddleware, Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.core.provider_limits import read_error, read_headers
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaStore
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms, until
from tests.stores import Clock, counts
from tests.telemetry import Signals, paid
from tests.tokens import During

PAUSE = {"retry_after": "0.3"}
SECONDS = 0.29
"""The pause that a provider asks for; the time that a store needs to hear of it is left out."""
LABELS = {"agent": "unnamed", "limit": "gpt"}
WAITS, REFUSALS = "langchain_quota_wait_seconds", "langchain_quota_provider_refusals_total"
RATE = {"x_ratelimit_limit_requests": "1200", "x_ratelimit_remaining_requests": "60"}
"""Twenty calls a second, and of those at once only the share left that stays unused."""


class Refused(Exception):  # noqa: N818 - it is what a provider says
    """An error 429 with these headers, as the clients of providers raise it."""

    def __init__(self, **headers: str) -> None:
        named = {name.replace("_", "-").title(): value for name, value in headers.items()}
        self.response = SimpleNamespace(status_code=429, headers=named)


class Played:
    """A provider that plays a script, and notes when it is called; later it says nothing.

    On a busy machine a call comes to it later than to the middleware, which begins to count then.
    """

    def __init__(self, *script: Any) -> None:
        self._script = [*script]
        self.asked: list[float] = []
        self.times: list[float] = []

    def ask(self) -> None:
        self.asked.append(time.monotonic())

    def __call__(self, _: Sequence[BaseMessage]) -> Any:
        self.times.append(time.monotonic())
        return self._script.pop(0) if self._script else "done"

    def keeps(self, first: float, interval: float) -> bool:
        """Whether all calls came no sooner than evenly after the first one."""
        begin = self.asked[0] + first * 0.95
        late = [at - begin for at in self.times[1:]]
        return all(at >= index * interval * 0.95 for index, at in enumerate(late))


def paced(
    signals: Signals,
    script: Played,
    store: QuotaStore | None = None,
    *before: Any,
    form: Form = "async",
    wait: float = 60,
) -> Scene:
    """An agent on no thread whose model has a pace."""
    pace = ModelPaceMiddleware(store=store, wait=wait, telemetry=signals.telemetry)
    model = ScriptedChatModel(script=script, model="gpt")
    items = [During(script.ask, before=True), *before, pace]
    return Scene(signals, model, items, form=form, thread_id=None, checkpointer=None)


def says(headers: Mapping[str, str], tokens: int = 1) -> AIMessage:
    """An answer with headers, as `include_response_headers=True` shows them."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return paid(tokens).model_copy(update={"response_metadata": {"headers": named}})


async def together(scene: Scene, calls: int) -> None:
    await asyncio.gather(*(scene.play() for _ in range(calls)))


@both_forms
async def test_one_refusal_paces_all(signals: Signals, form: Form) -> None:
    """Nobody who shares the store calls during the pause that one agent's error asks for."""
    store, others = MemoryStore(), Played()
    with pytest.raises(Refused):
        await paced(signals, Played(Refused(**PAUSE)), store, form=form).play()
    refused_at = time.monotonic()
    await paced(signals, others, form=form).play()
    assert signals.value(f"{WAITS}_sum", **LABELS, decision="allowed") == 0
    await paced(signals, others, store, form=form).play()
    assert refused_at + SECONDS <= others.times[1]
    assert signals.value(REFUSALS, **LABELS) == 1
    assert signals.value("langchain_quota_waiting_calls", **LABELS) == 0


@pytest.mark.parametrize(("unit", "tokens"), [("requests", 9), ("tokens", 2)])
async def test_calls_come_evenly(signals: Signals, unit: str, tokens: int) -> None:
    """Calls come at the rate, though none was refused; they take the tokens that others used."""
    said = {name.replace("requests", unit): value for name, value in RATE.items()}
    played, interval = Played(says(said, tokens)), 0.05 if unit == "requests" else 0.1
    scene = paced(signals, played)
    await scene.play()
    await together(scene, 4)
    assert played.keeps(interval, interval)


async def test_a_pause_without_limits(signals: Signals) -> None:
    """If an error names no limits, the calls after its pause come one a second."""
    played = Played(Refused(retry_after="0.1"))
    scene = paced(signals, played)
    with pytest.raises(Refused):
        await scene.play()
    await together(scene, 3)
    assert played.keeps(1.1, 1.0)


async def test_a_freeze_of_all(signals: Signals) -> None:
    """It stops calls that quotas count, and has none wait for its pace."""
    store = MemoryStore()
    quota = QuotaMiddleware([ToolCallLimit(quotas=[Quota(1, per="global")])], store=store)
    quota.freeze(until=datetime(9000, 1, 1, tzinfo=UTC))
    scene = paced(signals, Played(says(RATE)), store)
    await scene.play()
    await scene.play()
    assert signals.value(f"{WAITS}_bucket", **LABELS, decision="allowed", le="1.0") == 2


async def test_what_calls_take(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes what others used, without the cached; one that found no room takes nothing."""
    store, waiting = MemoryStore(clock=Clock()), list[object]()

    def acquire(request: AcquireRequest) -> AcquireResult:
        # Who asks the store does not wait for the provider.
        waiting.append(signals.value("langchain_quota_waiting_calls", **LABELS))
        return MemoryStore.acquire(store, request)

    monkeypatch.setattr(store, "acquire", acquire)
    limits = {"input_tokens": "1000", "requests": "6000"}
    ways = [(f"anthropic_ratelimit_{unit}", most) for unit, most in limits.items()]
    said = says({f"{way}_{part}": n for way, n in ways for part in ("limit", "remaining")}, 100)
    first: Any = {**(said.usage_metadata or {}), "input_token_details": {"cache_read": 90}}
    played = Played(said.model_copy(update={"usage_metadata": first}), says({}, 110))
    scene, taken = paced(signals, played, store, wait=0.01), []
    for _ in range(3):
        await scene.play()
        taken.append(sum(counts(store).values()))
    assert (taken, waiting) == ([0, 600_000, 1_800_000], [0] * 3)
    await together(scene, 99)
    (total,) = counts(store).values()
    assert 55 * 10**6 <= total <= 57 * 10**6
    assert len(played.times) == 102


@both_forms
async def test_no_call_is_refused(signals: Signals, form: Form) -> None:
    """A call that has waited as long as it may is made, whatever the provider asks for."""
    played = Played(Refused(retry_after="1e9"))
    scene = paced(signals, played, form=form, wait=0.2)
    with pytest.raises(Refused):
        await scene.play()
    await scene.play()
    assert played.keeps(0.2, 0)
    assert signals.value(f"{WAITS}_count", **LABELS, decision="allowed") == 2
    assert (signals.value(f"{WAITS}_sum", **LABELS, decision="allowed") or 0) >= 0.19


async def test_paces_are_bounded(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more models than can be kept, the one that was not used for the longest is forgotten."""
    monkeypatch.setattr("langchain_quota.agents.model_pace._MAX_PACES", 2)

    @wrap_model_call
    async def choose(request: Any, handler: Any) -> Any:
        script, name = [Refused(retry_after="60")], request.messages[-1].text
        return await handler(request.override(model=ScriptedChatModel(script=script, model=name)))

    store = MemoryStore()
    scene = paced(signals, Played(), store, choose, wait=0.01)
    for name in ("a", "b", "a", "c", "a", "b"):
        # What the store has forgotten, only this process may know.
        store.reset([usage.key for usage in store.usages()])
        with pytest.raises(Refused):
            await scene.play(name)
    waits = signals.samples(f"{WAITS}_sum", agent="unnamed", decision="allowed")
    assert [waits[name,] > 0 for name in "abc"] == [True, False, False]


async def test_cancelled_waiters_leave(signals: Signals) -> None:
    """A run that is cancelled while it waits takes nothing, and those behind it go on."""
    played = Played(Refused(retry_after="1"))
    scene = paced(signals, played)
    with pytest.raises(Refused):
        await scene.play()
    runs = [asyncio.create_task(scene.play()) for _ in range(4)]
    await until(lambda: signals.value("langchain_quota_waiting_calls", **LABELS) == 4)
    for each in runs[:3]:
        each.cancel()
    await runs[3]
    assert len(played.times) == 2
    assert signals.value(f"{WAITS}_count", **LABELS, decision="cancelled") == 3
    assert signals.value("langchain_quota_waiting_calls", **LABELS) == 0


async def test_beside_retries_and_fallbacks(signals: Signals) -> None:
    """A retry waits once, for the provider alone; a fallback to another model does not wait."""
    played, other = Played(Refused(**PAUSE)), Played()
    retry = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    await paced(signals, played, None, retry).play()
    assert played.keeps(SECONDS, 0)
    assert signals.value(f"{WAITS}_count", **LABELS, decision="allowed") == 2
    fallback = ModelFallbackMiddleware(ScriptedChatModel(script=other, model="other"))
    refusing = Played(Refused(retry_after="60"), Refused())
    scene = paced(signals, refusing, None, fallback, wait=0.1)
    await scene.play()
    await scene.play()
    labels = {**LABELS, "limit": "other", "decision": "allowed"}
    assert len(other.times) == signals.value(f"{WAITS}_count", **labels) == 2
    assert signals.value(f"{WAITS}_sum", **labels) == 0
    assert signals.value(REFUSALS, **LABELS) == 3


async def test_a_store_that_fails_or_forgets(signals: Signals) -> None:
    """While the store is unavailable a process keeps its pace; a store that forgets is told."""

    def fail(*_: object) -> None:
        raise QuotaStoreError("the store is down")

    store, played = MemoryStore(), Played(says(RATE))
    scene = paced(signals, played, store)
    await scene.play()
    with pytest.MonkeyPatch.context() as down:
        down.setattr(store, "acquire", fail)
        down.setattr(store, "adelay", fail)
        await together(scene, 3)
    store.reset([usage.key for usage in store.usages()])
    await together(scene, 3)
    assert played.keeps(0.05, 0.05)


@pytest.mark.parametrize("headers", ["text", None, [("a", "b")], {"x-ratelimit-limit-tokens": 5j}])
async def test_what_is_no_header(signals: Signals, headers: object) -> None:
    """Whatever an integration puts in the place of headers, the answer arrives."""
    answer = AIMessage("done", response_metadata={"headers": headers})
    result = await paced(signals, Played(answer)).play()
    assert result["messages"][-1].content == "done"


def test_limits() -> None:
    """Each limit is read with what is left of it; the tighter of Anthropic's is not read twice."""
    openai = {"x-ratelimit-limit-tokens": "90000", "x-ratelimit-remaining-tokens": "75000"}
    assert read_headers(200, openai)[0] == {"total_tokens": (90_000, 75_000)}
    anthropic = {
        f"anthropic-ratelimit-{unit}-{part}": value
        for unit in ("input-tokens", "output-tokens", "tokens", "requests")
        for part, value in (("limit", "80"), ("remaining", "20"), ("reset", "2026-11-27T04:00:15Z"))
    }
    units = "input_tokens", "output_tokens", "requests"
    assert read_headers(200, anthropic)[0] == dict.fromkeys(units, (80, 20))


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-limit-requests": "10"},
        {"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "0"},
        {"x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "6"},
        {"x-ratelimit-limit-requests": "9", "x-ratelimit-remaining-requests": "nan"},
        {"x-ratelimit-limit-images": "10", "x-ratelimit-remaining-images": "1"},
    ],
)
def test_what_is_left_out(headers: dict[str, str]) -> None:
    """Half of a limit, nonsense, or a limit of something else is no limit to keep."""
    assert read_headers(None, headers) == ({}, None)


LATER = "Fri, 27 Nov 2099 04:00:00 GMT"


@pytest.mark.parametrize(
    ("status", "headers", "pause"),
    [
        (429, {"retry-after": "7"}, 7.0),
        (503, {"retry-after": "0.25"}, 0.25),
        (429, {"retry-after": "1e9"}, 300.0),
        *((429, {"retry-after": text}, 0.0) for text in ("-1", "nan", "tomorrow", LATER)),
        (503, {"retry-after": LATER}, None),
        *((429, {}, 0.0), (529, {}, None), (200, {"retry-after": "7"}, None), (None, {}, None)),
    ],
)
def test_pauses(status: int | None, headers: dict[str, str], pause: float | None) -> None:
    """A pause is seconds, and bounded; an error 429 always asks for one."""
    assert read_headers(status, headers) == ({}, pause)


def test_errors() -> None:
    """Botocore's have a dictionary in place of a response."""
    error: Any = Exception("An error occurred (ThrottlingException)")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": 429, "HTTPHeaders": {"Date": "now"}}}
    assert read_error(error) == (429, {"date": "now"})
