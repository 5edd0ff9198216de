"""The worst value that the API server accepts in every string, list and map of a job's spec."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.cluster.hostile.arena import Arena
from tests.cluster.hostile.bodies import Post, job
from tests.cluster.hostile.complaints import command_complaints
from tests.cluster.hostile.schema_values import Variant, variants
from tests.cluster.hostile.schema_walk import places, spec_with
from tests.cluster.hostile.tenant import Answer
from tests.support.jobs import ABSENT, job_json
from tests.support.tiers import with_slow_rows
from zerotrain.operator.api.crd import openapi_schema

pytestmark = pytest.mark.cluster

BATCH = 50
SPEC = openapi_schema()["properties"]["spec"]
BASE = job_json({"spec.workers": 1, "spec.ranksPerWorker": 1, "spec.checkpoint": ABSENT})["spec"]
VARIANTS = [variant for place in places(SPEC) for variant in variants(place)]
BATCHES = range(-(-len(VARIANTS) // BATCH))


@pytest.fixture(scope="module")
def stage(fresh: Arena) -> Arena:
    fresh.measure_baseline()
    return fresh


def posts(variant: Variant, name: str) -> Iterator[Post]:
    spec = spec_with(SPEC, BASE, variant.place, "MARK")
    for text in variant.values():
        yield job(name, {"spec": spec}, {"MARK": text})


def worst_taken(stage: Arena, variant: Variant, name: str) -> Answer:
    """Post values until the API server accepts one; return the last answer."""
    for post in posts(variant, name):
        answer = stage.tenant.create(post)
        if answer.accepted:
            break
    return answer


@pytest.mark.parametrize("number", with_slow_rows(BATCHES, quick=BATCHES[1:]))
def test_without_the_policy(stage: Arena, number: int) -> None:
    """A place at which the API server accepts no value was not tested."""
    untried, answers = [], []
    with stage.round():
        for at, variant in enumerate(islice(VARIANTS, number * BATCH, (number + 1) * BATCH)):
            answer = worst_taken(stage, variant, f"schema-{number}-{at}")
            answers.append(answer)
            if not answer.accepted:
                untried.append(f"{variant}: {answer}")
        stage.note(f"batch {number}", answers, stage.work())
        wrong = stage.complaints() + command_complaints(stage.cluster, stage.job_names(), "get", "-A")
        stage.expect(wrong + untried)
