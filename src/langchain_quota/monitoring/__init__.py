"""Dashboards, rules and alerts that watch the limits, as files to export."""
