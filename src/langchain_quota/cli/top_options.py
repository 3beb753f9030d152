"""The arguments of `top`."""

import argparse
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from langchain_quota.monitoring import checks

TOKEN_VARIABLE = "LANGCHAIN_QUOTA_METRICS_TOKEN"  # noqa: S105 - its name, not a token
DEFAULT = "http://127.0.0.1:9464/metrics"
"""Where `start_metrics_server` serves by default."""
INTERVAL = 2.0
ORDERS = {
    "threads": ("share", "refused", "name"),
    "quotas": ("share", "name"),
    "limits": ("refused", "share", "name"),
}
"""The views, and the orders that each has."""


def token_of_environment() -> str:
    """The token that the environment variable has; empty for none."""
    return os.environ.get(TOKEN_VARIABLE, "")


def environment_of_console() -> dict[str, str]:
    """The environment without COLUMNS and LINES: they do not change with the terminal's size."""
    return {key: each for key, each in os.environ.items() if key not in ("COLUMNS", "LINES")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    text = f"the /metrics of each process, such as host:9464 (default: {DEFAULT})"
    add("addresses", nargs="*", type=_address, metavar="ADDRESS", help=text)
    text = f"the token to send (default: the one in {TOKEN_VARIABLE})"
    add("--token-file", type=Path, metavar="FILE", help=text)
    add("--once", action="store_true", help="print everything once, as plain text")
    text = (
        f"seconds between two updates (default: {INTERVAL:g}); without a terminal: print again "
        "after this time"
    )
    add("--interval", type=_seconds, metavar="SECONDS", help=text)
    add("--view", choices=ORDERS, help="the first view; in plain text, the only one")
    orders = dict.fromkeys(order for each in ORDERS.values() for order in each)
    add("--sort", choices=orders, help="the order of the rows")
    add("--filter", default="", metavar="TEXT", help="only rows with this text in a name")


def _address(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    fault = checks.url_fault(url)
    if fault is not None:
        raise argparse.ArgumentTypeError(fault.replace(repr(url), repr(text)))
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/metrics"


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.1 <= float(text) <= 3600:  # noqa: PLR2004 - said in the message
            return float(text)
    raise argparse.ArgumentTypeError(f"must be from 0.1 to 3600 seconds, not {text!r}")
