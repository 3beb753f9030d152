"""The export command: what it writes, what it says, and what it refuses."""

from pathlib import Path

import pytest

from langchain_quota.cli import main
from langchain_quota.monitoring import exports

RULES = exports.RULES_FILES["rules"]


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["grafana"], exports.dashboards()),
        (
            [
                *("grafana", "--datasource", "prom-1"),
                *("--selector", 'job="x"'),
                *("--runbooks", "https://example.org/runbooks"),
            ],
            exports.dashboards(
                datasource="prom-1", selector='job="x"', runbooks="https://example.org/runbooks"
            ),
        ),
        (["prometheus", "--grafana-url", exports.GRAFANA_URL], exports.rules()),
        (
            [
                "prometheus",
                *("--selector", 'job="x"'),
                *("--grafana-url", "https://example.org/grafana"),
                *("--runbooks", "https://example.org/runbooks"),
                "--per-thread-alerts",
            ],
            exports.rules(
                selector='job="x"',
                grafana_url="https://example.org/grafana",
                runbooks="https://example.org/runbooks",
                per_thread=True,
            ),
        ),
        (
            [
                "prometheus",
                *("--format", "prometheusrule"),
                *("--grafana-url", "https://example.org"),
            ],
            exports.rules(format="prometheusrule", grafana_url="https://example.org"),
        ),
        (["alertmanager"], exports.alertmanager()),
    ],
    ids=["grafana", "grafana-all", "prometheus", "prometheus-all", "operator", "alertmanager"],
)
def test_writes_what_was_asked_for(
    arguments: list[str],
    expected: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every file is written, with all options, into a new directory; each is a line of output."""
    directory = tmp_path / "new" / "directory"
    assert main(["export", *arguments, "--to", str(directory)]) == 0
    assert expected
    assert contents(directory) == expected
    printed = capsys.readouterr()
    assert printed.err == ""
    note = f" (needs Prometheus {exports.PROMETHEUS} or newer)"
    end = note if arguments[0] == "prometheus" else ""
    assert printed.out.splitlines() == [f"{directory / name}{end}" for name in expected]


def test_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If one of the files exists none is written, and one line says which and what to do."""
    taken = max(exports.dashboards())
    (tmp_path / taken).write_text("mine")
    assert main(["export", "grafana", "--to", str(tmp_path)]) == 2
    assert contents(tmp_path) == {taken: "mine"}
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("langchain-quota export: ")
    assert taken in line
    assert "--force" in line


def test_force_overwrites(tmp_path: Path) -> None:
    """With --force files that exist are overwritten, and others are left alone."""
    (tmp_path / RULES).write_text("old")
    (tmp_path / "other.yaml").write_text("mine")
    assert main(["export", "prometheus", "--to", str(tmp_path), "--force"]) == 0
    assert contents(tmp_path) == {**exports.rules(), "other.yaml": "mine"}


def test_a_directory_is_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no file is not overwritten, and nothing else is either."""
    names = sorted(exports.dashboards())
    (tmp_path / names[-1]).mkdir()
    (tmp_path / names[0]).write_text("mine")
    assert main(["export", "grafana", "--to", str(tmp_path), "--force"]) == 2
    assert (tmp_path / names[0]).read_text() == "mine"
    [line] = capsys.readouterr().err.splitlines()
    assert repr(str(tmp_path / names[-1])) in line


def test_a_link_that_leads_nowhere_is_in_the_way(tmp_path: Path) -> None:
    """A broken symbolic link is not written through."""
    (tmp_path / RULES).symlink_to(tmp_path / "elsewhere")
    assert main(["export", "prometheus", "--to", str(tmp_path)]) == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("below", ["", "sub"], ids=["itself", "below"])
def test_the_directory_is_a_file(
    below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory that cannot be made gives one line that names it."""
    file = tmp_path / "file"
    file.write_text("mine")
    assert main(["export", "alertmanager", "--to", str(file / below)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"langchain-quota export: cannot use --to {str(file / below)!r}: ")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "what"),
        (["tempo", "--to", "x"], "tempo"),
        (["prometheus"], "--to"),
        (["prometheus", "--to", ""], "--to"),
        (["prometheus", "--to", "x", "--selector", "job=agents"], "--selector"),
        (["prometheus", "--to", "x", "--selector", ""], "--selector"),
        (["grafana", "--to", "x", "--selector", 'agent="a"'], "--selector"),
        (["grafana", "--to", "x", "--datasource", "a b"], "--datasource"),
        (["prometheus", "--to", "x", "--grafana-url", "example.org"], "--grafana-url"),
        (["prometheus", "--to", "x", "--runbooks", "{{ x }}"], "--runbooks"),
        (["grafana", "--to", "x", "--runbooks", "example.org"], "--runbooks"),
        (["prometheus", "--to", "x", "--format", "json"], "--format"),
        (["prometheus", "--to", "x", "--datasource", "a"], "--datasource"),
        (["grafana", "--to", "x", "--per-thread-alerts"], "--per-thread-alerts"),
        (["grafana", "--to", "x", "--format", "rules"], "--format"),
        (["alertmanager", "--to", "x", "--selector", 'job="x"'], "--selector"),
        (["alertmanager", "--to", "x", "--grafana-url", "https://example.org"], "--grafana-url"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong option, or one that does not apply, is refused with code 2 and named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", *arguments])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
