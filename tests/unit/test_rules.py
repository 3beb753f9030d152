"""The alert rules, their tests and their runbooks: each alert has all, and nothing is misspelt."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from langchain_quota import Call, MemoryStore, Telemetry, ToolCallLimit
from langchain_quota.monitoring import checks, exports
from langchain_quota.telemetry import recorder_of
from tests.faults import at, differences, no_faults
from tests.judged import Used, judge
from tests.metrics import LABELS_OF

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "langchain_quota" / "monitoring" / "rules.yaml"
PROMETHEUS = ROOT / "dashboards" / "prometheus"
PROMTOOL_TESTS = sorted((PROMETHEUS / "tests").glob("*_test.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(path for path in RUNBOOKS.glob("*.md") if path.name != "README.md")
ALERTS_PAGE = ROOT / "docs" / "alerts.md"

PER_THREAD = {"LangChainQuotaThreadNearLimit", "LangChainQuotaThreadExhaustionPredicted"}
HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]
ANNOTATIONS = {"summary", "description", "runbook_url", "dashboard_url"}
ADDED_BY_PROMETHEUS = {"job", "instance"}

METRIC = re.compile(r"(?<![:\w])(langchain_quota_\w+)(?:\{([^}]*)\})?")
RECORDED = re.compile(r"\w+:langchain_quota_\w+:\w+")
# What is left of an expression when all that names no series is taken away; functions have a brace.
NO_SERIES = re.compile(
    r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|ignoring|group_left) \([^)]*\)|\boffset \w+"
    r"|\b(?:and|or|unless)\b"
)
SERIES = re.compile(r"(?<![\w:])[a-zA-Z_:][\w:]*+(?!\s*\()")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)")
LABEL = re.compile(r"\$labels\.(\w+)")
PROMQL = re.compile(r"```promql\n(.*?)```", re.DOTALL)
PANEL = re.compile(r"\*\*([^*]+)\*\* \(\*([^*]+)\*\)")


@cache
def loaded(text: str) -> Any:
    return yaml.safe_load(text)


def parsed(**options: Any) -> Any:
    [text] = exports.rules(**options).values()
    return deepcopy(loaded(text))


def all_rules(**options: Any) -> list[Any]:
    options = {"per_thread": True, **options}
    return [rule for group in parsed(**options)["groups"] for rule in group["rules"]]


def alerts(**options: Any) -> dict[str, Any]:
    return {rule["alert"]: rule for rule in all_rules(**options) if "alert" in rule}


def records() -> set[str]:
    return {rule["record"] for rule in all_rules() if "record" in rule}


NAMES = sorted(alerts())


def at_rule(name: str) -> str:
    """Where a rule stands, and its name."""
    return f"{at(DATA, f': {name}')}: {name}"


def queries(path: Path) -> list[str]:
    """The PromQL of a page."""
    return PROMQL.findall(path.read_text())


def values() -> dict[str, dict[str, set[str]]]:
    """The values of each label of each series of the code, by their names."""
    registry = CollectorRegistry()
    recorder = recorder_of(Telemetry(registry=registry))
    limit = ToolCallLimit("search", thread_limit=5, run_limit=4)
    for used in range(6):
        call = Call("tool", "search", f"call-{used}", agent="researcher", thread_id="ann")
        decided = judge([limit], {limit.counter: Used(used, 0)}, [call])
        recorder.record(decided.decisions, started=0)
    recorder.record_error("observer", KeyError("x"))
    in_memory = MemoryStore()
    recorder.watch_store(in_memory)
    recorder.observe_store("acquire", "ok", 0.001)
    recorder.record_fallback("researcher", "deny", 1)
    found: dict[str, dict[str, set[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


VALUES = values()


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
        if metric not in LABELS_OF:
            yield metric
            continue
        known_labels |= LABELS_OF[metric]
        for label, operator, value in MATCHER.findall(matchers):
            if label not in LABELS_OF[metric] or (
                operator == "=" and value not in VALUES[metric][label]
            ):
                yield f'{metric}{{{label}{operator}"{value}"}}'
    for grouping in GROUPING.findall(text):
        for label in filter(None, grouping.split(", ")):
            if label not in known_labels:
                yield label


def test_the_rules_are_good_as_they_stand() -> None:
    """Without a user's options an export is the file in the package, with all alerts."""
    assert list(exports.rules(per_thread=True).values()) == [DATA.read_text()]


