"""A real Prometheus and Alertmanager beside a cluster: what `make monitoring-up` starts.

For a look at metrics, rules and dashboards without installing anything in the cluster. Pods are found and
scraped through the API server, so it works from outside the pod network, with nothing but a kubeconfig.
"""
