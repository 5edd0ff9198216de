"""The Service by which the ranks find worker 0: made as soon as that has an address.

Earlier it would have nothing to say, and two controllers would write so, and write again with the address.
Nobody asks for the name after the rendezvous: an operator that takes over running jobs has nothing to make.
"""

from __future__ import annotations

from zerotrain.operator.api import Phase
from zerotrain.operator.reconcile.attempts import LIVE, AttemptView
from zerotrain.operator.reconcile.conditions import ACTIVE
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import NameMaster
from zerotrain.operator.resources import names_worker_0


def settle(draft: Draft, view: AttemptView) -> None:
    """After the phase. Nobody is woken for it; the pod's own news bring the pass."""
    if not names_worker_0(draft.job.spec, draft.size) or draft.status.phase not in ACTIVE:
        return
    met = draft.job.status.phase is Phase.RUNNING
    worker = view.workers[0] if view.workers else None
    if met or worker is None or worker.fate not in LIVE or worker.pod is None or not worker.pod.pod_ip:
        return
    if draft.observed.named != draft.status.attempt:
        draft.act(NameMaster(attempt=draft.status.attempt))
