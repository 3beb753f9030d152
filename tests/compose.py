"""The stack as docker/compose.yaml describes it, for tests that check it, or run it otherwise."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
ENV_EXAMPLE = DOCKER / ".env.example"

IMAGE = "langchain-quota-agent"
"""The image that is built here."""

SECRETS = {"METRICS_TOKEN", "POSTGRES_PASSWORD"}

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<rest>[^}]*))?\})")


@dataclass(frozen=True)
class Variable:
    """A variable that the compose file reads.

    Attributes:
        name: Its name.
        default: What stands for it if it is not set; `None` if it has to be set.
    """

    name: str
    default: str | None


@dataclass(frozen=True)
class Mount:
    """A file or directory of the repository, and where a container has it."""

    service: str
    source: Path
    target: PurePosixPath
    options: str


def load(path: Path) -> Any:
    """What a YAML file says; nobody changes it."""
    return _parsed(path.read_text())


@cache
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def services() -> dict[str, dict[str, Any]]:
    """The services, variables not yet replaced."""
    found: dict[str, dict[str, Any]] = load(COMPOSE)["services"]
    return found


def variables(text: str) -> Iterator[Variable]:
    """The variables in a text."""
    for match in _VARIABLE.finditer(text):
        if match["name"]:
            yield Variable(match["name"], match["rest"] if match["kind"] == ":-" else None)


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """A value of the compose file as Compose reads it with these variables."""
    if isinstance(value, Mapping):
        return {key: interpolated(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, environment) for each in value]
    if not isinstance(value, str):
        return value

    def put(match: re.Match[str]) -> str:
        if match["name"] is None:
            return "$"
        if environment.get(match["name"]):
            return environment[match["name"]]
        assert match["kind"] == ":-", f"{match['name']} is not set"
        return str(match["rest"])

    return _VARIABLE.sub(put, value)


def mounts() -> Iterator[Mount]:
    """What is mounted from the repository."""
    for name, service in services().items():
        for volume in service.get("volumes", []):
            source, target, *options = volume.split(":")
            if source.startswith("."):
                path = Path(os.path.normpath(DOCKER / source))
                yield Mount(name, path, PurePosixPath(target), ",".join(options))


def mounted(service: str, target: str) -> Path:
    """The file of the repository that a container has at a path."""
    (found,) = (each for each in mounts() if (each.service, str(each.target)) == (service, target))
    return found.source


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    """A text with parts replaced, each of which must be there."""
    for old, new in replacements.items():
        assert old in text, f"{old!r} is not in {text!r}"
        text = text.replace(old, new)
    return text
