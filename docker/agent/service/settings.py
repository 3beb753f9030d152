"""The settings, from the environment only."""

from decimal import Decimal
from typing import Annotated

from langchain.chat_models import init_chat_model
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, RedisDsn
from pydantic_settings import BaseSettings, SettingsConfigDict

SCRIPTED = "scripted"
"""The model that needs no network and no key."""


def _validate_model(name: str) -> str:
    if name != SCRIPTED:
        try:
            init_chat_model(name)
        except Exception as error:  # a missing package or key: each provider raises its own
            raise ValueError(f"{name!r} cannot be used: {error}") from error
    return name


class Settings(BaseSettings):
    """The settings; docker/README.md explains the variables, which have the names of the fields."""

    model_config = SettingsConfigDict(env_ignore_empty=True, frozen=True)

    metrics_token: str = Field(pattern=r"^[!-~]{8,}$", repr=False)
    model: Annotated[str, AfterValidator(_validate_model)] = SCRIPTED
    database_url: str = Field(
        default="sqlite:///threads.sqlite",
        pattern=r"^(sqlite:///.|postgres(ql)?://)",
        repr=False,
    )
    langchain_quota_redis_url: RedisDsn | None = Field(default=None, repr=False)
    dashboards_url: str | None = Field(default=None, pattern=r"^https?://")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    workers: PositiveInt = 1
    shutdown_seconds: PositiveInt = 6

    run_model_limit: PositiveInt = 8
    thread_model_limit: PositiveInt = 60
    thread_token_limit: NonNegativeInt = 14_000
    thread_search_limit: NonNegativeInt = 10
    searches_at_once: PositiveInt = 3
    user_model_limit: NonNegativeInt = 40
    user_cost_limit: Decimal = Field(default=Decimal("0.08"), ge=0, allow_inf_nan=False)
    tool_seconds: float = Field(default=0.1, ge=0, allow_inf_nan=False)
