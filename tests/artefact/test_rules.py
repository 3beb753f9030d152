"""The alert rules, their tests, the runbooks and Alertmanager's route, by Prometheus' tools."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from langchain_quota.cli import export
from langchain_quota.telemetry.names import METRICS
from tests.server.programs import required_program
from tests.server.prometheus import DEADLINE

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "dashboards" / "prometheus"
FILES = sorted((PROMETHEUS / "tests").glob("*_test.yaml"))
PAGES = sorted((ROOT / "docs" / "runbooks").glob("LangChainQuota*.md"))


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _run(required_program("promtool", "prometheus"), *arguments)


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(each) for each in words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


def rules(**options: Any) -> list[Any]:
    """All rules that are exported."""
    [text] = export.rules(**options).values()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def check(groups: Any, directory: Path) -> None:
    """Assert that promtool takes groups of rules, and counts all of them."""
    file = directory / "rules.yaml"
    file.write_text(json.dumps(groups))  # JSON is YAML
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stderr
    count = sum(len(group["rules"]) for group in groups["groups"])
    assert f"SUCCESS: {count} rules found" in checked.stdout


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"selector": r'job=~"a|b\\.c",namespace!="\"{}\" = ü`%q"', "per_thread": True},
        {"grafana_url": "https://a.org/a%20b&c", "runbooks": "http://[::1]:80/$x", "spend": True},
    ],
    ids=len,
)
def test_the_rules_are_valid(options: dict[str, Any], tmp_path: Path) -> None:
    """Promtool takes the rules, whatever the options."""
    [text] = export.rules(**options).values()
    check(yaml.safe_load(text), tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_rules_pass_their_tests(file: Path) -> None:
    """What each alert says and when it is silent is as its promtool tests have it."""
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    # It only warns of a file that is missing.
    assert "WARNING" not in tested.stdout + tested.stderr


def test_every_alert_is_complete() -> None:
    """Each alert has a short runbook, our metrics, and tests where it fires and must not."""
    every = rules(per_thread=True, spend=True)
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in every if "alert" in rule}
    assert len(severities) - len([rule for rule in rules() if "alert" in rule]) == 3
    assert len(severities) <= 14
    assert [page.stem for page in PAGES] == sorted(severities)
    assert all(len(page.read_text().split()) <= 200 for page in PAGES)
    pages = {
        name.removeprefix("LangChainQuota")
        for name, each in severities.items()
        if "critical" in each
    }
    assert pages == {"EnforcementDegraded", "SharedQuotaExhausted", "MetricsMissing"}
    tested = {
        (test["alertname"], bool(test["exp_alerts"]))
        for path in FILES
        for case in yaml.safe_load(path.read_text())["tests"]
        for test in case["alert_rule_test"]
    }
    assert tested == {(name, fires) for name in severities for fires in (False, True)}
    asked = " ".join(rule["expr"] for rule in every)
    series = {name for metric in METRICS for name in metric.series}
    assert set(re.findall(r"(?<!:)\blangchain_quota_\w+", asked)) <= series


def test_the_stack_has_the_exported_rules() -> None:
    """What the stack mounts is what the package writes."""
    for name, text in export.rules().items():
        assert (PROMETHEUS / name).read_text() == text


def test_links_begin_with_the_given_addresses() -> None:
    """Grafana's and the runbooks' addresses are the user's, with or without a slash at the end."""
    for slash in ("", "/"):
        addresses = {"grafana_url": f"https://a.b/g{slash}", "runbooks": f"https://a.b/r{slash}"}
        for rule in rules(selector='job="x"', **addresses):
            links = rule.get("annotations", {"dashboard_url": "https://a.b/g/d/langchain-quota-"})
            assert links["dashboard_url"].startswith("https://a.b/g/d/langchain-quota-")
            if "alert" in rule:
                assert links["runbook_url"] == f"https://a.b/r/{rule['alert']}"


