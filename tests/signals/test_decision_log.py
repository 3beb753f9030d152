"""The log of decisions that `log_decisions` writes, and its queries in the docs."""

import json
import re
from contextlib import closing, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelCallLimit,
    Quota,
    ToolCallLimit,
    hmac_label,
    log_decisions,
)
from langchain_quota.limits import Limit
from tests.scene import Scene
from tests.telemetry import Signals, paid, telling

PAGE = (Path(__file__).parents[2] / "docs/limits.md").read_text()
QUERIES = re.findall(r"^jq .*?'(.+)'", PAGE, re.MULTILINE)
"""The queries of the docs."""


def lines_of(log: Path) -> list[dict[str, Any]]:
    """What is written in whole lines."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


async def play(log: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines of a run with two searches, of which the second one is refused."""
    limits: list[Limit] = [
        ToolCallLimit("search", run_limit=9, quotas=[Quota(1, per="user_id")]),
        ModelCallLimit(run_limit=1, enforce=False),
        CostLimit(enforce=False),
    ]
    with closing(log_decisions(log, **options)) as writes:
        made: dict[str, Any] = {"name": "agent", "store": MemoryStore(), "on_decision": writes}
        script, prices = [paid(5, "search", "search"), paid(5)], lambda used: Decimal(3)
        scene = Scene(telling(), script, limits, prices=prices, **made)
        await scene.play(context={"user_id": "ann"})
    return lines_of(log)


async def test_a_line(tmp_path: Path) -> None:
    """It says what was decided about whose call, by which limits; the docs query such fields."""
    lines = await play(tmp_path / "log")
    assert all(abs(line.pop("time") - 1.8e9) < 1e9 for line in lines)
    who = {"agent": "agent", "thread": "thread-1"}
    search = {"tool": "search", "subjects": {**who, "user_id": "ann"}}
    counts = {"tool:search": {"run": [1, 9], "user_id": [1, 1]}}
    refused = {"id": "search-1", "refused_by": {"tool:search": "user_id"}}
    models = [{"model": {"run": [n, 1]}, "cost": {"run": [3 * (n - 1), None]}} for n in (1, 2)]
    assert lines == [
        {"decision": "allowed", "subjects": who, "counts": models[0]},
        {"decision": "allowed", "id": "search-0", **search, "counts": counts},
        {"decision": "blocked", **refused, **search, "counts": counts},
        {
            "decision": "would_block",
            "refused_by": {"model": "run"},
            "subjects": who,
            "counts": models[1],
        },
    ]
    fields = {field for query in QUERIES for field in re.findall(r"[.{]\w+|\w+[,}]", query)}
    named = {field.strip(".{,}") for field in fields}
    assert (len(QUERIES), named - {"time", *lines[2], *lines[2]["subjects"]}) == (2, set())
    assert named > {"decision", "refused_by", "subjects", "user_id"}


async def test_labels_of_subjects(tmp_path: Path) -> None:
    """Agents, threads and users can be hidden, and are told apart nevertheless."""
    label = hmac_label("a secret of 16 bytes or more")
    lines = await play(tmp_path / "log", subject_label=label)
    who = {"agent": "agent", "thread": "thread-1", "user_id": "ann"}
    assert lines[1]["subjects"] == {per: label(of) for per, of in who.items()}


async def test_after_a_kill(tmp_path: Path) -> None:
    """After a part of a line that a killed process has left, every line is whole."""
    log = tmp_path / "log"
    log.write_text('{"time":1,"dec')
    assert len(await play(log)) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk(signals: Signals) -> None:
    """What cannot be written is counted, and the run goes on."""
    limits, writes = [ToolCallLimit("search", run_limit=1)], log_decisions("/dev/full")
    scene = Scene(signals, [["search", "search"], "done"], limits, on_decision=writes)
    await scene.play()
    with suppress(OSError):  # what is left to write fails again
        writes.close()
    scene.check()
    labels = {"component": "observer", "error_type": "OSError"}
    assert signals.value("langchain_quota_errors_total", **labels) == 2


def test_arguments(tmp_path: Path) -> None:
    """A log says what it needs."""
    with pytest.raises(TypeError, match=r"to must be a path or a logging\.Handler, not 3"):
        log_decisions(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="subject_label must be a function of the subject"):
        log_decisions(tmp_path / "log", subject_label=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No such file"):
        log_decisions(tmp_path / "no/where")
