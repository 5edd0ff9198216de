"""Advice for a job whose configuration names a tracker on the network: the egress or the key that it lacks.

Such a job is not refused: a policy of the user's own, or a key in the image, may exist without the operator's
knowledge. Only an inline configuration is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from zerotrain.contract.config import ConfigError
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.api.configuration import engine_config
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.draft import Draft

KEYS: Final = {"wandb": "WANDB_API_KEY", "comet": "COMET_API_KEY"}
"""Variables of trackers whose servers want a key."""

OFFLINE: Final = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE with which nothing is sent."""


def advice(spec: ZeroTrainingJobSpec) -> str:
    """Return what is missing for the job's trackers; empty where nothing is."""
    try:
        config = engine_config(spec)
    except ConfigError:
        return ""
    return "; ".join(_missing(spec, config.trackers)) if config is not None else ""


def report_trackers(draft: Draft) -> None:
    """Emit one event with the first attempt."""
    if draft.status.attempt == 1 and (text := advice(draft.job.spec)):
        draft.emit(Reason.TRACKER_UNREACHABLE, text, warning=True)


def _missing(spec: ZeroTrainingJobSpec, trackers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    pods = spec.pod_template
    variables = {item.name: item.value or "" for item in (pods.env if pods is not None else ())}
    has_sources = pods is not None and bool(pods.env_from)
    has_egress = spec.network is not None and bool(spec.network.egress_cidrs)
    for name, settings in trackers.items():
        if not _is_remote(name, settings, variables):
            continue
        if not has_egress:
            yield (
                f"spec.config.{name}: the tracker is on the network, which the job's NetworkPolicy lets no "
                "pod reach; name the tracker's network in spec.network.egressCidrs"
            )
        key = KEYS.get(name)
        if key is not None and key not in variables and not has_sources:
            yield (f"spec.config.{name}: {key} is not set; name a Secret with it in spec.podTemplate.envFrom")


def _is_remote(name: str, settings: Mapping[str, Any], variables: Mapping[str, str]) -> bool:
    """Return whether a tracker sends to a server, as far as the job says it."""
    match name:
        case "wandb":
            return variables.get("WANDB_MODE") not in OFFLINE
        case "comet":
            return settings["online"] is not False
        case "mlflow":
            store = settings["tracking_uri"] or variables.get("MLFLOW_TRACKING_URI", "")
            return str(store).startswith(("http:", "https:", "databricks"))
    return False
