"""A real Alertmanager, and the exported rules and route for it."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from langchain_quota.cli import export
from tests.server.programs import required_program
from tests.server.prometheus import running_server

_DURATION = re.compile(r"(?<![\w.])(\d+)(ms|s|m|h)\b")
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def hurried(text: str, speed: float) -> str:
    """Rules, or Alertmanager's configuration, for a time that passes so many times faster.

    Durations become shorter, and so do numbers of minutes and hours in expressions. The export has
    no option for it: nobody else wants an hour to last a minute.
    """

    def shorter(found: re.Match[str]) -> str:
        return f"{round(int(found[1]) * _MILLISECONDS[found[2]] / speed)}ms"

    return _DURATION.sub(shorter, text.replace(" * 60", f" * {60 / speed}"))


def with_route(config: Mapping[str, Any]) -> Any:
    """A configuration of Alertmanager with the exported route before its own routes."""
    [text] = export.alertmanager().values()
    ours = yaml.safe_load(text)
    theirs = {"routes": [], **config["route"]}
    routes = ours["route"]["routes"] + theirs["routes"]
    return {**config, "route": {**theirs, "routes": routes}}


@contextmanager
def running_alertmanager(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Run an Alertmanager on a free port; gives its `host:port`."""
    file = directory / "alertmanager.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [
        required_program("prometheus-alertmanager", "prometheus-alertmanager"),
        f"--config.file={file}",
        f"--storage.path={directory / 'alertmanager'}",
        "--web.listen-address=127.0.0.1:0",
        "--web.external-url=http://localhost",
        # Empty: no gossip with others.
        "--cluster.listen-address=",
    ]
    with running_server(command, directory / "alertmanager.log") as address:
        yield address
