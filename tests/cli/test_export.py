"""The export command: what it writes, what it says, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from langchain_quota.cli import export, main
from langchain_quota.telemetry.names import METRICS

GRAFANA_URL = "http://localhost:3000"
GRAFANA, RUNBOOKS = "https://example.org/grafana", "https://example.org/runbooks"
ALERTS = ["--selector", 'job="x"', "--grafana-url", GRAFANA, "--runbooks", RUNBOOKS]
OF_ALERTS: dict[str, Any] = {"selector": 'job="x"', "grafana_url": GRAFANA, "runbooks": RUNBOOKS}


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def test_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file is written, with all options, into a new directory; each is a line of output."""
    boards = export.dashboards(selector='job="x"', runbooks=RUNBOOKS)
    placed = export.kubernetes(**OF_ALERTS, per_thread=True, spend=True)
    asked: list[tuple[list[str], dict[str, str]]] = [
        (["grafana"], export.dashboards()),
        (["grafana", *ALERTS[:2], *ALERTS[4:]], boards),
        (["prometheus", "--grafana-url", GRAFANA_URL], export.rules()),
        (
            ["prometheus", *ALERTS, "--per-thread-alerts"],
            export.rules(**OF_ALERTS, per_thread=True),
        ),
        (["prometheus", "--grafana-url", GRAFANA_URL, "--spend-alert"], export.rules(spend=True)),
        (["kubernetes", *ALERTS, "--per-thread-alerts", "--spend-alert"], placed),
        (["alertmanager"], export.alertmanager()),
    ]
    for number, (arguments, expected) in enumerate(asked):
        directory = tmp_path / "new" / str(number)
        assert main(["export", *arguments, "--to", str(directory)]) == 0
        assert contents(directory) == expected != {}
        printed = capsys.readouterr()
        assert printed.err == ""
        assert printed.out.splitlines() == [str(directory / name) for name in expected]


def test_what_is_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If something is in the way of a file none is written, and one line says what."""
    first, *_, last = sorted(export.dashboards())
    taken, (file, directory, link) = tmp_path / first, (tmp_path / each for each in "abc")
    taken.write_text("mine")
    for parent in (file, directory, link):
        parent.mkdir()
    (file / last).write_text("mine")
    (directory / last).mkdir()
    (link / last).symlink_to(tmp_path / "elsewhere")
    for to, options, known in (
        *((file, [], "--force"), (link, [], "--force")),
        (directory, ["--force"], repr(str(directory / last))),
        *((taken, [], f"cannot use --to {str(taken)!r}: "), (taken / "sub", [], "cannot use")),
    ):
        assert main(["export", "grafana", "--to", str(to), *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("langchain-quota export: ")
        assert known in line
        assert last in line or to not in (file, link)
        assert not to.is_dir() or [each.name for each in to.iterdir()] == [last]
    assert taken.read_text() == (file / last).read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def test_force_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --force files are overwritten; others, and what a link leads to, are left alone.

    Where Grafana is only the user knows: without the option one line names it.
    """
    (tmp_path / "other.yaml").write_text("mine")
    (tmp_path / export.RULES).symlink_to("other.yaml")
    assert main(["export", "prometheus", "--to", str(tmp_path), "--force"]) == 0
    assert contents(tmp_path) == {**export.rules(), "other.yaml": "mine"}
    last = capsys.readouterr().out.splitlines()[-1]
    assert GRAFANA_URL in last
    assert "--grafana-url" in last


