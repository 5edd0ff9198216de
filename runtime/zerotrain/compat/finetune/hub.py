"""Names on the hub that could not be read: the reason, by what the hub itself answers about the name.

The libraries' own errors do not tell it: `datasets` says the same of a name that is not there and of one that
is not public, and its errors lose their cause.
"""

from __future__ import annotations

from pathlib import Path

from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import FinetuneSpec

TIMEOUT_S = 10.0
BUSY = 429
BROKEN = 500
"""Smallest status of an answer that says that the hub itself is at fault."""

FOLDER = "an absolute path that podTemplate.volumes mounts"


def check_name(spec: FinetuneSpec, field: str, name: str, kind: str, error: Exception) -> None:
    """Ask the hub why `error` was raised by reading `name`, which `field` holds; `kind` is model or dataset.

    Raises CompatError if the name, the token or the network is the reason, and `error` itself if the hub may
    answer at another time. Returns if none of it is the reason, and for absolute paths.
    """
    if name.startswith("/"):
        return
    # Imported late: most jobs read no names, and the alias must be there before.
    from huggingface_hub import constants, get_session, get_token, hf_raise_for_status
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"{constants.ENDPOINT}/api/{kind}s/{name}/auth-check"
    what = f"spec.finetune.{field}: {constants.ENDPOINT}"
    try:
        hf_raise_for_status(get_session().get(url, headers=headers, timeout=TIMEOUT_S))
    except HfHubHTTPError as refusal:
        status = refusal.response.status_code
        tried = f"{status}, with {'the token that it was given' if token else 'no token'}"
        if status in (401, 403):
            raise CompatError(
                f"{what} does not give {name} to this job ({tried}): it is private or gated, or there is no "
                f"such {kind}; name a Secret with a token that may read it as tokenFrom (in a local run "
                f"HF_TOKEN), correct the name, or give {FOLDER}"
            ) from error
        if isinstance(refusal, RepositoryNotFoundError):
            raise CompatError(
                f"{what} has no {kind} {name} ({tried}); correct it, or give {FOLDER}"
            ) from error
        if status == BUSY or status >= BROKEN:
            raise error from None
    except Exception as unreachable:
        if _has_trained(spec):
            raise error from None
        raise CompatError(
            f"spec.finetune.{field}: cannot reach {constants.ENDPOINT} for {name} ({unreachable}); let the "
            f"job reach it by spec.network.egressCidrs, or give {FOLDER}"
        ) from error


def _has_trained(spec: FinetuneSpec) -> bool:
    """Return whether an attempt of this job could read what the spec names: it saved a checkpoint."""
    return any(Path(spec.output).glob("checkpoint-*"))
