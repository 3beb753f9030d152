"""What limits add to traces of LangSmith: the bytes that are sent, and the time of a run."""

import asyncio
import time
from statistics import median
from typing import Any

import langsmith
import requests
from langsmith.run_helpers import tracing_context

from benchmarks.report import Ratio, Result, Size, Table, divided, number
from benchmarks.scenes import NONE, agent, run

STEPS = 30
ANSWER = "x" * 2_000
LANGCHAIN = "LangChain, 2"
OURS = ("QuotaMiddleware, 2", "Inline, 2", "drop-in, 2")
SETUPS = (NONE, LANGCHAIN, *OURS)


class LocalServer(requests.Session):
    """Counts the bytes that are sent, and accepts them; nothing leaves the process."""

    sent = 0

    def request(self, *_: Any, **options: Any) -> requests.Response:
        """Accept a request."""
        self.sent += len(options.get("data") or b"")
        accepted = requests.Response()
        accepted.status_code = 202
        return accepted


def measure(size: Size) -> Result:
    """Measure."""
    return asyncio.run(_measure(size.rounds))


async def _measure(rounds: int) -> Result:
    # Off comes first: the process then knows of no tracer.
    off = {setup: each for setup, (_, each) in (await _traced(rounds, enabled=False)).items()}
    traced = await _traced(rounds, enabled=True)
    least, quickest = traced[NONE]
    rows = []
    for setup, (sent, on) in traced.items():
        share = divided(sent, least)
        rows.append([setup, number(sent, 0), number(share), number(on, 1), number(off[setup], 1)])
    columns = ("limits", "bytes", "to no limits", "ms, tracing on", "ms, tracing off")
    note = (
        f"A run of {STEPS} steps whose tools answer with {len(ANSWER):,} characters. *bytes*:\n"
        "what LangSmith's client sends, here to a stand-in. *ms*: CPU time, as the median."
    )
    table = Table("What limits add to a trace", columns, rows, note)
    ratios = [
        Ratio(f"{one}: bytes of a trace, to no limits", 1.1, divided(traced[one][0], least))
        for one in OURS
    ]
    longer, added = "time that a traced run takes longer", traced[LANGCHAIN][1] - quickest
    for one in OURS[:2]:
        took = divided(traced[one][1] - quickest, added)
        ratios.append(Ratio(f"{one}: {longer}, to LangChain", 1, took))
    return Result(table, ratios=ratios)


async def _traced(rounds: int, *, enabled: bool) -> dict[str, tuple[float, float]]:
    """The bytes and the milliseconds of a run, by set-up."""
    server = LocalServer()
    url = "http://127.0.0.1:1"
    client = langsmith.Client(
        api_url=url, api_key="none", session=server, auto_batch_tracing=False, info={}
    )
    taken: dict[str, list[float]] = {setup: [] for setup in SETUPS}
    sent = dict.fromkeys(SETUPS, 0.0)
    agents = {setup: agent(setup, answer=ANSWER) for setup in SETUPS}
    with tracing_context(enabled=enabled, client=client):
        for each in agents.values():
            await run(each, 1, "warm-up")
        for _ in range(rounds):
            for setup, each in agents.items():
                server.sent, started = 0, time.process_time()
                await run(each, STEPS, "thread")
                taken[setup].append((time.process_time() - started) * 1_000)
                sent[setup] = server.sent
    return {setup: (sent[setup], median(taken[setup])) for setup in SETUPS}
