"""Metrics of our own, apart from those that the server tells everybody on its `/metrics`."""

from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry

registry = CollectorRegistry()
telemetry = Telemetry(registry=registry)
