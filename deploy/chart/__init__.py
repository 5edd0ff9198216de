"""Generator of the chart's files from other folders: custom resource, roles, rules, dashboards."""
