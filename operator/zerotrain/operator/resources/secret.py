"""The Secret with the files that the workers of one attempt read: the rendered configuration and the channel
token.

Both are in one object, because each object costs the API server a write per attempt and every kubelet a
watch. An immutable Secret is not even watched. The operator only creates Secrets: it derives the token again
whenever it calls a worker, so it needs no permission to read them.
"""

from __future__ import annotations

import base64

from zerotrain.contract.channel_token import derive
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import TOKEN_KEY

from .config_files import config_files
from .identity import Json, attempt_labels, metadata, secret_name


def attempt_secret(job: ZeroTrainingJob, attempt: int, operator_key: bytes) -> Json:
    """Return the Secret of the attempt. Raises ValueError if the key is too short or the job has no UID
    yet."""
    files = {**config_files(job), TOKEN_KEY: derive(operator_key, job.uid, attempt)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job, attempt), attempt_labels(job, attempt)),
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }
