"""Visible limits for LangChain agents: async-first middleware with full telemetry."""

from typing import TYPE_CHECKING

# The one place of the version; the build reads it from here.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from langchain_quota.decision import Answer, Call, Decision, LimitStatus, Outcome, QuotaStatus
    from langchain_quota.errors import (
        EventLoopBlockedError,
        ModelCallLimitExceededError,
        QuotaStoreError,
        QuotaWarning,
        ToolCallLimitExceededError,
        UnknownPriceError,
    )
    from langchain_quota.features.budgets.estimates import usage_bound
    from langchain_quota.features.deep_agents.with_limits import with_limits
    from langchain_quota.features.graph.graph import GraphQuota
    from langchain_quota.features.graph.inline import InlineQuotaMiddleware
    from langchain_quota.limits import Limit
    from langchain_quota.limits.budgets import CostLimit, Price, TokenLimit
    from langchain_quota.limits.calls import ExitBehavior, ModelCallLimit, ToolCallLimit
    from langchain_quota.limits.model_usage import ModelUsage
    from langchain_quota.limits.quotas import Quota
    from langchain_quota.limits.repeats import RepeatLimit
    from langchain_quota.middleware.drop_ins import (
        ModelCallLimitMiddleware,
        ToolCallLimitMiddleware,
    )
    from langchain_quota.middleware.quota import QuotaMiddleware
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
    from langchain_quota.stores.redis import RedisStore
    from langchain_quota.telemetry import Telemetry, hmac_label
    from langchain_quota.telemetry.exposition import (
        MetricsServer,
        metrics_app,
        start_metrics_server,
    )
    from langchain_quota.units import Level
else:
    from importlib import import_module

    # Importing LangChain takes a second, and the command line does not need it. So a name is
    # imported when it is first used. The imports above are for type checkers and editors.
    _HOMES = {
        "limits.budgets": ("CostLimit", "Price", "TokenLimit"),
        "decision": ("Answer", "Call", "Decision", "LimitStatus", "Outcome", "QuotaStatus"),
        "features.deep_agents.with_limits": ("with_limits",),
        "errors": (
            "EventLoopBlockedError",
            "ModelCallLimitExceededError",
            "QuotaStoreError",
            "QuotaWarning",
            "ToolCallLimitExceededError",
            "UnknownPriceError",
        ),
        "features.budgets.estimates": ("usage_bound",),
        "telemetry.exposition": ("MetricsServer", "metrics_app", "start_metrics_server"),
        "features.graph.graph": ("GraphQuota",),
        "limits": ("Limit",),
        "limits.calls": ("ExitBehavior", "ModelCallLimit", "ToolCallLimit"),
        "middleware.drop_ins": ("ModelCallLimitMiddleware", "ToolCallLimitMiddleware"),
        "features.graph.inline": ("InlineQuotaMiddleware",),
        "middleware.quota": ("QuotaMiddleware",),
        "limits.model_usage": ("ModelUsage",),
        "limits.quotas": ("Quota",),
        "limits.repeats": ("RepeatLimit",),
        "state": (
            "ModelCallLimitState",
            "QuotaState",
            "ThreadUsage",
            "ToolCallLimitState",
            "usage",
        ),
        "stores": ("QuotaStore", "QuotaUsage"),
        "stores.grants": ("Grant",),
        "stores.memory": ("MemoryStore",),
        "stores.optional_redis": ("RedisStore",),
        "telemetry": ("Telemetry", "hmac_label"),
        "units": ("Level",),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> object:
        """A public name, at its first use.

        Raises:
            AttributeError: The package has no such name.
        """
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value

    def __dir__() -> list[str]:
        """All names of the module, also the public ones that are not imported yet."""
        return sorted({*globals(), *__all__})


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
