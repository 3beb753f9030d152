"""Visible limits for LangChain agents: async-first middleware with full telemetry."""

from typing import TYPE_CHECKING

# The one place of the version; the build reads it from here.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from langchain_quota.decision import Answer as Answer
    from langchain_quota.decision import Call as Call
    from langchain_quota.decision import Decision as Decision
    from langchain_quota.decision import LimitStatus as LimitStatus
    from langchain_quota.decision import Outcome as Outcome
    from langchain_quota.decision import QuotaStatus as QuotaStatus
    from langchain_quota.errors import EventLoopBlockedError as EventLoopBlockedError
    from langchain_quota.errors import ModelCallLimitExceededError as ModelCallLimitExceededError
    from langchain_quota.errors import QuotaStoreError as QuotaStoreError
    from langchain_quota.errors import QuotaWarning as QuotaWarning
    from langchain_quota.errors import ToolCallLimitExceededError as ToolCallLimitExceededError
    from langchain_quota.errors import UnknownPriceError as UnknownPriceError
    from langchain_quota.features.budgets.estimates import max_usage as max_usage
    from langchain_quota.features.deep_agents.with_limits import with_limits as with_limits
    from langchain_quota.features.graph.graph import GraphQuota as GraphQuota
    from langchain_quota.features.graph.inline import InlineQuotaMiddleware as InlineQuotaMiddleware
    from langchain_quota.limits import Limit as Limit
    from langchain_quota.limits.budgets import CostLimit as CostLimit
    from langchain_quota.limits.budgets import Price as Price
    from langchain_quota.limits.budgets import TokenLimit as TokenLimit
    from langchain_quota.limits.calls import ExitBehavior as ExitBehavior
    from langchain_quota.limits.calls import ModelCallLimit as ModelCallLimit
    from langchain_quota.limits.calls import ToolCallLimit as ToolCallLimit
    from langchain_quota.limits.model_usage import ModelUsage as ModelUsage
    from langchain_quota.limits.quotas import Quota as Quota
    from langchain_quota.limits.repeats import RepeatLimit as RepeatLimit
    from langchain_quota.middleware.drop_ins import (
        ModelCallLimitMiddleware as ModelCallLimitMiddleware,
    )
    from langchain_quota.middleware.drop_ins import (
        ToolCallLimitMiddleware as ToolCallLimitMiddleware,
    )
    from langchain_quota.middleware.quota import QuotaMiddleware as QuotaMiddleware
    from langchain_quota.state import ModelCallLimitState as ModelCallLimitState
    from langchain_quota.state import QuotaState as QuotaState
    from langchain_quota.state import ThreadUsage as ThreadUsage
    from langchain_quota.state import ToolCallLimitState as ToolCallLimitState
    from langchain_quota.state import usage as usage
    from langchain_quota.stores import QuotaStore as QuotaStore
    from langchain_quota.stores import QuotaUsage as QuotaUsage
    from langchain_quota.stores.grants import Grant as Grant
    from langchain_quota.stores.memory import MemoryStore as MemoryStore
    from langchain_quota.stores.redis import RedisStore as RedisStore
    from langchain_quota.telemetry import Telemetry as Telemetry
    from langchain_quota.telemetry import hmac_label as hmac_label
    from langchain_quota.telemetry.exposition import MetricsServer as MetricsServer
    from langchain_quota.telemetry.exposition import metrics_app as metrics_app
    from langchain_quota.telemetry.exposition import start_metrics_server as start_metrics_server
    from langchain_quota.units import Level as Level
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
        "features.budgets.estimates": ("max_usage",),
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
    __all__ = ["__version__"]
    __all__ += list(_HOME)

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
        """All names, also the public ones that are not imported yet."""
        return sorted({*globals(), *__all__})
