"""The Secret with what the workers of one attempt read: the rendered configuration and the channel token.

One object for both, as each costs the API server a write per attempt and every kubelet a watch; an immutable
one is not even watched. Create-only: the operator derives the token again whenever it calls a worker, so it
needs no permission to read Secrets.
"""

from __future__ import annotations

import base64

from zerotrain.contract.channel_token import derive
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import TOKEN_KEY

from .config_files import config_files
from .identity import Json, attempt_labels, metadata, secret_name


def attempt_secret(job: ZeroTrainingJob, attempt: int, operator_key: bytes) -> Json:
    """Raises ValueError when the key is too short or the job has no UID yet."""
    files = {**config_files(job), TOKEN_KEY: derive(operator_key, job.uid, attempt)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job, attempt), attempt_labels(job, attempt)),
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }
