"""The check of spec.network before an attempt, and the hint on the job's NetworkPolicy after a failed
connection."""

from __future__ import annotations

from collections.abc import Iterable

from zerotrain.contract.unreachable import reports_unreachable_host
from zerotrain.operator.api.network import is_within
from zerotrain.operator.constants import LABEL_JOB, Reason
from zerotrain.operator.reconcile.draft import Draft


def refusal(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if the job requests more networks than its installation allows; None
    otherwise."""
    network, bounds = draft.job.spec.network, draft.observed.egress_bounds
    asked = network.egress_cidrs if network is not None else ()
    beyond = [cidr for cidr in asked if not is_within(cidr, bounds)]
    if not beyond:
        return None
    allowed = ", ".join(bounds[:8]) or "none"
    return str(Reason.EGRESS_NOT_ALLOWED), (
        f"spec.network.egressCidrs: {', '.join(beyond[:8])} is not within what this installation allows jobs "
        f"({allowed}). Name parts of that, have the chart's jobs.allowedEgressCidrs widened, or remove the "
        "field and give a NetworkPolicy of your own for pods with the label "
        f"{LABEL_JOB}={draft.job.identity.name}"
    )


def hint(draft: Draft, texts: Iterable[str]) -> str | None:
    """Return the hint on the network policy if one of the texts reports an unreachable destination; None
    otherwise."""
    if not any(reports_unreachable_host(text) for text in texts):
        return None
    return f"it could not reach the network: {way_out(draft)}"


def way_out(draft: Draft) -> str:
    """Return what the job's policy allows, and how to allow more."""
    return (
        "the job's NetworkPolicy lets its pods, init containers too, reach "
        "its ranks, DNS and spec.network.egressCidrs alone; name the network there, or add a NetworkPolicy "
        f"of your own for pods with the label {LABEL_JOB}={draft.job.identity.name} (policies add up)"
    )
