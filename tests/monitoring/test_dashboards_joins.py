"""Panels that join GPUs to ranks stay right when another tenant's worker serves forged series, by
promtool.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.dashboards.selectors import of_pod, of_rank
from tests.monitoring.rules.cases_values import Values
from tests.monitoring.rules.model import flat, series
from tests.monitoring.rules.runner import Trial, outcomes

pytestmark = pytest.mark.tools


GPU = 'gpu_busy{UUID="GPU-0",exported_namespace="ml",exported_pod="gpt-0"}'
HONEST = {
    GPU: flat(7, 3),
    series("zerotrain_rank_info", pod="gpt-0", job_name="gpt", rank="0", gpu_uuid="GPU-0"): flat(1, 3),
}
BY_RANK = '{UUID="GPU-0",exported_namespace="ml",exported_pod="gpt-0",namespace="ml",job_name="gpt",rank="0"}'
BY_POD = '{UUID="GPU-0",exported_namespace="ml",exported_pod="gpt-0",job_name="gpt"}'


def forged(**labels: str) -> dict[str, list[float | None]]:
    """Return one more info series, of a pod of another namespace."""
    labels = {
        "namespace": "other",
        "pod": "ambiguous-0",
        "job_name": "ambiguous",
        "rank": "0",
        "gpu_uuid": "GPU-9",
    } | labels
    return {series("zerotrain_rank_info", **labels): flat(1, 3)}


OTHER = {GPU.replace("GPU-0", "GPU-9").replace('"ml"', '"other"').replace("gpt-0", "ambiguous-0"): flat(7, 3)}
AMBIGUOUS = {
    "one rank, reported twice": forged(attempt="1") | forged(attempt="2"),
    "two ranks of one GPU": forged() | forged(rank="1"),
    "two jobs of one pod": forged() | forged(job_name="even"),
    "labels that the join makes": forged(UUID="a", exported_pod="a") | forged(UUID="b", exported_pod="b"),
}


@pytest.mark.parametrize(
    ("expr", "found"),
    [(of_rank("gpu_busy", "FLEET"), BY_RANK), (of_pod("gpu_busy", "FLEET"), BY_POD)],
    ids=["by rank", "by pod"],
)
@pytest.mark.parametrize("ambiguous", AMBIGUOUS)
def test_a_worker_that_contradicts_itself_empties_no_panel_of_others(
    ambiguous: str, expr: str, found: str, promtool: Path, tmp_path: Path
) -> None:
    # Selects every job, in the place where the board puts its variables.
    asked = expr.replace("{FLEET, ", "{").replace("{FLEET}", "")
    ours = f'({asked}) and on (UUID) gpu_busy{{UUID="GPU-0"}}'
    exported = HONEST | OTHER | AMBIGUOUS[ambiguous]
    case = Values(name=ambiguous, expr=ours, series=exported, finds={60: {found: 7.0}})
    failures = outcomes(promtool, tmp_path, [Trial(name="join", rules=(), cases=(case,))])["join"]
    assert not failures, failures