def test_the_stacks_rules_are_the_exported_ones() -> None:
    """What the stack mounts is what the package writes."""
    [(name, text)] = exports.rules().items()
    assert (PROMETHEUS / name).read_text() == text


def test_alerts_on_single_threads_are_off_by_default() -> None:
    """Unless asked for, there is no alert that each thread near its limit would fire."""
    quiet = alerts(per_thread=False)
    assert alerts().keys() - quiet.keys() == PER_THREAD
    assert quiet.items() <= alerts().items()
    assert {rule["record"] for rule in all_rules(per_thread=False) if "record" in rule} == records()


def test_the_oldest_prometheus_is_named() -> None:
    """The rules and the page on alerts say which Prometheus they need."""
    for page in (DATA, ALERTS_PAGE):
        assert f"Prometheus {exports.PROMETHEUS} or newer" in page.read_text()


def lacking(name: str, alert: Any) -> Iterator[str]:
    if not re.fullmatch("LangChainQuota([A-Z][a-z]+)+", name):
        yield "is not named like the others"
    if alert["labels"].keys() != {"severity"}:
        yield f"has the labels {[*alert['labels']]}, not its severity alone"
    texts = alert["annotations"]
    if texts.keys() != ANNOTATIONS:
        yield f"has the annotations {[*texts]}, not {sorted(ANNOTATIONS)}"
        return
    if texts["runbook_url"] != f"{exports.RUNBOOK_BASE}/{name}":
        yield f"leads to {texts['runbook_url']}, not to its runbook"
    yield from (f"has a line break in {key}" for key, text in texts.items() if "\n" in text)
    found = re.fullmatch(rf"{exports.GRAFANA_URL}/d/([\w-]+)\?(.+)", texts["dashboard_url"])
    if not found or found[1] not in boards():
        yield f"leads to {texts['dashboard_url']}, which is no dashboard"
        return
    variables = {variable["name"] for variable in boards()[found[1]]["templating"]["list"]}
    for variable in re.findall(r"var-(\w+)=", found[2]):
        if variable not in variables:
            yield f"sets {variable!r}, which its dashboard has not"


def test_an_alert_has_all_that_it_needs() -> None:
    """An alert has a severity, texts, its runbook, and a dashboard with each variable it sets."""
    no_faults(
        (
            f"{at_rule(name)} {fault}"
            for name, alert in alerts().items()
            for fault in lacking(name, alert)
        ),
        remedy="Make the alert like its neighbours.",
    )


def test_one_alert_pages() -> None:
    """Only lost enforcement is critical."""
    severities = {name: alert["labels"]["severity"] for name, alert in alerts().items()}
    assert {name for name, severity in severities.items() if severity == "critical"} == {
        "LangChainQuotaEnforcementDegraded"
    }
    assert set(severities.values()) == {"critical", "warning", "info"}


def unescaped(annotations: Any) -> Iterator[str]:
    for key, text in annotations.items():
        for template in re.findall(r"\{\{.*?\}\}", text):
            if "$labels" in template and key.endswith("_url"):
                good = re.fullmatch(r"\{\{ \$labels\.\w+ \| urlquery \}\}", template)
            elif "$labels" in template:
                good = template.startswith('{{ printf "%q" $labels.')
            else:
                good = template.startswith("{{ $value ")
            if not good:
                yield f"has {template} in {key}"
    for key in ("summary", "dashboard_url"):
        if not LABEL.search(annotations[key]):
            yield f"names no label in {key}"


