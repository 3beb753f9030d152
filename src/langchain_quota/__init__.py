"""Limits for LangChain agents that can be seen: async-first middleware with full telemetry."""

from langchain_quota._version import __version__
from langchain_quota.decision import Call, Decision, Level, Outcome, Standing
from langchain_quota.errors import (
    ModelCallLimitExceededError,
    QuotaWarning,
    ToolCallLimitExceededError,
)
from langchain_quota.exposition import MetricsServer, metrics_app, start_metrics_server
from langchain_quota.limits import ExitBehavior, ModelCallLimit, ToolCallLimit
from langchain_quota.middleware.model_call_limit import ModelCallLimitMiddleware
from langchain_quota.middleware.quota import QuotaMiddleware
from langchain_quota.middleware.tool_call_limit import ToolCallLimitMiddleware
from langchain_quota.state import (
    ModelCallLimitState,
    QuotaState,
    ThreadUsage,
    ToolCallLimitState,
    usage,
)
from langchain_quota.telemetry import Telemetry, hmac_label

__all__ = [
    "Call",
    "Decision",
    "ExitBehavior",
    "Level",
    "MetricsServer",
    "ModelCallLimit",
    "ModelCallLimitExceededError",
    "ModelCallLimitMiddleware",
    "ModelCallLimitState",
    "Outcome",
    "QuotaMiddleware",
    "QuotaState",
    "QuotaWarning",
    "Standing",
    "Telemetry",
    "ThreadUsage",
    "ToolCallLimit",
    "ToolCallLimitExceededError",
    "ToolCallLimitMiddleware",
    "ToolCallLimitState",
    "__version__",
    "hmac_label",
    "metrics_app",
    "start_metrics_server",
    "usage",
]
