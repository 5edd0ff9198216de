"""Parts of Kubernetes' own types that a podTemplate may hold, typed so that a typo is an error.

Sources that Pod Security "restricted" forbids (hostPath), and fields that would undo the operator's security
context, are left out on purpose: the API server then rejects them by name.
"""