def test_labels_are_escaped() -> None:
    """In texts every label is quoted, in links every label is escaped."""
    no_faults(
        (
            f"{at_rule(name)} {fault}"
            for name, alert in alerts().items()
            for fault in unescaped(alert["annotations"])
        ),
        remedy='Write {{ printf "%q" $labels.x }} in texts, {{ $labels.x | urlquery }} in links.',
    )


@cache
def boards() -> dict[str, Any]:
    """The dashboards by their UID."""
    read = [json.loads(path.read_text()) for path in (ROOT / "dashboards/grafana").glob("*.json")]
    return {board["uid"]: board for board in read}


def panels(board: Any) -> set[str]:
    nested = [inner for panel in board["panels"] for inner in panel.get("panels", [])]
    return {panel["title"] for panel in (*board["panels"], *nested)}


def misnamed(rule: Any) -> Iterator[str]:
    series = SERIES.findall(NO_SERIES.sub(" ", rule["expr"]))
    if not series:
        yield "names no series"
    yield from (each for each in series if each not in LABELS_OF.keys() | records())
    yield from unknown(rule["expr"])
    of_the_code = {label for labels in LABELS_OF.values() for label in labels}
    for label in LABEL.findall(str(rule.get("annotations"))):
        if label not in of_the_code | ADDED_BY_PROMETHEUS:
            yield f"$labels.{label}"


def test_rules_name_what_the_code_has() -> None:
    """Every metric, label and label value of a rule exists in the code; there are no others."""
    assert len(all_rules()) > len(NAMES)
    no_faults(
        (
            f"{at_rule(rule.get('alert') or rule['record'])}: {fault}"
            for rule in all_rules()
            for fault in misnamed(rule)
        ),
        remedy="Name what telemetry/names.py has.",
    )


def test_the_selectors_keep_to_labels_of_the_scrape() -> None:
    """Every label of the code is one that no selector of a user may name."""
    assert set().union(*LABELS_OF.values()) == checks.OWN_LABELS


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


def test_pages_name_what_the_code_has() -> None:
    """Every metric, label and label value in a runbook or on the page on alerts exists."""
    wrong = []
    for page in (*PAGES, ALERTS_PAGE):
        text = page.read_text()
        names = [metric for metric, _ in METRIC.findall(text) if metric not in LABELS_OF]
        series = [each for each in RECORDED.findall(text) if each not in records()]
        of_queries = [name for query in queries(page) for name in unknown(query)]
        wrong += [f"{at(page, name)}: {name}" for name in (*names, *series, *of_queries)]
    no_faults(wrong, remedy="Name what telemetry/names.py has, or rules.yaml records.")


def test_every_alert_has_a_runbook() -> None:
    """There is one page for each alert, and none for an alert that is gone."""
    assert [page.stem for page in PAGES] == NAMES


def incomplete(page: Path) -> Iterator[str]:
    text = page.read_text()
    if not text.startswith(f"# {page.stem}\n"):
        yield "does not begin with the alert's name"
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    if headings != HEADINGS:
        yield f"has the parts {headings}, not {HEADINGS}"
        return
    diagnosis = text.split("## Diagnosis")[1].split("## Mitigation")[0]
    if not PROMQL.search(diagnosis):
        yield "has no query under Diagnosis"
    named = PANEL.findall(diagnosis)
    if not named:
        yield "names no panel under Diagnosis"
    titles = {board["title"]: panels(board) for board in boards().values()}
    for panel, board in named:
        if panel not in titles.get(board, ()):
            yield f"names the panel {panel!r} of {board!r}, which is not there"


def test_a_runbook_is_complete() -> None:
    """A runbook says what it is about, and has four parts, a query and a panel that exists."""
    no_faults(
        (f"{at(page)} {fault}" for page in PAGES for fault in incomplete(page)),
        remedy="Make the runbook like its neighbours.",
    )


