"""The Secret with the channel token of one attempt.

Create-only: the operator derives the token again whenever it calls a worker, so it needs no permission to
read Secrets.
"""

from __future__ import annotations

import base64

from zerotrain.contract.channel_token import derive
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import TOKEN_KEY

from .identity import Json, attempt_labels, metadata, secret_name


def channel_secret(job: ZeroTrainingJob, attempt: int, operator_key: bytes) -> Json:
    """Raises ValueError when the key is too short or the job has no UID yet."""
    token = derive(operator_key, job.uid, attempt)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job.name, attempt), attempt_labels(job, attempt)),
        "type": "Opaque",
        "immutable": True,
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }
