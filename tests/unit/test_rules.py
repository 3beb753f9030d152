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

from dashboards import settings
from langchain_quota import Call, MemoryStore, Telemetry, ToolCallLimit
from langchain_quota.monitoring import checks, exports
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.stores import NEARLY_FULL
from tests.faults import at, differences, no_faults
from tests.judged import Used, judge
from tests.metrics import LABELS_OF, mixed

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
SCRAPED = "scrape_duration_seconds"
"""What Prometheus itself writes for each target."""
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
TEMPLATE = re.compile(r"\{\{-? (.*?) -?\}\}")
# What a text asks Prometheus for: one recorded series, or a count of it, with every label quoted.
ASKED = re.compile(
    r"with printf `(?:count\()?(\w+:langchain_quota_\w+:\w+)\{((?:\w+=%q,?)+)\}[^`%]*` ([^|`]+)"
    r' \| query(?: \| sortByLabel "\w+")?'
)
QUOTED = re.compile(r'printf "%q" \$(?:labels|each\.Labels)\.\w+(?: \| reReplaceAll .*)?')
COMPARED = re.compile(r'if eq \$labels\.\w+ "\w+"')
"""A label that decides about a text, and is not in it."""
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


def records(**options: Any) -> set[str]:
    return {rule["record"] for rule in all_rules(**options) if "record" in rule}


