"""Prometheus' own tools on the rules, the runbooks' queries and the example for Alertmanager."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from langchain_quota.monitoring import exports
from tests.servers.programs import required_program
from tests.servers.prometheus import DEADLINE

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "dashboards" / "prometheus" / "tests"
FILES = sorted(TESTS.glob("*_test.yaml"))
PAGES = sorted((ROOT / "docs" / "runbooks").glob("LangChainQuota*.md"))
PROMQL = re.compile(r"```promql\n(.*?)```", re.DOTALL)


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _run(required_program("promtool", "prometheus"), *arguments)


def amtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return _run(required_program("amtool", "prometheus-alertmanager"), *arguments)


def _run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_thread": True},
        {"selector": r'job=~"a|b\\.c",namespace!="\"{}\" = ü`%q"', "per_thread": True},
        {"grafana_url": "https://example.org/a%20b&c", "runbooks": "http://[::1]:80/$x"},
    ],
    ids=["default", "per thread", "selector", "addresses"],
)
def test_the_rules_are_valid(options: dict[str, Any], tmp_path: Path) -> None:
    """Promtool takes the rules, whatever the options, and counts all of them."""
    file = tmp_path / "rules.yaml"
    [text] = exports.rules(**options).values()
    file.write_text(text, encoding="utf-8")
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stderr
    expected = sum(len(group["rules"]) for group in yaml.safe_load(text)["groups"])
    assert f"SUCCESS: {expected} rules found" in checked.stdout


def test_the_operators_rules_are_valid(tmp_path: Path) -> None:
    """Promtool takes the groups within a PrometheusRule."""
    [text] = exports.rules(format="prometheusrule").values()
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps(yaml.safe_load(text)["spec"]))  # JSON is YAML
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_rules_pass_their_tests(file: Path) -> None:
    """What each alert says and when it is silent is as its promtool tests have it."""
    tested = promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "SUCCESS" in tested.stdout
    assert "WARNING" not in tested.stdout + tested.stderr


@pytest.mark.parametrize(
    ("there", "changed"),
    [(" > 0\n", " > 99\n"), ("refused about", "admitted about")],
)
def test_the_tests_look_at_the_rules(there: str, changed: str, tmp_path: Path) -> None:
    """With another threshold, or another text, promtool's tests fail."""
    test, rules = tmp_path / "test.yaml", tmp_path / "rules.yaml"
    content = (TESTS / "LimitBreached_test.yaml").read_text()
    test.write_text(re.sub(r"(?m)^rule_files: .*", f"rule_files: [{rules.name}]", content))
    [text] = exports.rules().values()
    for given, code in ((text, 0), (text.replace(there, changed), 1)):
        rules.write_text(given)
        assert promtool("test", "rules", test).returncode == code


def test_texts_are_those_of_the_selected_jobs(tmp_path: Path) -> None:
    """With a selector that has all that could break a text, the alert and its numbers are there."""
    matchers = r'''cluster=~"`%q}}|{{ $value }}|it's \"x\"|eu"'''
    [rules] = exports.rules(selector=matchers).values()
    (tmp_path / "rules.yaml").write_text(rules, encoding="utf-8")
    labels = 'job="a",instance="i",agent="r",limit="l"'
    other = 'job="a",instance="j",agent="r",limit="l"'
    decided = "langchain_quota_limit_decisions_total"
    refusal = "langchain_quota_thread_last_refusal_timestamp_seconds"
    series = {
        f'{decided}{{{labels},scope="run",decision="blocked",cluster="eu"}}': "0x5 3x9",
        f'{refusal}{{{labels},thread_id="ann",cluster="eu"}}': "300x15",
        f'{refusal}{{{other},thread_id="bob",cluster="us"}}': "300x15",
    }
    firing = {
        "exp_labels": {"severity": "warning", "job": "a", "agent": "r", "limit": "l"},
        "exp_annotations": {
            "summary": 'Limit "l" of agent "r" refuses calls on 1 thread',
            "description": 'Within 5 minutes limit "l" refused about 3 calls of agent "r" '
            '(job "a").',
            "runbook_url": f"{exports.RUNBOOKS}/LangChainQuotaLimitBreached.md",
            "dashboard_url": f"{exports.GRAFANA_URL}/d/langchain-quota-overview"
            "?var-job=a&var-agent=r&var-limit=l&viewPanel=23",
        },
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "alertname": "LangChainQuotaLimitBreached",
                "eval_time": "6m",
                "exp_alerts": [firing],
            }
        ],
    }
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(json.dumps(test))  # JSON is YAML
    tested = promtool("test", "rules", tmp_path / "test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_queries_of_a_runbook_are_valid(page: Path, tmp_path: Path) -> None:
    """Every query that a runbook tells to ask is PromQL."""
    queries = PROMQL.findall(page.read_text())
    assert queries
    recorded = [
        {"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "page", "rules": recorded}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(queries)} rules found" in checked.stdout


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example for Alertmanager as a file."""
    [(name, text)] = exports.alertmanager().items()
    file = tmp_path / name
    file.write_text(text)
    return file


def test_the_example_is_valid(example: Path) -> None:
    """Amtool takes the example for Alertmanager."""
    checked = amtool("check-config", example)
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stdout


@pytest.mark.parametrize(
    ("alert", "receiver"),
    [
        (("LangChainQuotaEnforcementDegraded", "critical"), "pager"),
        (("LangChainQuotaLimitBreached", "warning"), "chat"),
        (("LangChainQuotaThreadKeepsHitting", "info"), "log"),
    ],
)
def test_the_example_routes_by_severity(
    alert: tuple[str, str], receiver: str, example: Path
) -> None:
    """Alertmanager pages only for what is critical, and keeps what is info apart."""
    assert routed(example, *alert) == receiver


def test_a_limit_can_page(example: Path) -> None:
    """With the route of docs/alerts.md a limit that refuses calls pages; other warnings do not."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    (_, route) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    outer, inner = example.read_text().split("      routes:\n")
    example.write_text(f"{outer}      routes:\n{route}{inner}")
    assert routed(example, "LangChainQuotaLimitBreached", "warning") == "pager"
    assert routed(example, "LangChainQuotaBlockRatioHigh", "warning") == "chat"


def routed(config: Path, name: str, severity: str) -> str:
    """The receiver to which Alertmanager sends an alert."""
    labels = (f"alertname={name}", f"severity={severity}")
    done = amtool("config", "routes", "test", f"--config.file={config}", *labels)
    return done.stdout.strip()
