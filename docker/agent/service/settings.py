"""The settings, from the environment only."""

import os
import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from langchain_quota import RedisStore

SCRIPTED = "scripted"
"""The model that needs no network and no key."""

SQLITE = "sqlite:///"
POSTGRESQL = ("postgresql://", "postgres://")

_MODEL = re.compile(r"[a-z0-9_]+:\S+")
_TOKEN = re.compile(r"[!-~]{8,}")


class SettingsError(Exception):
    """What is wrong with the environment, a line for each setting."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the service; docker/README.md has the names of the variables.

    Attributes:
        metrics_token: What a scraper of `/metrics` must show.
        model: `"scripted"`, or `provider:name`.
        database_url: Keeps the threads: `sqlite:///file`, or a PostgreSQL URL.
        redis_url: Keeps the shared counts; empty for the memory of the process.
        dashboards_url: Where Grafana is, for a link on the page of quotas; empty for no link.
        host, port: Where the service listens; port 0 takes a free one.
        workers: Processes that share the port.
        run_model_limit: Most model calls in a run.
        thread_model_limit: Most model calls over the life of a thread.
        thread_search_limit: Most searches over the life of a thread.
        searches_at_once: Most searches at the same time; others wait.
        thread_token_limit: Most tokens over the life of a thread.
        user_model_limit: Most model calls of a user in an hour.
        user_cost_limit: Most US dollars that the model calls of a user cost in an hour.
        tool_seconds: How long a tool takes.
        shutdown_seconds: How long requests may go on after SIGTERM.
    """

    metrics_token: str = field(repr=False)
    model: str
    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    dashboards_url: str
    host: str
    port: int
    workers: int
    run_model_limit: int
    thread_model_limit: int
    thread_search_limit: int
    searches_at_once: int
    thread_token_limit: int
    user_model_limit: int
    user_cost_limit: Decimal
    tool_seconds: float
    shutdown_seconds: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Read and check the environment; an empty variable counts as not set.

        Raises:
            SettingsError: Something is missing or wrong.
        """
        errors: list[str] = []

        def read(name: str, default: str, parse: Callable[[str], Any]) -> Any:
            try:
                return parse(environment.get(name) or default)
            except ValueError as error:
                errors.append(f"{name} {error}")

        settings = cls(
            metrics_token=read("METRICS_TOKEN", "", _token),
            model=read("MODEL", SCRIPTED, _model),
            database_url=read("DATABASE_URL", f"{SQLITE}threads.sqlite", _database_url),
            redis_url=read("LANGCHAIN_QUOTA_REDIS_URL", "", _redis_url),
            dashboards_url=read("DASHBOARDS_URL", "", _dashboards_url),
            host=environment.get("HOST") or "127.0.0.1",
            port=read("PORT", "8000", _whole(0, 65_535)),
            workers=read("WORKERS", "1", _whole(1, 64)),
            run_model_limit=read("RUN_MODEL_LIMIT", "8", _whole(1)),
            thread_model_limit=read("THREAD_MODEL_LIMIT", "60", _whole(1)),
            thread_search_limit=read("THREAD_SEARCH_LIMIT", "10", _whole(0)),
            searches_at_once=read("SEARCHES_AT_ONCE", "3", _whole(1)),
            thread_token_limit=read("THREAD_TOKEN_LIMIT", "14000", _whole(0, 999_999_999)),
            user_model_limit=read("USER_MODEL_LIMIT", "40", _whole(0)),
            user_cost_limit=read("USER_COST_LIMIT", "0.08", _dollars),
            tool_seconds=read("TOOL_SECONDS", "0.1", _seconds),
            shutdown_seconds=read("SHUTDOWN_SECONDS", "6", _whole(1, 3600)),
        )
        if errors:
            raise SettingsError("\n".join(errors))
        return settings


def _token(text: str) -> str:
    if not text:
        raise ValueError("is not set: Prometheus must show it to read /metrics")
    if not _TOKEN.fullmatch(text):
        raise ValueError("must be 8 or more visible ASCII characters")
    return text


def _model(text: str) -> str:
    if text != SCRIPTED and not _MODEL.fullmatch(text):
        raise ValueError(f"must be {SCRIPTED} or provider:name, not {text!r}")
    return text


def _database_url(text: str) -> str:
    # No message has the URL: it may hold a password.
    if text.startswith(POSTGRESQL):
        try:
            conninfo_to_dict(text)
        except ProgrammingError:
            raise ValueError("is no PostgreSQL URL that libpq understands") from None
        return text
    if not text.startswith(SQLITE) or text == SQLITE:
        raise ValueError("must be sqlite:///file or postgresql://…")
    try:
        with closing(sqlite3.connect(text.removeprefix(SQLITE))) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.Error as error:
        raise ValueError(f"names a file that cannot be used: {error}") from None
    return text


def _redis_url(text: str) -> str:
    if text:
        RedisStore(text)  # it connects at its first use only
    return text


def _dashboards_url(text: str) -> str:
    if text and not re.fullmatch(r"https?://\S+", text):
        raise ValueError(f"must begin with https:// or http://, not {text!r}")
    return text


def _whole(least: int, most: int = 1_000_000) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {text!r}")
        return int(text)

    return parse


def _dollars(text: str) -> Decimal:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise ValueError(f"must be US dollars from 0 to 999999.999999, not {text!r}")
    return Decimal(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", text):
        raise ValueError(f"must be seconds from 0 to 999, not {text!r}")
    return float(text)
