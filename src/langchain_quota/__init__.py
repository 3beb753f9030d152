"""Limits for LangChain agents that can be seen: async-first middleware with full telemetry."""

from langchain_quota._version import __version__
from langchain_quota.budgets import CostLimit, TokenLimit
from langchain_quota.decision import Answer, Call, Decision, LimitStatus, Outcome, QuotaStatus
from langchain_quota.deep_agents import with_limits
from langchain_quota.errors import (
    EventLoopBlockedError,
    ModelCallLimitExceededError,
    QuotaStoreError,
    QuotaWarning,
    ToolCallLimitExceededError,
    UnknownPriceError,
)
from langchain_quota.estimates import usage_bound
from langchain_quota.exposition import MetricsServer, metrics_app, start_metrics_server
from langchain_quota.graph import GraphQuota
from langchain_quota.levels import Level
from langchain_quota.limits import ExitBehavior, Limit, ModelCallLimit, ToolCallLimit
from langchain_quota.middleware.drop_ins import ModelCallLimitMiddleware, ToolCallLimitMiddleware
from langchain_quota.middleware.inline import InlineQuotaMiddleware
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.model_usage import ModelUsage
from langchain_quota.prices import Price
from langchain_quota.quotas import Quota
from langchain_quota.repeats import RepeatLimit
from langchain_quota.state import (
    ModelCallLimitState,
    QuotaState,
    ThreadUsage,
    ToolCallLimitState,
    usage,
)
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.stores.grants import Grant
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import Telemetry, hmac_label

try:
    from langchain_quota.stores.redis import RedisStore
except ModuleNotFoundError as _missing:
    _REASON = str(_missing)

    class RedisStore:  # type: ignore[no-redef]  # takes its place
        """A `QuotaStore` in Redis; it needs the package redis, which is not installed.

        Raises:
            ModuleNotFoundError: Always; the message says what to install.
        """

        def __init__(self, *_: object, **__: object) -> None:
            raise ModuleNotFoundError(_REASON, name="redis")


__all__ = [
    "Answer",
    "Call",
    "CostLimit",
    "Decision",
    "EventLoopBlockedError",
    "ExitBehavior",
    "Grant",
    "GraphQuota",
    "InlineQuotaMiddleware",
    "Level",
    "Limit",
    "LimitStatus",
    "MemoryStore",
    "MetricsServer",
    "ModelCallLimit",
    "ModelCallLimitExceededError",
    "ModelCallLimitMiddleware",
    "ModelCallLimitState",
    "ModelUsage",
    "Outcome",
    "Price",
    "Quota",
    "QuotaMiddleware",
    "QuotaState",
    "QuotaStatus",
    "QuotaStore",
    "QuotaStoreError",
    "QuotaUsage",
    "QuotaWarning",
    "RedisStore",
    "RepeatLimit",
    "Telemetry",
    "ThreadUsage",
    "TokenLimit",
    "ToolCallLimit",
    "ToolCallLimitExceededError",
    "ToolCallLimitMiddleware",
    "ToolCallLimitState",
    "UnknownPriceError",
    "__version__",
    "hmac_label",
    "metrics_app",
    "start_metrics_server",
    "usage",
    "usage_bound",
    "with_limits",
]
