"""The pages of the site that are made of the code when it is built; `python -m tools.reference`."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import yaml

from langchain_quota.cli import export
from langchain_quota.cli.arguments import parser
from langchain_quota.telemetry import tracing
from langchain_quota.telemetry.names import LABELS, METRICS, MetricSpec

ROOT = Path(__file__).parents[1]
RUNBOOKS, SOURCE = ROOT / "docs" / "runbooks", ROOT / "src"
UNITS = ("calls.", "tokens.", "US dollars.", "seconds.")

_METRICS = """\
# Metrics

Look up a metric, its labels and their values. [Serve them](../observability.md#serve-metrics),
[query them](../observability.md#query-the-metrics), and count
[how many series](../production.md#series) there are.

"""

_LABELS = """
## Labels

Several meanings stand in the order of the values. If nothing stands under *on*, the label means the
same on every metric. Names have [bounds](../observability.md#bounds).

"""

_API = """\
# Telemetry and exposition

Look up the settings of metrics and spans, and what spans contain.
[Observability](../observability.md) shows how to use these.

"""

_NAMES = (
    ("Telemetry", False),
    ("hmac_label", True),
    ("log_decisions", True),
    ("start_metrics_server", True),
    ("ops.exposition.MetricsServer", True),
    ("metrics_app", True),
    ("export_metrics", True),
    ("ops.otlp.MetricsExport", True),
    ("quota_app", True),
)
"""What that page documents, and whether with members."""

_SPANS = """
## Spans

One `INTERNAL` span describes how one middleware checked one call: `check_quota tool <tool>` or
`check_quota model`. It is a child of the active span, and ends before the call runs. The names
`gen_ai.*` are those of version 1.41.1 of OpenTelemetry's semantic conventions. Blocked calls say
more: see [how to find one](../observability.md#find-a-refusal-in-a-trace).

"""

_AFTER_SPANS = """
A span includes the wait for room in a quota, and its event `langchain_quota.waited` carries the
`seconds`. Two kinds of calls have two spans: those under a `ConcurrencyLimit`, and allowed ones
that start later than others of their message. The first span says `waiting`, or of the latter
`allowed`. The second one includes the wait, and says how it ended: `allowed`, `blocked` or
`cancelled`. The tokens and dollars of a model call are in the next call's span. A sampler sees all
attributes.

## Events in a run's stream

With `stream_events=True`, `stream_mode="custom"` receives [these
events](../observability.md#tell-the-user-while-the-run-goes-on).

::: langchain_quota.telemetry.stream.QuotaEvent
    options:
      heading_level: 3
"""

_LOGS = """\
# Log lines

Look up a line of the logger `langchain_quota`. `…` stands for names and numbers. The
[fields](../observability.md#read-the-log) of a record have them, too.

Lines about a count begin with `limit …`: `near` (INFO), `exhausted` (WARNING), and for calls
`refused` and `would refuse` (DEBUG). A failure is logged once for each kind, and once in an outage.
`LostLeaseError`: a running call lost its slot of a `ConcurrencyLimit`, because its worker stood
still, or the store did not answer, for a minute.

"""

_COMMANDS = """\
# The command line

Look up the commands of `langchain-quota`, and their options. `--help` says the same.
[Operate](../operate.md#from-the-command-line) shows what they print.

The exit code is 0 if the command succeeds, and 2 if an argument is wrong or the command fails; a
line on stderr gives the reason. It is 1 if you answer no, if the reader of the output closes the
pipe, or if a key [holds no count](../operate.md#see-who-has-used-what), and 130 after Ctrl-C.

To let your shell complete the options, run `pip install "langchain-quota[completion]"`, and put
`eval "$(register-python-argcomplete langchain-quota)"` into its startup file.
"""

_RUNBOOKS = """\
# What to do when an alert fires

Find the page of your alert, to which its `runbook_url` leads, too. The panels that a page names are
in the dashboards *LangChain quota: overview*, *thread*, and *tokens and money*.
[Get alerts](../alerts.md) shows how to load the rules.

"""


def pages() -> dict[str, str]:
    """Return the Markdown of each page that is not kept, by its path in the documentation."""
    return {
        "reference/metrics.md": metrics(),
        "reference/telemetry.md": telemetry(),
        "reference/logs.md": logs(),
        "reference/command-line.md": command_line(),
        "runbooks/README.md": runbooks(),
    }


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    cells = [[*headings], *([*row] for row in rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def quoted(names: Iterable[str]) -> str:
    """Return names in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def metrics() -> str:
    """Return the page of all metrics and labels."""
    rows = []
    for (kind, labels, text), specs in groupby(METRICS, _row_of):
        group = list(specs)
        units = [spec.help.rpartition(", in ")[2].rstrip(".") for spec in group]
        meaning = group[0].help
        if len(group) > 1:
            meaning = f"{text}, in {', '.join(units[:-1])} or {units[-1]}."
        rows.append((quoted(spec.name for spec in group), quoted(labels), kind, meaning))
    explained = []
    for key, text in LABELS.items():
        name, _, of = key.partition(" of ")
        values, _, meaning = text.partition("| ")
        on = quoted(f"langchain_quota_{metric}" for metric in of.split())
        explained.append(
            (f"`{name}`", quoted(filter(None, values.strip().split(", "))), meaning, on)
        )
    all_metrics = table(("name", "labels", "type", "meaning"), rows)
    return (
        f"{_METRICS}{all_metrics}{_LABELS}{table(('label', 'values', 'meaning', 'on'), explained)}"
    )


def _row_of(spec: MetricSpec) -> tuple[str, tuple[str, ...], str]:
    """Return what metrics in one row share: they differ only in their units."""
    text, _, unit = spec.help.rpartition(", in ")
    return spec.kind, spec.labels, text if unit in UNITS else spec.help


def telemetry() -> str:
    """Return the page of the settings, with the attributes of spans."""
    names = [
        f"::: langchain_quota.{name}\n"
        + ("" if members else "    options:\n      members: false\n")
        for name, members in _NAMES
    ]
    rows = ((f"`{name}`", quoted(values), text) for name, values, text in attributes())
    spans = table(("attribute", "values", "meaning"), rows)
    return "".join((_API, "\n".join(names), _SPANS, spans, _AFTER_SPANS))


def attributes() -> Iterator[tuple[str, list[str], str]]:
    """Return the attributes of spans, with the values and the meaning in their docstrings."""
    for node, after in pairwise(ast.parse(inspect.getsource(tracing)).body):
        match node, after:
            case (
                ast.Assign([ast.Name(name)], ast.Constant(str(attribute))),
                ast.Expr(ast.Constant(str(text))),
            ) if "." in attribute and name not in {"_SCHEMA", "WAITED"}:
                meaning, _, values = " ".join(text.split()).partition(" One of ")
                yield (
                    attribute.replace("{scope}", "<scope>"),
                    re.findall("`(.+?)`", values),
                    meaning,
                )


def logs() -> str:
    """Return the page of the lines that are written to the log."""
    rows = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    ast.Attribute(
                        ast.Name("logger"), "debug" | "info" | "warning" | "error" as level
                    ),
                    [ast.Constant(str(message)), *_],
                ):
                    rows.append((level.upper(), f"`{re.sub('(%[rsd])+', '…', message)}`"))
    return _LOGS + table(("level", "message"), sorted(rows))


def command_line() -> str:
    """Return the page of all commands."""
    return _COMMANDS + "".join(map(_section, commands(parser())))


def commands(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Return the parsers of the commands that do something."""
    groups = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001 - it has no public reader
    for group in groups:
        for command in group.choices.values():
            yield from commands(command)
    if not groups:
        yield of


def _section(command: argparse.ArgumentParser) -> str:
    """Return the part of the page about a command."""
    formatter: Any = command._get_formatter()  # noqa: SLF001 - the texts of `--help`
    actions = [action for action in command._actions if action.dest != "help"]  # noqa: SLF001 - the same
    rows = [
        (
            f"`{formatter._format_action_invocation(action)}`",  # noqa: SLF001 - the same
            formatter._expand_help(action) + (" (needed)" if action.required else ""),  # noqa: SLF001 - the same
        )
        for action in sorted(actions, key=lambda action: bool(action.option_strings))
    ]
    text, example = str(command.description), str(command.epilog).partition("\n")[2].strip()
    heading = command.prog.partition(" ")[2]
    return (
        f"\n## {heading}\n\n{text[0].upper()}{text[1:]}.\n\n```shell\n{example}\n```\n\n"
        f"{table(('option', 'meaning'), rows)}"
    )


def runbooks() -> str:
    """Return the page that lists all alerts, with what the first sentence of each runbook says."""
    rows = []
    by_default = {rule["alert"] for rule in alerts()}
    for rule in alerts(per_thread=True, spend=True):
        name = rule["alert"]
        severities = re.findall("critical|warning|info", rule["labels"]["severity"])
        severity = " or ".join(sorted(severities))
        if name not in by_default:
            severity += ", off by default"
        rows.append((f"[{name}]({name}.md)", severity, first_sentence(name)))
    return f"{_RUNBOOKS}{table(('alert', 'severity', 'when'), rows)}"


def alerts(**options: Any) -> list[dict[str, Any]]:
    """Return the alert rules that are exported with these options."""
    [text] = export.rules(**options).values()
    groups = yaml.safe_load(text)["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def first_sentence(alert: str) -> str:
    """Return what an alert's runbook says first: what the alert means."""
    text = (RUNBOOKS / f"{alert}.md").read_text().partition("## Meaning\n\n")[2]
    return " ".join(text.split()).partition(". ")[0]


if __name__ == "__main__":
    for path, text in pages().items():
        print(f"<!-- {path} -->\n{text}")
