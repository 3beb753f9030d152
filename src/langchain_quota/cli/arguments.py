"""The arguments of all commands, read without the packages that the commands need."""

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from getpass import getuser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from langchain_quota import __version__
from langchain_quota.runtime.units import duration

GRAFANA_URL = "http://localhost:3000"
"""The address of links to dashboards in the data, as only the user knows where Grafana is."""

STORE_VARIABLE = "LANGCHAIN_QUOTA_STORE"
SORTS = ("name", "share", "used", "reset")
"""How `quotas show` sorts: by name, by the largest share or use, or by the next end of a window."""

_OWN_LABELS = frozenset(
    {
        *("action", "agent", "alert", "by", "component", "counts", "decision", "error_type"),
        *("event", "kind", "le", "level", "limit", "model", "operation", "outcome", "price"),
        *("scope", "shown", "state", "store", "subject", "thread_id", "tool", "unit", "usage"),
        "version",
    }
)
"""The labels of the package's own metrics. Not every metric has all, so no selector names one."""
_STRING = r'"((?:[^"\\]|\\(?:[abfnrtv\\"]|x[0-9a-fA-F]{2}|[0-7]{3}|u[0-9a-fA-F]{4}))*)"'
_MATCHER = re.compile(rf"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)\s*{_STRING}\s*")
_URL = re.compile(r"https?://[!$%&()*+,./0-9:;=A-Z\[\]_a-z~-]+")


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    text = "Limits for LangChain agents: try, monitor and manage them."
    command_line = ArgumentParser(prog="langchain-quota", **_texts(text, "demo"))
    command_line.add_argument(
        "--version", action="version", version=f"langchain-quota {__version__}"
    )
    commands = command_line.add_subparsers(dest="command", required=True)
    add = _adder(commands.add_parser)
    _add_demo(add("demo", "watch agents reach their limits", "demo --serve"))
    text = "write dashboards, alert rules and an example for Alertmanager"
    _add_export(add("export", text, "export grafana --to dashboards"))
    text = "see what is used of shared quotas, reset it, grant more, freeze customers"
    _add_quotas(add("quotas", text, "quotas show --per tenant"))
    return command_line


def _texts(text: str, example: str) -> dict[str, Any]:
    """Return what the help of a command says; its lines are not wrapped, to be copied."""
    epilog = f"example:\n  langchain-quota {example}"
    return {"description": text, "epilog": epilog, "formatter_class": RawDescriptionHelpFormatter}


def _adder(add_parser: Callable[..., ArgumentParser]) -> Callable[..., ArgumentParser]:
    """Return what adds a command by its name, what it does, and an example."""
    return lambda name, text, example, *parents: add_parser(
        name, help=text, parents=parents, **_texts(text, example)
    )


def _add_demo(demo: ArgumentParser) -> None:
    add, default = demo.add_argument, "(default: %(default)s)"
    text = f"conversations at the same time {default}"
    add("--threads", type=_number(int, 1, 100), default=6, help=text)
    text = f"how long the traffic lasts {default}"
    add("--seconds", type=_number(int, 1, 3600), default=20, help=text)
    text = f"where the page and /metrics are served; 0 takes a free port {default}"
    add("--port", type=_number(int, 0, 65_535), default=9464, help=text)
    add("--serve", action="store_true", help="go on serving them afterwards, until Ctrl-C")


def _add_export(export: ArgumentParser) -> None:
    """Add to each subcommand only the options that apply to it; a missing option has no value."""
    files = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    text = "the directory to write to"
    files.add_argument("--to", type=_directory, required=True, metavar="DIR", help=text)
    text = "overwrite files that exist"
    files.add_argument("--force", action="store_true", default=False, help=text)
    boards = ArgumentParser(add_help=False, argument_default=SUPPRESS, parents=[files])
    text = "matchers for every query, such as 'job=\"agents\"'"
    boards.add_argument("--selector", type=_selector, metavar="MATCHERS", help=text)
    text = "where your runbooks are; the alert's name is appended (default: the project's own)"
    boards.add_argument("--runbooks", type=_url, metavar="URL", help=text)
    alerts = ArgumentParser(add_help=False, argument_default=SUPPRESS, parents=[boards])
    text = f"where Grafana is, for the alerts' links (default: {GRAFANA_URL})"
    alerts.add_argument("--grafana-url", type=_url, metavar="URL", help=text)
    text = "add alerts about single threads that are near their limits"
    alerts.add_argument("--per-thread-alerts", dest="per_thread", action="store_true", help=text)
    text = "add an alert about agents that spend three times more than in the last seven days"
    alerts.add_argument("--spend-alert", dest="spend", action="store_true", help=text)

    add = _adder(export.add_subparsers(dest="what", required=True).add_parser)
    to = "--to monitoring"
    add("grafana", "write the dashboards", f"export grafana {to}", boards)
    add("prometheus", "write the recording and alert rules", f"export prometheus {to}", alerts)
    text = "write scraping, rules and dashboards as a base for kustomize"
    add("kubernetes", text, f"export kubernetes {to}", alerts)
    add("alertmanager", "write an example of a route", f"export alertmanager {to}", files)