def levels(recorded: str) -> list[str]:
    """The labels of a recorded series: its name begins with them."""
    labels = {*ADDED_BY_PROMETHEUS, *set().union(*LABELS_OF.values())}
    found = re.match(rf"((?:{'|'.join(sorted(labels, reverse=True))}|_)+):", recorded)
    assert found, recorded
    return re.findall("|".join(sorted(labels, reverse=True)), found[1])


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
    recorder.record_spent("researcher", "ann", [], model="gpt-5", estimated=True)
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
            known_labels |= set(levels(recorded))
        else:
            yield recorded
    selectors = METRIC.findall(text)
    for metric, matchers in selectors:
        if metric not in LABELS_OF:
            yield metric
            continue
        known_labels |= LABELS_OF[metric]
        for label, operator, value in MATCHER.findall(matchers):
            # An empty value is that of a label which the series has not.
            if label not in LABELS_OF[metric] or (
                operator == "=" and value and value not in VALUES[metric][label]
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


def test_what_is_about_single_threads_is_off_by_default() -> None:
    """Unless asked for, there is no alert and no recorded series for each thread."""
    quiet = alerts(per_thread=False)
    assert alerts().keys() - quiet.keys() == PER_THREAD
    assert quiet.items() <= alerts().items()
    assert {name for name in records() if "thread_id" in levels(name)}
    assert not {name for name in records(per_thread=False) if "thread_id" in levels(name)}


@pytest.mark.parametrize("per_thread", [False, True])
def test_every_recorded_series_is_read(per_thread: bool) -> None:  # noqa: FBT001 - pytest's
    """An alert, or its text, reads each series that is recorded, and no other."""
    read = set(RECORDED.findall(str(list(alerts(per_thread=per_thread).values()))))
    assert read == records(per_thread=per_thread)


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
    if texts["runbook_url"] != f"{exports.RUNBOOKS}/{name}.md":
        yield f"leads to {texts['runbook_url']}, not to its runbook"
    yield from (f"has a line break in {key}" for key, text in texts.items() if "\n" in text)
    found = re.fullmatch(
        rf"{exports.GRAFANA_URL}/d/([\w-]+)\?(.+)&viewPanel=(.+)", texts["dashboard_url"]
    )
    if not found or found[1] not in boards():
        yield f"leads to {texts['dashboard_url']}, which is no dashboard"
        return
    variables = {variable["name"] for variable in boards()[found[1]]["templating"]["list"]}
    for variable in re.findall(r"var-(\w+)=", found[2]):
        if variable not in variables:
            yield f"sets {variable!r}, which its dashboard has not"
    # Which panel it is may depend on the limit's unit: what chooses it stands in braces.
    chosen = re.sub(r"\{\{.+?\}\}", " ", found[3]).split()
    for panel in chosen:
        if int(panel) not in panels(boards()[found[1]]):
            yield f"opens on the panel {panel}, which its dashboard has not"


def test_an_alert_has_all_that_it_needs() -> None:
    """An alert has a severity, texts, its runbook, and a link to a panel that is there."""
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
        for template in TEMPLATE.findall(text):
            asked = ASKED.fullmatch(template)
            if asked:
                names = [label.removesuffix("=%q") for label in asked[2].split(",")]
                good = asked[3].split() == [f"$labels.{name}" for name in names]
                good = good and set(names) <= set(levels(asked[1])) and asked[1] in records()
            elif "abels" in template and key.endswith("_url"):
                good = bool(re.fullmatch(r"\$labels\.\w+ \| urlquery", template))
            elif "abels" in template:
                good = bool(QUOTED.fullmatch(template) or COMPARED.fullmatch(template))
            else:
                good = "query" not in template
            if not good:
                yield f"has {template} in {key}"
    for key in ("summary", "dashboard_url"):
        if not LABEL.search(annotations[key]):
            yield f"names no label in {key}"


def test_labels_are_escaped() -> None:
    """In texts and their queries every label is quoted, in links every label is escaped."""
    no_faults(
        (
            f"{at_rule(name)} {fault}"
            for name, alert in alerts().items()
            for fault in unescaped(alert["annotations"])
        ),
        remedy='Write {{ printf "%q" $labels.x }} in texts, {{ $labels.x | urlquery }} in links; '
        "ask for recorded series with {x=%q}.",
    )


@pytest.mark.parametrize(
    "text",
    [
        "{{ $labels.agent }}",
        "{{ .Labels.agent }}",
        "{{ with printf `job:langchain_quota_y:count{job=%q}` $labels.job | query }}",
        "{{ with printf `langchain_quota_limit{agent=%q}` $labels.agent | query }}",
        "{{ with printf `job:langchain_quota_build_info:count{job=%s}` $labels.job | query }}",
        "{{ with printf `job:langchain_quota_build_info:count{job=%q}` $labels.agent | query }}",
        "{{ with `langchain_quota_limit` | query }}",
        "{{ if eq $labels.action `deny` | printf $labels.action }}",
    ],
)
def test_labels_that_are_not_escaped_are_found(text: str) -> None:
    """The search finds a bare label, a query of what is not recorded, and one that forges."""
    texts = {"summary": f'{text} {{{{ printf "%q" $labels.job }}}}', "dashboard_url": "$labels.job"}
    assert [*unescaped(texts)] == [f"has {text[3:-3]} in summary"]


def test_rules_about_refusals_leave_out_limits_that_are_meant_to_be_hit() -> None:
    """What counts for a limit asks whether it is worth an alert, over the time that it looks at.

    An alert that reads a ratio needs not ask: the ratio has asked.
    """
    rules = {
        rule.get("alert") or rule["record"]: rule["expr"]
        for rule in all_rules()
        if "alert" in rule or ":ratio_rate" in rule["record"]
    }
    of_limits = {
        name: expr
        for name, expr in rules.items()
        if re.search(r"\blimit\b", expr) and ":ratio_rate" not in expr
    }
    assert len(of_limits) == 9
    worth_it = re.compile(
        r"\nunless on \(job, agent, limit\) "
        r"last_over_time\(langchain_quota_limit_alert\[\d+m\]\) == 0\n\Z"
    )
    assert [name for name, expr in of_limits.items() if not worth_it.search(expr)] == []


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("LangChainQuotaStoreNearlyFull", NEARLY_FULL),
        ("LangChainQuotaBlockRatioHigh", settings.REFUSED_SHARE_CRITICAL),
        ("LangChainQuotaEnforcementDegraded", 0.05),
        ("LangChainQuotaUsageEstimated", settings.ESTIMATED_SHARE_WARNING),
    ],
)
def test_a_threshold_is_the_same_everywhere(name: str, threshold: float) -> None:
    """A share is the same in the rule, its text, the page on alerts, the log and the dashboards."""
    alert = alerts()[name]
    read = RECORDED.findall(alert["expr"])
    recorded = [rule["expr"] for rule in all_rules() if rule.get("record") in read]
    description = alert["annotations"]["description"]
    compared = re.findall(r"> (0\.\d+)", " ".join([alert["expr"], *recorded, description]))
    assert {float(share) for share in compared} == {threshold}
    [row] = [
        line for line in ALERTS_PAGE.read_text().splitlines() if line.startswith(f"| `{name}`")
    ]
    for text in (description, row):
        assert f" {threshold:.0%}" in text


def test_use_in_runbooks_is_that_of_the_freshest_replica() -> None:
    """A runbook that asks what threads have used leaves out replicas with older counts."""
    asked = [
        query
        for page in PAGES
        for query in queries(page)
        if "langchain_quota_thread_used" in dict(METRIC.findall(query))
    ]
    assert len(asked) >= 2
    assert [query for query in asked if "_thread_last_decision_" not in query] == []


@cache
def boards() -> dict[str, Any]:
    """The dashboards by their UID."""
    read = [json.loads(path.read_text()) for path in (ROOT / "dashboards/grafana").glob("*.json")]
    return {board["uid"]: board for board in read}


