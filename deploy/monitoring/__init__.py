"""A real Prometheus and Alertmanager beside a cluster, as `make monitoring-up` starts them.

They show metrics, rules and dashboards without an installation in the cluster. Pods are found and scraped
through the API server, so only a kubeconfig is needed, also from outside the pod network.
"""
