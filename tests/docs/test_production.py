"""The page on production: its arithmetic of series, its token, its configurations."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from langchain_quota import MemoryStore, ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.core.decision import Outcome
from langchain_quota.telemetry.names import METRICS
from tests.scene import Scene
from tests.server.programs import required_program
from tests.telemetry import attributes, telling

PAGE = (Path(__file__).parents[2] / "docs" / "production.md").read_text()


def blocks(language: str) -> list[str]:
    """The page's code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run_code(*having: str) -> dict[str, Any]:
    """What the page's code that has one of these in it defines."""
    namespace: dict[str, Any] = {}
    for text in blocks("python"):
        if any(each in text for each in having):
            exec(text, namespace)  # noqa: S102 - our own page
    return namespace


def limit_of(name: str, thresholds: Sequence[str]) -> ModelCallLimit | ToolCallLimit:
    """A limit of the page's example: none is reached."""
    own = [each for each in ("run", "thread") if each in thresholds]
    options: dict[str, Any] = {f"{each}_limit": 90 for each in own}
    options["quotas"] = [Quota(90, per=each) for each in thresholds if each not in own]
    if name == "model":
        return ModelCallLimit(**options)
    return ToolCallLimit(None if name == "tool:*" else name.removeprefix("tool:"), **options)


async def samples_of(
    limits: Sequence[Any], tools: Sequence[str], threads: int, exported: int = 500, **options: Any
) -> int:
    """How many series there are after each thread has called each tool once."""
    signals = telling(max_exported_threads=exported)
    scene = Scene(signals, [[*tools], "done"] * threads, limits, tools=tools, **options)
    for number in range(threads):
        await scene.play(thread_id=f"thread-{number}", context={"user_id": f"user-{number}"})
    samples = [each for family in signals.registry.collect() for each in family.samples]
    return len(samples)


OF_RUNS = {"model": ["run"], "tool:search": ["thread", "run"], "tool:*": ["run"]}
"""Limits that need no store, which then has no series."""


@pytest.mark.parametrize(
    ("limits", "threads", "exported", "operations"),
    [(None, 1, 500, 1), (None, 3, 500, 2), (None, 6, 2, 1), (OF_RUNS, 2, 500, 0)],
)
async def test_the_formula_counts_series(
    limits: Any, threads: int, exported: int, operations: int
) -> None:
    """The example's limits make as many series as the function says; threads are bounded."""
    page = run_code("def series")
    tools = ["search", "email", *(f"tool_{number}" for number in range(6))]
    made = [limit_of(*each) for each in (limits or page["limits"]).items()]
    store = MemoryStore() if operations else None
    options: Any = {"store": store, "tell_model": operations > 1}
    assert await samples_of(made, tools, threads, exported, **options) == page["series"](
        limits or page["limits"],
        tools=len(tools),
        threads=min(threads, exported),
        store_operations=operations,
    )


def test_the_example_is_the_texts() -> None:
    """The numbers in the text are those of the function."""
    page = run_code("def series")
    all_of_it, without_threads = (
        page["series"](page["limits"], threads=threads, tools=8, store_operations=1)
        for threads in (500, 0)
    )
    threads = all_of_it - without_threads
    text = " ".join(PAGE.split())
    assert f"{all_of_it:,} series. The 500 threads make {threads:,} of them." in text
    assert f"Thirty such replicas make {30 * all_of_it:,} series." in text


def test_metrics_need_the_token() -> None:
    """The page's route answers whoever sends the token, and nobody else."""
    page = run_code('"/metrics", metrics_app()', "class Guarded")
    client = TestClient(page["app"])
    for told, status in (("", 401), ("Bearer wrong", 401), (f"Bearer {page['token']}", 200)):
        headers = {"Authorization": told} if told else {}
        assert client.get("/metrics", headers=headers).status_code == status


@pytest.mark.rest
def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    """Promtool finds nothing wrong with what the page gives for prometheus.yml."""
    [found] = [each for each in blocks("yaml") if "remote_write" in yaml.safe_load(each)]
    config = tmp_path / "prometheus.yml"
    config.write_text(found)
    command = [required_program("promtool", "prometheus"), "check", "config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_remote_write_leaves_threads_at_home() -> None:
    """Of ours all but single threads is sent, and nothing else is."""
    [text] = [each for each in blocks("yaml") if "remote_write" in each]
    [sent] = yaml.safe_load(text)["remote_write"]
    [further] = re.findall(r"`(\{source_labels: .*?\})`", PAGE)
    rules = [*sent["write_relabel_configs"], yaml.safe_load(further)]
    names = {name: metric.labels for metric in METRICS for name in metric.series}
    per_thread = {name for name, labels in names.items() if "thread_id" in labels}
    kept = {
        name
        for name in [*names, "up"]
        for labels in [{"__name__": name, "thread_id": "7" if name in per_thread else ""}]
        if all(keeps(rule, labels) for rule in rules)
    }
    assert kept == {*names} - per_thread != {*names}


def keeps(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a rule of relabelling keeps a series, as Prometheus does."""
    text = ";".join(labels.get(each, "") for each in rule["source_labels"])
    found = re.fullmatch(rule["regex"], text) is not None
    return found if rule["action"] == "keep" else not found


async def test_the_collector_keeps_what_spans_say() -> None:
    """Its policy asks for every decision that spans have, but for allowed calls."""
    signals = telling()
    ways: list[Any] = [{}, {"exit_behavior": "end"}, {"enforce": False}]
    for way in ways:
        limit = ToolCallLimit("search", run_limit=1, **way)
        await Scene(signals, [["search"] * 3, "done"], [limit]).play()
    found = {attributes(span)["decision"] for span in signals.spans()}
    assert found == {each.value for each in Outcome}
    [text] = [each for each in blocks("yaml") if "tail_sampling" in each]
    policies = yaml.safe_load(text)["processors"]["tail_sampling"]["policies"]
    [policy] = [each for each in policies if each["type"] == "string_attribute"]
    assert policy["string_attribute"]["key"] == "langchain_quota.decision"
    assert {*policy["string_attribute"]["values"]} == found - {"allowed"}
    assert all(each.keys() == {"name", "type", each["type"]} for each in policies)
