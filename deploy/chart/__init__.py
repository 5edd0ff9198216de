"""Fills charts/zerotrain with what belongs to other folders: custom resource, roles, rules, dashboards."""
