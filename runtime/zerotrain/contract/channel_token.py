"""The token that the operator presents to a worker pod's channel.

The operator derives it again whenever it needs it, so it never has to read a Secret back. A pod holds only
the token of its own attempt.
"""

from __future__ import annotations

import hashlib
import hmac

MIN_KEY_BYTES = 32


def derive(operator_key: bytes, job_uid: str, attempt: int) -> str:
    """Return the hex HMAC-SHA256 of the job's UID and the attempt under the operator's key.

    Raises ValueError when the key is too short to be a secret or the UID is empty.
    """
    if len(operator_key) < MIN_KEY_BYTES:
        raise ValueError(
            f"operator key must hold at least {MIN_KEY_BYTES} bytes; got {len(operator_key)}; "
            f"create one with `head -c {MIN_KEY_BYTES} /dev/urandom`"
        )
    if not job_uid:
        raise ValueError("job_uid must not be empty; use metadata.uid of the job")
    message = f"zerotrain-channel/v1\n{job_uid}\n{attempt}".encode()
    return hmac.new(operator_key, message, hashlib.sha256).hexdigest()


def for_reading(token: str) -> str:
    """Return the token that the operator sends with each request for a report.

    It only reserves a slot of the worker's HTTP server. It permits nothing else, because it is sent every few
    seconds to an address that may belong to another pod by then.
    """
    return hmac.new(token.encode(), b"zerotrain-channel/reading/v1", hashlib.sha256).hexdigest()


def matches(expected: str, shown: str) -> bool:
    """Compare two tokens in constant time."""
    return hmac.compare_digest(expected.encode(), shown.encode())
