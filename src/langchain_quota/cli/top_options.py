"""The arguments of `top`."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from langchain_quota.monitoring import checks

TOKEN_VARIABLE = "LANGCHAIN_QUOTA_METRICS_TOKEN"  # noqa: S105 - its name, not a token
"""The environment variable with the token that is sent."""

DEFAULT = "http://127.0.0.1:9464/metrics"
"""Where `start_metrics_server` serves by default."""

INTERVAL = 2.0
"""The seconds between two questions to an address, by default."""

ORDERS = {
    "threads": ("share", "refused", "name"),
    "quotas": ("share", "name"),
    "limits": ("refused", "share", "name"),
    "spending": ("spent", "name"),
}
"""The views, and the orders that each has."""

_LEAST_SECONDS, _MOST_SECONDS = 0.1, 3600.0


def token_of_environment() -> str:
    """The token that the environment variable has; empty for none."""
    return os.environ.get(TOKEN_VARIABLE, "")


def environment_of_console() -> dict[str, str]:
    """The environment without COLUMNS and LINES: they do not change with the terminal's size."""
    return {key: each for key, each in os.environ.items() if key not in ("COLUMNS", "LINES")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Shows who is near a limit, who is refused and what is spent, again and again."
    )
    add = parser.add_argument
    add(
        "addresses",
        nargs="*",
        type=_address("/metrics"),
        metavar="ADDRESS",
        help=f"the /metrics of each process, such as host:9464 (default: {DEFAULT})",
    )
    add(
        "--prometheus",
        type=_address(""),
        metavar="URL",
        help="ask this Prometheus instead of the processes",
    )
    add(
        "--selector",
        type=_selector,
        metavar="MATCHERS",
        help="with --prometheus: only series that match, such as 'job=\"agents\"'",
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"the token to send (default: the one in {TOKEN_VARIABLE})",
    )
    add("--cafile", metavar="FILE", help="authorities to trust (default: the system's)")
    add("--certfile", metavar="FILE", help="a certificate, for servers with client_cafile")
    add("--keyfile", metavar="FILE", help="the certificate's key")
    add("--once", action="store_true", help="print everything once, as plain text")
    add(
        "--interval",
        type=_seconds,
        metavar="SECONDS",
        help=f"seconds between two updates (default: {INTERVAL:g}); without a terminal: print "
        "again after this time",
    )
    add("--view", choices=ORDERS, help="the first view; in plain text, the only one")
    orders = dict.fromkeys(order for each in ORDERS.values() for order in each)
    add("--sort", choices=orders, help="the order of the rows")
    add("--filter", default="", metavar="TEXT", help="only rows with this text in a name")


def _address(path: str) -> Callable[[str], str]:
    """Gives a function that reads an address, and adds this path to one without a path."""

    def address(text: str) -> str:
        url = text if "://" in text else f"http://{text}"
        fault = checks.url_fault(url)
        if fault is not None:
            raise argparse.ArgumentTypeError(fault.replace(repr(url), repr(text)))
        url = url.rstrip("/")
        return url if urlsplit(url).path else url + path

    return address


def _selector(text: str) -> str:
    fault = checks.selector_fault(text)
    if fault is not None:
        raise argparse.ArgumentTypeError(fault)
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _LEAST_SECONDS <= value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"must be from {_LEAST_SECONDS} to {_MOST_SECONDS:.0f} seconds, not {text!r}"
        )
    return value
