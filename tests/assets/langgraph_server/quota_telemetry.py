"""Telemetry and limits that the agents and the server's routes share."""

from typing import Any

from prometheus_client import CollectorRegistry

from langchain_quota import Quota, QuotaMiddleware, RedisStore, Telemetry, ToolCallLimit

# Apart from the metrics that the server tells everybody on its `/metrics`.
registry = CollectorRegistry()
telemetry = Telemetry(registry=registry)


def user(state: Any, runtime: Any) -> str:
    """Who asks: as the server's authentication has found, not as the request says."""
    return str(runtime.server_info.user.identity)


quota_by_user = QuotaMiddleware(
    [ToolCallLimit("search", quotas=[Quota(3, per=user, name="user")])],
    store=RedisStore(),
    telemetry=telemetry,
)
