"""The seven Grafana dashboards, described in Python and written as JSON into `dashboards/`."""