def test_the_indexes_are_complete() -> None:
    """The runbooks' index and the page on alerts list every alert once, with its severity."""
    real = [f"{name} | {alert['labels']['severity']}" for name, alert in alerts().items()]
    row = re.compile(r"^\| [`\[](\w+)[`\]]\S* \| (\w+)", re.MULTILINE)
    wrong: list[str] = []
    for page in (RUNBOOKS / "README.md", ALERTS_PAGE):
        listed = [" | ".join(found) for found in row.findall(page.read_text())]
        wrong += differences(page, listed, real, kind="alert")
    no_faults(wrong, remedy="Give each alert one row, with the severity of rules.yaml.")


def untested(name: str, tests: list[Any]) -> Iterator[str]:
    fires = [test["exp_alerts"] for test in tests if test["exp_alerts"]]
    if not fires:
        yield "is tested nowhere where it fires"
    if len(fires) == len(tests):
        yield "is tested nowhere where it must not fire"
    for [alert] in fires:
        labels = alert["exp_labels"]
        if not labels.items() >= alerts()[name]["labels"].items() or len(labels) < 2:
            yield f"is tested with the labels {labels}"
        if alert["exp_annotations"].keys() != ANNOTATIONS:
            yield f"is tested with the annotations {[*alert['exp_annotations']]}"


def test_every_alert_is_tested_both_ways() -> None:
    """Promtool tests each alert where it fires, with labels and texts, and where it must not."""
    tests: dict[str, list[Any]] = {name: [] for name in NAMES}
    for path in PROMTOOL_TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for test in case["alert_rule_test"]:
                tests[test["alertname"]].append(test)
    no_faults(
        (f"{at_rule(name)} {fault}" for name in NAMES for fault in untested(name, tests[name])),
        remedy="Add the case to dashboards/prometheus/tests/.",
    )


def test_promtool_tests_load_the_rules() -> None:
    """Each file of tests names the package's rules: promtool only warns of a missing file."""
    assert len(PROMTOOL_TESTS) == len(NAMES)
    for path in PROMTOOL_TESTS:
        [file] = yaml.safe_load(path.read_text())["rule_files"]
        assert (path.parent / file).resolve() == DATA


@pytest.mark.parametrize(
    "matchers",
    [
        'job="agents"',
        'job=~"a|b\\\\.c",namespace!="it\'s"',
        f'job="}} langchain_quota_limit{{",instance="{exports.GRAFANA_URL}"',
    ],
)
def test_the_selector_is_everywhere(matchers: str) -> None:
    """A user's matchers are in every selector of a metric of the package, and nowhere else."""
    for narrowed, rule in zip(all_rules(selector=matchers), all_rules(), strict=True):
        expr = narrowed["expr"]
        assert expr.count(matchers) == len(METRIC.findall(rule["expr"]))
        narrowed["expr"] = expr.replace(f"{{{matchers}}}", "").replace(f"{matchers},", "")
        assert narrowed == rule


@pytest.mark.parametrize(
    ("grafana", "runbooks"),
    [
        ("https://example.org:3000/grafana", "https://example.org/on-call"),
        (exports.RUNBOOK_BASE, exports.GRAFANA_URL),
        ("https://[::1]/langchain_quota_limit", "https://example.org/$x"),
    ],
    ids=["usual", "swapped", "odd"],
)
def test_links_begin_with_the_given_addresses(grafana: str, runbooks: str) -> None:
    """Grafana's and the runbooks' addresses are the user's, with or without a slash at the end."""
    for slash in ("", "/"):
        made = alerts(
            grafana_url=grafana + slash, runbook_base=runbooks + slash, selector='job="x"'
        )
        for name, alert in made.items():
            links = alert["annotations"]
            assert links["dashboard_url"].startswith(f"{grafana}/d/langchain-quota-")
            assert links["runbook_url"] == f"{runbooks}/{name}"


def test_the_operators_object_has_the_same_rules() -> None:
    """A PrometheusRule holds the very groups of the rule file."""
    for per_thread in (False, True):
        made = parsed(format="prometheusrule", per_thread=per_thread)
        assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
        assert made["metadata"] == {"name": "langchain-quota"}
        assert made["spec"] == parsed(per_thread=per_thread)


def example() -> Any:
    [text] = exports.alertmanager().values()
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