def panels(board: Any) -> dict[int, str]:
    """The titles of a dashboard's panels, by their ids."""
    nested = [inner for panel in board["panels"] for inner in panel.get("panels", [])]
    return {panel["id"]: panel["title"] for panel in (*board["panels"], *nested)}


def misnamed(rule: Any) -> Iterator[str]:
    series = SERIES.findall(NO_SERIES.sub(" ", rule["expr"]))
    if not series:
        yield "names no series"
    yield from (each for each in series if each not in LABELS_OF.keys() | records() | {SCRAPED})
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


def test_units_are_never_brought_together() -> None:
    """No rule adds or compares calls, tokens and dollars; what is about all is about shares."""
    no_faults(
        (
            f"{at_rule(rule.get('alert') or rule['record'])}: {fault}"
            for rule in all_rules()
            for fault in mixed(rule["expr"])
        ),
        remedy="Let the rule be about one unit, or about shares.",
    )


@pytest.mark.parametrize(
    "expr",
    [
        "langchain_quota_thread_used + langchain_quota_thread_used_tokens",
        "sum(langchain_quota_thread_used or langchain_quota_thread_used_dollars)",
        "langchain_quota_subject_used_tokens / langchain_quota_subject_limit_dollars",
        "a:langchain_quota_subject_used:max > a:langchain_quota_subject_limit_dollars:max",
    ],
)
def test_units_that_are_brought_together_are_found(expr: str) -> None:
    """The search finds a sum, a union, a quotient and a comparison of two units."""
    assert [*mixed(expr)]


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
    titles = {board["title"]: panels(board).values() for board in boards().values()}
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
        'job="`%q}}",instance="{{ $value }}"',
    ],
)
def test_the_selector_is_everywhere(matchers: str) -> None:
    """A user's matchers are in every selector of a metric, and nowhere else: in no text."""
    for narrowed, rule in zip(all_rules(selector=matchers), all_rules(), strict=True):
        expr = narrowed["expr"]
        selectors = METRIC.findall(rule["expr"]) + re.findall(SCRAPED, rule["expr"])
        assert expr.count(matchers) == len(selectors)
        narrowed["expr"] = expr.replace(f"{{{matchers}}}", "").replace(f"{matchers},", "")
        assert narrowed == rule


@pytest.mark.parametrize(
    ("grafana", "runbooks"),
    [
        ("https://example.org:3000/grafana", "https://example.org/on-call"),
        (exports.RUNBOOKS, exports.GRAFANA_URL),
        ("https://[::1]/langchain_quota_limit", "https://example.org/$x"),
    ],
    ids=["usual", "swapped", "odd"],
)
def test_links_begin_with_the_given_addresses(grafana: str, runbooks: str) -> None:
    """Grafana's and the runbooks' addresses are the user's, with or without a slash at the end."""
    for slash in ("", "/"):
        made = alerts(grafana_url=grafana + slash, runbooks=runbooks + slash, selector='job="x"')
        for name, alert in made.items():
            links = alert["annotations"]
            assert links["dashboard_url"].startswith(f"{grafana}/d/langchain-quota-")
            assert links["runbook_url"] == f"{runbooks}/{name}"


def test_links_to_runbooks_lead_to_pages_that_exist() -> None:
    """Without an address, each link leads to the page in the project's own repository."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("\nplugins:")[0])
    for alert in alerts().values():
        link = alert["annotations"]["runbook_url"]
        assert link.startswith(f"{site['repo_url']}/blob/main/")
        assert (ROOT / link.removeprefix(f"{site['repo_url']}/blob/main/")).is_file()


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
    """A limit that many threads used up silences what is near it."""
    inhibits = {
        (name, tuple(rule["equal"]))
        for rule in example()["inhibit_rules"]
        for name in PER_THREAD
        for source in rule["source_matchers"]
        for target in rule["target_matchers"]
        if "ManyThreadsExhausted" in source
        if re.fullmatch(target.split('"')[1], name)
    }
    assert inhibits == {(name, ("job", "agent", "limit")) for name in PER_THREAD}


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def test_the_example_groups_agents() -> None:
    """One message tells of an agent, whatever the number of its limits and threads."""
    [route] = example()["route"]["routes"]
    assert route["group_by"] == ["job", "agent"]


def test_a_refusal_is_notified_within_a_minute() -> None:
    """Half a minute is left for the scrape: the rule is asked often, and has no `for`."""
    [route] = example()["route"]["routes"]
    group = parsed()["groups"][0]
    [rule] = [rule for rule in group["rules"] if rule.get("alert") == "LangChainQuotaLimitBreached"]
    assert "for" not in rule
    assert seconds(group["interval"]) + seconds(route["group_wait"]) <= 30
