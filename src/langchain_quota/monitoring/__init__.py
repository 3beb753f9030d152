"""What watches the limits: dashboards, rules and alerts, as files to be exported."""
