"""The Grafana dashboards as code."""
