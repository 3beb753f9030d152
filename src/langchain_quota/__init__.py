"""Visible limits for LangChain agents: async-first middleware with full telemetry."""

from typing import TYPE_CHECKING

# The build reads the version from here.
__version__ = "0.1.0"

if TYPE_CHECKING:
    # These are all public names of the package. Other public names are in their modules.
    from langchain_quota.agents.drop_ins import ModelCallLimitMiddleware as ModelCallLimitMiddleware
    from langchain_quota.agents.drop_ins import ToolCallLimitMiddleware as ToolCallLimitMiddleware
    from langchain_quota.agents.graph import GraphQuota as GraphQuota
    from langchain_quota.agents.inline import InlineQuotaMiddleware as InlineQuotaMiddleware
    from langchain_quota.agents.model_pace import ModelPaceMiddleware as ModelPaceMiddleware
    from langchain_quota.agents.quota import QuotaMiddleware as QuotaMiddleware
    from langchain_quota.agents.subject_methods import Balance as Balance
    from langchain_quota.agents.with_limits import with_limits as with_limits
    from langchain_quota.core.decision import Decision as Decision
    from langchain_quota.core.stops import StopReason as StopReason
    from langchain_quota.core.stops import stop_reason as stop_reason
    from langchain_quota.errors import ModelCallLimitExceededError as ModelCallLimitExceededError
    from langchain_quota.errors import QuotaStoreError as QuotaStoreError
    from langchain_quota.errors import QuotaWarning as QuotaWarning
    from langchain_quota.errors import ToolCallLimitExceededError as ToolCallLimitExceededError
    from langchain_quota.features.budgets.usage import max_usage as max_usage
    from langchain_quota.limits.budgets import CostLimit as CostLimit
    from langchain_quota.limits.budgets import Price as Price
    from langchain_quota.limits.budgets import TimeLimit as TimeLimit
    from langchain_quota.limits.budgets import TokenLimit as TokenLimit
    from langchain_quota.limits.call import ModelUsage as ModelUsage
    from langchain_quota.limits.calls import ConcurrencyLimit as ConcurrencyLimit
    from langchain_quota.limits.calls import ModelCallLimit as ModelCallLimit
    from langchain_quota.limits.calls import RepeatLimit as RepeatLimit
    from langchain_quota.limits.calls import ToolCallLimit as ToolCallLimit
    from langchain_quota.limits.quotas import Quota as Quota
    from langchain_quota.middleware.thread_usage import usage as usage
    from langchain_quota.ops.exposition import metrics_app as metrics_app
    from langchain_quota.ops.exposition import start_metrics_server as start_metrics_server
    from langchain_quota.ops.otlp import export_metrics as export_metrics
    from langchain_quota.ops.page import quota_app as quota_app
    from langchain_quota.ops.quota_headers import QuotaHeadersMiddleware as QuotaHeadersMiddleware
    from langchain_quota.stores.memory import MemoryStore as MemoryStore
    from langchain_quota.stores.postgres import PostgresStore as PostgresStore
    from langchain_quota.stores.redis import RedisStore as RedisStore
    from langchain_quota.telemetry import Telemetry as Telemetry
    from langchain_quota.telemetry import hmac_label as hmac_label
    from langchain_quota.telemetry.observers import log_decisions as log_decisions
    from langchain_quota.telemetry.receipts import Receipt as Receipt
else:
    from importlib import import_module

    # Importing LangChain takes a second, and the command line does not need it, so each name is
    # imported when it is first used. The imports above are for type checkers and editors.
    _NAMES_BY_MODULE = {
        "core.decision": ("Decision",),
        "core.stops": ("StopReason", "stop_reason"),
        "errors": (
            *("ModelCallLimitExceededError", "QuotaStoreError", "QuotaWarning"),
            "ToolCallLimitExceededError",
        ),
        "features.budgets.usage": ("max_usage",),
        "agents.subject_methods": ("Balance",),
        "agents.with_limits": ("with_limits",),
        "agents.graph": ("GraphQuota",),
        "ops.quota_headers": ("QuotaHeadersMiddleware",),
        "agents.inline": ("InlineQuotaMiddleware",),
        "limits.budgets": ("CostLimit", "Price", "TimeLimit", "TokenLimit"),
        "limits.call": ("ModelUsage",),
        "limits.calls": ("ConcurrencyLimit", "ModelCallLimit", "RepeatLimit", "ToolCallLimit"),
        "limits.quotas": ("Quota",),
        "agents.drop_ins": ("ModelCallLimitMiddleware", "ToolCallLimitMiddleware"),
        "agents.model_pace": ("ModelPaceMiddleware",),
        "agents.quota": ("QuotaMiddleware",),
        "middleware.thread_usage": ("usage",),
        "stores.memory": ("MemoryStore",),
        "stores.postgres": ("PostgresStore",),
        "stores.redis": ("RedisStore",),
        "telemetry": ("Telemetry", "hmac_label"),
        "telemetry.observers": ("log_decisions",),
        "ops.exposition": ("metrics_app", "start_metrics_server"),
        "ops.otlp": ("export_metrics",),
        "ops.page": ("quota_app",),
        "telemetry.receipts": ("Receipt",),
    }
    _MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
    __all__ = ["__version__"]
    __all__ += list(_MODULES)

    def __getattr__(name: str) -> object:
        """Import a public name at its first use, and return its value.

        Raises:
            AttributeError: The package has no such name.
        """
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        """Return all names, including public ones that are not imported yet."""
        return sorted({*globals(), *__all__})
