"""The seven Grafana dashboards, described once in Python and written as JSON into `dashboards/`."""