def _add_quotas(quotas: ArgumentParser) -> None:
    server = ArgumentParser(add_help=False)
    text = (
        "the server, redis://… or postgresql://…, without a password (default: the URL in "
        f"{STORE_VARIABLE}, or in LANGCHAIN_QUOTA_REDIS_URL)"
    )
    server.add_argument("--store", metavar="URL", help=text)
    server.add_argument("--prefix", help="the store's prefix, if it is not the default")
    one, several = _counts(server, is_one=True), _counts(server, is_one=False)
    lines = ArgumentParser(add_help=False)
    lines.add_argument("--json", action="store_true", help="print one JSON object a line")
    who = ArgumentParser(add_help=False)
    text = "who does it (default: the system's user)"
    who.add_argument("--by", default=_user(), metavar="NAME", help=text)
    why = ArgumentParser(add_help=False, parents=[who])
    why.add_argument("--reason", default="", help="why, for the list and the log")
    text = (
        "for how long, such as 30m, 12h, 1d or 2w (default: a grant lasts to the end of its window "
        "or, without one, a year; a freeze until it is thawed)"
    )
    why.add_argument("--for", dest="for_time", type=_duration, metavar="TIME", help=text)

    action = _adder(quotas.add_subparsers(dest="action", required=True).add_parser)
    acme = "--per tenant --subject acme"
    text, example = "print what is used, of which limit, and until when", "quotas show --near 0.9"
    add = action("show", text, f"{example} --sort share", several, lines).add_argument
    text = "only counts that have used at least this share of their limit (default: %(const)s)"
    share = _number(float, 0.01, 1)
    add("--near", nargs="?", type=share, const=0.8, metavar="SHARE", help=text)
    text = "largest share, largest use, or next end of a window first (default: %(default)s)"
    add("--sort", choices=SORTS, default="name", help=text)
    reset = action("reset", "set counts to 0", f"quotas reset --limit cost {acme}", several)
    reset.add_argument("--yes", action="store_true", help="do not ask")
    text, example = "raise the limits over a count", f"quotas grant 50 --limit cost {acme}"
    add = action("grant", text, example, one, why).add_argument
    add("amount", help="how much more, in the limit's unit: calls, tokens, dollars or seconds")
    add("--id", help="the grant's id: a second grant of the same count and id adds nothing")
    add = action("revoke", "end a grant now", "quotas revoke --id 4711", several).add_argument
    add("--id", required=True, help="the grant's id, as quotas grants prints it")
    text, stopped = "block a subject's calls in all processes", _stopped(server)
    action("freeze", text, f"quotas freeze {acme} --reason abuse", stopped, why)
    action("thaw", "end a freeze", f"quotas thaw {acme}", stopped, who)
    action("grants", "print what is granted, and why", "quotas grants", several, lines)


def _counts(server: ArgumentParser, *, is_one: bool) -> ArgumentParser:
    """Return the options that choose counts by their names; one count needs two of them."""
    counts = ArgumentParser(add_help=False, parents=[server])
    add, default = counts.add_argument, "" if is_one else " (default: all)"
    text = f"the limit: tool:search, model, tokens, cost or time, as quotas show prints it{default}"
    add("--limit", required=is_one, metavar="NAME", help=text)
    text = f"what its quota counts by, such as tenant, root_run or global{default}"
    add("--per", required=is_one, metavar="NAME", help=text)
    text = f"who is counted, such as acme{default}"
    add("--subject", default="" if is_one else None, metavar="ID", help=text)
    add("--key", help="one of several counts that match, as the error names it")
    return counts


def _stopped(server: ArgumentParser) -> ArgumentParser:
    """Return the options that say whose calls are stopped."""
    stopped = ArgumentParser(add_help=False, parents=[server])
    whose = stopped.add_mutually_exclusive_group(required=True)
    whose.add_argument("--per", metavar="NAME", help="what quotas count by, such as tenant")
    text = "in place of --per and --subject: all calls that ask the store"
    whose.add_argument("--all", dest="per", action="store_const", const="", help=text)
    stopped.add_argument("--subject", default="", metavar="ID", help="whose calls, such as acme")
    return stopped


def _user() -> str:
    """Return the system's name of the user; empty if there is none."""
    with suppress(ImportError, KeyError, OSError):
        return getuser()
    return ""


def _number(kind: type[int | float], minimum: float, maximum: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        with suppress(ValueError):
            if minimum <= kind(text) <= maximum:
                return kind(text)
        kind_name = "a whole number" if kind is int else "a number"
        raise ArgumentTypeError(f"must be {kind_name} from {minimum} to {maximum}, not {text!r}")

    return number


def _directory(text: str) -> Path:
    # The path of an empty text, such as a variable that is not set, is the working directory.
    if not text:
        raise ArgumentTypeError("must be a directory, not ''")
    return Path(text)


def _duration(text: str) -> timedelta:
    time = duration(text)
    if time is None:
        raise ArgumentTypeError(f"must be a time such as 30m, 12h, 1d or 2w, not {text!r}")
    return time


def _selector(text: str) -> str:
    """Check a selector: matchers, as PromQL has them between braces."""
    end = -1
    while end < len(text):
        matcher = _MATCHER.match(text, end + 1)
        if matcher is None or not text.isprintable() or text[matcher.end() :][:1] not in ("", ","):
            raise ArgumentTypeError(
                f'must be matchers such as job="agents",namespace="prod", not {text!r}'
            )
        if matcher[1] in _OWN_LABELS or matcher[1].startswith("__"):
            raise ArgumentTypeError(
                f"must name labels that the scrape adds, such as job, not {matcher[1]!r}"
            )
        end = matcher.end()
    return text


def _url(text: str) -> str:
    """Check an address with which links begin."""
    with suppress(ValueError):  # a port that is no number, a broken IPv6 address
        parts = urlsplit(text)
        if _URL.fullmatch(text) and parts.hostname and parts.port != 0:
            return text
    raise ArgumentTypeError(
        f"must be an http or https address without query, fragment or user, not {text!r}"
    )