REFUSED: dict[str, dict[str, list[str]]] = {
    "prometheus": {
        "--selector": [
            *("", " ", "agents", "job=agents", "job='agents'", '{job="agents"}', 'job="agents"}'),
            *('job="agents",', 'job="agents" or vector(1)', 'job="agents"} or up{job="b"'),
            *('job="agents', r'job="agents\"', r'job=~"a\.b"', 'job="a\nb"'),
            *('job=="a"', '1job="a"', 'agent="a"', 'job="a",thread_id="ann"', '__name__="up"'),
        ],
        "--grafana-url": [
            *("", "example.org", "ftp://example.org", "javascript:alert(1)", "https://"),
            *("https:///path", "https://example.org/{{ $labels.job }}", "https://example.org/'q'"),
            *("https://example.org/?orgId=1", "https://example.org/#top", "https://[::1/"),
            *("https://example.org/a b", "https://example.org/\n", "https://example.org:port/"),
            "https://u:s@example.org",
        ],
        "--runbooks": ["{{ x }}"],
        "--namespace": ["agents"],
    },
    "grafana": {"--selector": ['agent="a"'], "--runbooks": ["example.org"]},
    "alertmanager": {"--selector": ['job="x"'], "--grafana-url": [GRAFANA]},
    "tempo": {"--to": ["x"]},
}
"""What no export takes, or not this one."""


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value, or an option that does not apply, is refused with code 2 and named."""
    directory = tmp_path / "new"
    for option, values in ({"--to": [""]} | REFUSED[what]).items():
        for value in values:
            with pytest.raises(SystemExit) as ended:
                main(["export", what, "--to", str(directory), f"{option}={value}"])
            assert ended.value.code == 2
            reason = capsys.readouterr().err.partition("error: ")[2]
            assert option in reason or f"{what!r}" in reason, (value, reason)
    assert not directory.exists()


def test_no_selector_names_a_label_of_our_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A matcher of a label that a metric has would empty the rules: each is refused."""
    for label in sorted({"le", *(label for metric in METRICS for label in metric.labels)}):
        with pytest.raises(SystemExit):
            main(["export", "prometheus", "--to", str(tmp_path), "--selector", f'{label}="x"'])
        assert f"such as job, not '{label}'" in capsys.readouterr().err
    for free in ("answer", "cause", "droppable"):
        options = ("--to", str(tmp_path), "--force", "--selector", f'{free}="x"')
        assert main(["export", "prometheus", *options]) == 0


def test_good_values(tmp_path: Path) -> None:
    """Matchers as PromQL has them, and addresses, are taken."""
    for option, *values in (
        ("--selector", 'job = "agents" , namespace=~"prod|test"', 'job!~"a.*",cluster!="b"'),
        ("--selector", r'job=~"a\\.b"', r'job="quo\"te"', 'job="{}, =ü"'),
        ("--grafana-url", "http://[::1]:3000/grafana/"),
    ):
        for value in values:
            command = ["export", "kubernetes", "--to", str(tmp_path), "--force", option, value]
            assert main(command) == 0, value


def test_objects_for_kubernetes() -> None:
    """Each object is of a kind that a cluster takes, plain YAML, and small enough to apply.

    A ConfigMap has a dashboard and the sidecar's label; the PrometheusRule has the rules.
    """
    files = export.kubernetes(**OF_ALERTS)
    found = [yaml.safe_load(text) for text in files.values()]
    named = sorted(f"{each['kind']} {each.get('metadata', {}).get('name')}" for each in found)
    assert named == [
        *(f"ConfigMap langchain-quota-{each}" for each in ("budgets", "overview", "thread")),
        *("Kustomization None", "PodMonitor langchain-quota", "PrometheusRule langchain-quota"),
    ]
    # So much `kubectl apply` can keep of an object, in an annotation.
    assert max(len(text.encode()) for text in files.values()) < 256 * 1024
    marks = [token for text in files.values() for token in yaml.scan(text)]
    assert not any(isinstance(each, yaml.AnchorToken | yaml.AliasToken) for each in marks)
    boards = export.dashboards(selector='job="x"', runbooks=RUNBOOKS)
    configs = [each for each in found if each["kind"] == "ConfigMap"]
    assert {name: text for each in configs for name, text in each["data"].items()} == boards
    labels = [each["metadata"]["labels"] for each in configs]
    assert labels == [{"grafana_dashboard": "1"}] * 3
    text = files["langchain-quota-prometheusrule.yaml"]
    [groups] = map(yaml.safe_load, export.rules(**OF_ALERTS).values())
    assert yaml.safe_load(text)["spec"] == groups
    assert 'job="x"' in text