def test_texts_are_those_of_the_selected_jobs(tmp_path: Path) -> None:
    """With a selector that has all that could break a text, the alert and its numbers are there."""
    matchers = r'''cluster=~"`%q}}|{{ $value }}|it's \"x\"|eu"'''
    [text] = export.rules(selector=matchers).values()
    (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
    labels, other = (f'job="a",instance="{each}",agent="r",limit="l"' for each in "ij")
    refusal = "langchain_quota_thread_timestamp_seconds"
    refused = "langchain_quota_limit_decisions_total"
    blocked = "langchain_quota_thread_blocked_total"
    series = {
        f'{refused}{{{labels},scope="run",decision="blocked",cluster="eu"}}': "0x5 3x9",
        f'{refusal}{{{labels},thread_id="ann",event="refusal",cluster="eu"}}': "300x15",
        f'{blocked}{{{labels},thread_id="ann",cluster="eu"}}': "0x5 3x9",
        f'{blocked}{{{other},thread_id="bob",cluster="us"}}': "0x5 3x9",
        f'{refusal}{{{other},thread_id="bob",event="refusal",cluster="us"}}': "300x15",
    }
    texts = {
        "summary": 'Limit "l" of agent "r" refuses calls on 1 thread',
        "description": 'Limit "l" refused 3 of 3 calls of agent "r" (job "a") within 5 minutes. '
        'Calls refused within 15 minutes, by thread: "ann" 3. '
        "Refusals began at 1970-01-01 00:05:00 +0000 UTC.",
        "runbook_url": f"{export.RUNBOOKS}/LangChainQuotaLimitBreached.md",
        "dashboard_url": "http://localhost:3000/d/langchain-quota-overview"
        "?from=now-1h&to=now&var-job=a&var-agent=r&var-limit=l",
    }
    of = {"severity": "warning", "job": "a", "agent": "r", "limit": "l"}
    fires = {
        "alertname": "LangChainQuotaLimitBreached",
        "eval_time": "6m",
        "exp_alerts": [{"exp_labels": of, "exp_annotations": texts}],
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [fires],
    }
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [case]}
    (tmp_path / "test.yaml").write_text(json.dumps(test))  # JSON is YAML
    tested = promtool("test", "rules", tmp_path / "test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_queries_of_the_runbooks_are_valid(tmp_path: Path) -> None:
    """Every query that a runbook tells to ask is PromQL."""
    recorded = []
    for page in PAGES:
        queries = re.findall(r"```promql\n(.*?)```", page.read_text(), re.DOTALL)
        assert queries, page
        recorded += [
            {"record": f"{page.stem}:{number}", "expr": each} for number, each in enumerate(queries)
        ]
    check({"groups": [{"name": "pages", "rules": recorded}]}, tmp_path)


def test_the_route_can_be_included_as_it_is(tmp_path: Path) -> None:
    """Alertmanager takes a configuration with the route, which pages only for what is critical."""
    program = required_program("amtool", "prometheus-alertmanager")
    file = tmp_path / "alertmanager.yaml"
    [text] = export.alertmanager().values()
    real = yaml.safe_load(text)
    real["route"]["receiver"] = "tickets"
    # Routes of its own come after it.
    real["route"]["routes"].append({"matchers": ['team = "a"'], "receiver": "pager"})
    real["receivers"] = [{"name": "pager"}, {"name": "tickets"}]
    file.write_text(json.dumps(real))  # JSON is YAML

    def routed(name: str, severity: str) -> str:
        labels = (f"alertname=LangChainQuota{name}", f"severity={severity}", "team=b")
        config = f"--config.file={file}"
        return _run(program, "config", "routes", "test", config, *labels).stdout.strip()

    checked = _run(program, "check-config", file)
    assert checked.returncode == 0, checked.stderr
    assert routed("EnforcementDegraded", "critical") == "pager"
    assert routed("SharedQuotaExhausted", "warning") == "tickets"
    assert routed("ThreadNearLimit", "info") == "tickets"


def test_what_needs_somebody_is_told_in_time() -> None:
    """Groups of alert, agent and limit; with the scrape, what waits stays below 90 seconds."""
    [text] = export.alertmanager().values()
    [route] = yaml.safe_load(text)["route"]["routes"]
    assert route["group_by"] == ["alertname", "agent", "limit"]
    routes = {each["matchers"][0]: each for each in route["routes"]}
    # After the scrape, the evaluation and the group's interval a further customer is told.
    for matcher in ('severity = "critical"', 'alertname = "LangChainQuotaSharedQuotaExhausted"'):
        assert 15 + 15 + 15 + int(routes[matcher]["group_interval"][:-1]) <= 90  # seconds
    [text] = export.rules(per_thread=True).values()
    groups = yaml.safe_load(text)["groups"]
    assert {group["interval"] for group in groups} <= {"15s", "30s"}
    waits = {rule["for"] for group in groups for rule in group["rules"] if "for" in rule}
    assert waits == {"45s", "90s"}
