"""The alert rules, their tests and their runbooks: each alert has all, and nothing is misspelt."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from langchain_quota import Call, MemoryStore, Telemetry, ToolCallLimit
from langchain_quota.engine import Used, judge
from langchain_quota.monitoring import alertmanager, rules
from langchain_quota.monitoring.alerts import Alert, groups
from langchain_quota.monitoring.rules import Format, Options

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "dashboards" / "prometheus"
PROMTOOL_TESTS = sorted((PROMETHEUS / "tests").glob("*_test.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(path for path in RUNBOOKS.glob("*.md") if path.name != "README.md")
ALERTS_PAGE = ROOT / "docs" / "alerts.md"

ALL = Options(per_thread=True)
PER_THREAD = {"LangChainQuotaThreadNearLimit", "LangChainQuotaThreadExhaustionPredicted"}
HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
ANNOTATIONS = {"summary", "description", "runbook_url", "dashboard_url"}
ADDED_BY_PROMETHEUS = {"job", "instance"}

METRIC = re.compile(r"(?<![:\w])(langchain_quota_\w+)(?:\{([^}]*)\})?")
RECORDED = re.compile(r"\w+:langchain_quota_\w+:\w+")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")
LABEL = re.compile(r"\$labels\.(\w+)")
PROMQL = re.compile(r"```promql\n(.*?)```", re.DOTALL)
PANEL = re.compile(r"\*\*([^*]+)\*\* \(\*([^*]+)\*\)")


def parsed(options: Options) -> Any:
    return yaml.safe_load(rules.render(options))


def all_rules(options: Options) -> list[Any]:
    return [rule for group in parsed(options)["groups"] for rule in group["rules"]]


def alerts(options: Options = ALL) -> dict[str, Any]:
    return {rule["alert"]: rule for rule in all_rules(options) if "alert" in rule}


def records() -> set[str]:
    return {rule["record"] for rule in all_rules(ALL) if "record" in rule}


NAMES = sorted(alerts())


def queries(path: Path) -> list[str]:
    """The PromQL of a page."""
    return PROMQL.findall(path.read_text())


def samples() -> dict[str, dict[str, set[str]]]:
    """The metrics that the code makes: by name, the values of each label."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry=registry)
    limit = ToolCallLimit("search", thread_limit=5, run_limit=4)
    for used in range(6):
        call = Call("tool", "search", f"call-{used}", agent="researcher", thread_id="ann")
        decided = judge([limit], {limit.counter: Used(used, 0)}, [call])
        telemetry.emit(decided.decisions, started=0)
    telemetry.failed("observer", KeyError("x"))
    # Made by code that talks to a store; there is none here.
    in_memory = MemoryStore()
    telemetry.watch_store(in_memory)
    metrics = telemetry._signals.metrics
    metrics.store_seconds.labels("reserve", "ok").observe(0.001)
    metrics.store_fallbacks.labels("researcher", "deny").inc()
    found: dict[str, dict[str, set[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


SAMPLES = samples()


def unknown(text: str) -> Iterator[str]:
    """What an expression names and the code does not have."""
    known_labels = set(ADDED_BY_PROMETHEUS)
    for recorded in RECORDED.findall(text):
        if recorded in records():
            known_labels |= {"agent", "limit", "thread_id"}
        else:
            yield recorded
    selectors = METRIC.findall(text)
    for metric, matchers in selectors:
        if metric not in SAMPLES:
            yield metric
            continue
        labels = SAMPLES[metric]
        known_labels |= labels.keys()
        for label, operator, value in MATCHER.findall(matchers):
            if label not in labels or (operator == "=" and value not in labels[label]):
                yield f'{metric}{{{label}{operator}"{value}"}}'
    for grouping in GROUPING.findall(text):
        for label in filter(None, grouping.split(", ")):
            if label not in known_labels:
                yield label


@pytest.mark.parametrize(
    ("file", "options"),
    [
        (PROMETHEUS / rules.FILE, Options()),
        (PROMETHEUS / "tests" / rules.FILE, ALL),
    ],
    ids=["default", "per thread"],
)
def test_the_committed_rules_are_the_rendered_ones(file: Path, options: Options) -> None:
    """What stands in the repository is what the package writes."""
    assert file.read_text() == rules.files(options)[rules.FILE]


def test_the_committed_example_is_the_packages() -> None:
    """The example for Alertmanager in the repository is what the package writes."""
    folder = ROOT / "dashboards" / "alertmanager"
    committed = {path.name: path.read_text() for path in folder.iterdir()}
    assert committed == alertmanager.files()


def test_alerts_on_single_threads_are_off_by_default() -> None:
    """Unless asked for, there is no alert that each thread near its limit would fire."""
    assert alerts().keys() - alerts(Options()).keys() == PER_THREAD
    assert alerts(Options()).items() <= alerts().items()


def test_the_oldest_prometheus_is_named() -> None:
    """The rendered file and the page on alerts say which Prometheus they need."""
    for text in (*rules.files().values(), ALERTS_PAGE.read_text()):
        assert f"Prometheus {rules.PROMETHEUS} or newer" in text


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_all_that_it_needs(name: str) -> None:
    """Each alert has a severity, texts and links; the runbook's address is made of its name."""
    alert = alerts()[name]
    assert re.fullmatch("LangChainQuota([A-Z][a-z]+)+", name)
    assert alert["labels"].keys() == {"severity"}
    assert alert["annotations"].keys() == ANNOTATIONS
    assert alert["annotations"]["runbook_url"] == f"{rules.RUNBOOK_BASE}/{name}"
    assert alert["annotations"]["summary"].count("\n") == 0


def test_one_alert_pages() -> None:
    """Only lost enforcement is critical."""
    severities = {name: alert["labels"]["severity"] for name, alert in alerts().items()}
    assert {name for name, severity in severities.items() if severity == "critical"} == {
        "LangChainQuotaEnforcementDegraded"
    }
    assert set(severities.values()) == {"critical", "warning", "info"}


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_escaped(name: str) -> None:
    """In texts every label is quoted, in links every label is escaped."""
    annotations = alerts()[name]["annotations"]
    for key, text in annotations.items():
        for template in re.findall(r"\{\{.*?\}\}", text):
            if "$labels" in template and key.endswith("_url"):
                assert re.fullmatch(r"\{\{ \$labels\.\w+ \| urlquery \}\}", template)
            elif "$labels" in template:
                assert template.startswith('{{ printf "%q" $labels.')
            else:
                assert template.startswith("{{ $value ")
    assert LABEL.search(annotations["summary"])
    assert LABEL.search(annotations["dashboard_url"])


@pytest.mark.parametrize("name", NAMES)
def test_a_link_leads_to_a_dashboard(name: str) -> None:
    """The dashboard that an alert leads to exists, and has each variable that the link sets."""
    url = alerts()[name]["annotations"]["dashboard_url"]
    found = re.fullmatch(rf"{rules.GRAFANA_URL}/d/([\w-]+)\?(.+)", url)
    assert found
    board = boards()[found[1]]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", found[2])) <= variables


def boards() -> dict[str, Any]:
    """The dashboards by their UID."""
    read = [json.loads(path.read_text()) for path in (ROOT / "dashboards/grafana").glob("*.json")]
    return {board["uid"]: board for board in read}


def panels(board: Any) -> set[str]:
    nested = [inner for panel in board["panels"] for inner in panel.get("panels", [])]
    return {panel["title"] for panel in (*board["panels"], *nested)}


@pytest.mark.parametrize("rule", all_rules(ALL), ids=lambda rule: rule.get("alert") or "record")
def test_rules_name_what_the_code_has(rule: Any) -> None:
    """Every metric, label and label value of a rule exists in the code."""
    assert RECORDED.search(rule["expr"]) or METRIC.search(rule["expr"])
    assert list(unknown(rule["expr"])) == []
    assert set(LABEL.findall(str(rule.get("annotations")))) <= {
        *ADDED_BY_PROMETHEUS,
        *(label for labels in SAMPLES.values() for label in labels),
    }


def test_the_selectors_keep_to_labels_of_the_scrape() -> None:
    """Every label of the code is one that no selector of a user may name."""
    assert {label for labels in SAMPLES.values() for label in labels} == rules.OWN_LABELS


def test_misspelt_names_are_found() -> None:
    """The search finds a metric, a label, a value and a recorded series that do not exist."""
    text = (
        'langchain_quota_cals_total, langchain_quota_limit{scoop="thread"}, '
        'langchain_quota_limit{scope="tread"}, sum by (job, agend) (langchain_quota_limit), '
        "job:langchain_quota_x:rate"
    )
    assert list(unknown(text)) == [
        "job:langchain_quota_x:rate",
        "langchain_quota_cals_total",
        'langchain_quota_limit{scoop="thread"}',
        'langchain_quota_limit{scope="tread"}',
        "agend",
    ]


@pytest.mark.parametrize("page", [*PAGES, ALERTS_PAGE], ids=lambda page: page.stem)
def test_pages_name_what_the_code_has(page: Path) -> None:
    """Every metric, label and label value in a runbook or on the page on alerts exists."""
    for query in queries(page):
        assert list(unknown(query)) == []
    names = {metric for metric, _ in METRIC.findall(page.read_text())}
    assert names <= SAMPLES.keys()
    assert set(RECORDED.findall(page.read_text())) <= records()


def test_every_alert_has_a_runbook() -> None:
    """There is one page for each alert, and none for an alert that is gone."""
    assert [page.stem for page in PAGES] == NAMES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_runbook_is_complete(page: Path) -> None:
    """A runbook says what it is about, and has four parts, a query and a panel that exists."""
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    diagnosis = text.split("## Diagnosis")[1].split("## Mitigation")[0]
    assert PROMQL.search(diagnosis)
    titles = {board["title"]: panels(board) for board in boards().values()}
    named = PANEL.findall(diagnosis)
    assert named
    for panel, board in named:
        assert panel in titles[board]


@pytest.mark.parametrize("page", [RUNBOOKS / "README.md", ALERTS_PAGE], ids=["runbooks", "alerts"])
def test_the_indexes_are_complete(page: Path) -> None:
    """The runbooks' index and the page on alerts list every alert once, with its severity."""
    listed = re.findall(r"^\| [`\[](\w+)[`\]]\S* \| (\w+)", page.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(
        (name, alert["labels"]["severity"]) for name, alert in alerts().items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_is_tested_both_ways(name: str) -> None:
    """Promtool tests each alert where it fires, with labels and texts, and where it must not."""
    fires: list[Any] = []
    silent: list[Any] = []
    for path in PROMTOOL_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for test in case["alert_rule_test"]:
                if test["alertname"] == name:
                    (fires if test["exp_alerts"] else silent).append(test["exp_alerts"])
    assert fires
    assert silent
    for [alert] in fires:
        assert alert["exp_labels"].items() >= alerts()[name]["labels"].items()
        assert len(alert["exp_labels"]) > 1
        assert alert["exp_annotations"].keys() == ANNOTATIONS


def test_promtool_tests_load_the_rules() -> None:
    """Each file of tests names the rules beside it: promtool only warns of a missing file."""
    assert len(PROMTOOL_TESTS) == len(NAMES)
    for path in PROMTOOL_TESTS:
        assert yaml.safe_load(path.read_text())["rule_files"] == [rules.FILE]


def test_the_selector_is_everywhere() -> None:
    """A user's matchers are in every selector of a metric of the package."""
    matchers = 'job=~"a|b\\\\.c",namespace!="it\'s"'
    selectors = [
        selector
        for rule in all_rules(Options(selector=matchers, per_thread=True))
        for selector in METRIC.findall(rule["expr"])
    ]
    assert len(selectors) > 20
    assert [inner for _, inner in selectors if not inner.endswith(matchers)] == []


def test_without_a_selector_there_is_no_empty_one() -> None:
    """By default the rules are for all jobs."""
    for rule in all_rules(ALL):
        assert "{}" not in rule["expr"]
        assert 'job="' not in rule["expr"]


def test_links_begin_with_the_given_addresses() -> None:
    """Grafana's and the runbooks' addresses are the user's, with or without a slash at the end."""
    options = Options(
        grafana_url="https://example.org:3000/grafana/", runbook_base="https://example.org/on-call"
    )
    for name, alert in alerts(options).items():
        links = alert["annotations"]
        assert links["dashboard_url"].startswith("https://example.org:3000/grafana/d/langchain")
        assert links["runbook_url"] == f"https://example.org/on-call/{name}"


@pytest.mark.parametrize("options", [Options(), ALL], ids=["default", "per thread"])
def test_the_operators_object_has_the_same_rules(options: Options) -> None:
    """A PrometheusRule holds the very groups of the rule file."""
    [(name, text)] = rules.files(replace(options, format="prometheusrule")).items()
    made = yaml.safe_load(text)
    assert name == rules.OPERATOR_FILE
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["metadata"] == {"name": "langchain-quota"}
    assert made["spec"] == parsed(options)


def test_texts_are_folded_back() -> None:
    """Descriptions are broken into short lines for people; the alert has them in one."""
    rendered = rules.render(ALL)
    for group in groups("", per_thread=True):
        for rule in group.rules:
            if isinstance(rule, Alert):
                assert rule.description not in rendered
                assert alerts()[rule.name]["annotations"]["description"] == rule.description


@pytest.mark.parametrize(
    "selector",
    [
        'job="agents"',
        'job = "agents" , namespace=~"prod|test"',
        'job!~"a.*",cluster!="b"',
        r'job=~"a\\.b"',
        r'job="quo\"te"',
        'job="{}, =ü"',
    ],
)
def test_good_selectors(selector: str) -> None:
    """Matchers as PromQL has them between braces are taken."""
    assert Options(selector=selector).selector == selector


@pytest.mark.parametrize(
    "selector",
    [
        "agents",
        "job=agents",
        "job='agents'",
        '{job="agents"}',
        'job="agents"}',
        'job="agents",',
        'job="agents" or vector(1)',
        'job="agents"} or up{job="b"',
        'job="agents',
        r'job="agents\"',
        r'job=~"a\.b"',
        'job="a\nb"',
        'job=~"("',
        'job=="a"',
        '1job="a"',
        'agent="researcher"',
        'job="agents",thread_id="ann"',
        '__name__="up"',
        " ",
    ],
)
def test_bad_selectors(selector: str) -> None:
    """What would break the rules, or match no metric that lacks the label, is refused."""
    with pytest.raises(ValueError, match=r"^selector must "):
        Options(selector=selector)


@pytest.mark.parametrize("argument", ["grafana_url", "runbook_base"])
@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "ftp://example.org",
        "javascript:alert(1)",
        "https://",
        "https:///path",
        "https://example.org/{{ $labels.job }}",
        "https://example.org/?orgId=1",
        "https://example.org/#top",
        "https://user:secret@example.org",
        "https://example.org/a b",
        "https://example.org/\n",
        "https://example.org:port/",
        "https://[::1/",
    ],
)
def test_bad_addresses(argument: str, url: str) -> None:
    """An address to which no path can be appended, or that has a secret, is refused by name."""
    with pytest.raises(ValueError, match=rf"^{argument} must be an http or https") as refused:
        Options(**{argument: url})  # type: ignore[arg-type]  # both are strings
    assert repr(url) in str(refused.value)


def test_bad_format() -> None:
    """A format that does not exist is refused by name."""
    wrong: Format = "json"  # type: ignore[assignment]  # the mistake
    with pytest.raises(ValueError, match=r"^format must be one of .+, not 'json'$"):
        Options(format=wrong)


def example() -> Any:
    [text] = alertmanager.files().values()
    return yaml.safe_load(text)


def test_the_example_names_alerts_that_exist() -> None:
    """Every name and pattern in the example's inhibitions matches alerts; none inhibits itself."""
    for rule in example()["inhibit_rules"]:
        [sources, targets] = [
            {
                name
                for matcher in rule[side]
                for name in NAMES
                if (found := re.fullmatch(r'alertname =~? "(.+)"', matcher))
                and re.fullmatch(found[1], name)
            }
            for side in ("source_matchers", "target_matchers")
        ]
        assert sources
        assert targets
        assert not sources & targets
        assert rule["equal"][0] == "job"


def test_exhausted_inhibits_near() -> None:
    """A thread that is refused, and a limit that many threads used up, silence what is near."""
    inhibits = {
        (name, tuple(rule["equal"]))
        for rule in example()["inhibit_rules"]
        for name in PER_THREAD
        for source in rule["source_matchers"]
        for target in rule["target_matchers"]
        if "ThreadKeepsHitting" in source or "ManyThreadsExhausted" in source
        if re.fullmatch(target.split('"')[1], name)
    }
    assert inhibits == {
        (name, equal)
        for name in PER_THREAD
        for equal in (("job", "agent", "limit", "thread_id"), ("job", "agent", "limit"))
    }


def test_the_example_groups_threads() -> None:
    """One message tells of a limit, whatever the number of its threads."""
    [route] = example()["route"]["routes"]
    assert route["group_by"] == ["job", "agent", "limit", "alertname"]
