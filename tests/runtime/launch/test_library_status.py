"""A script that trains without the engine: what its library posts is shown, and nothing is judged by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launcher import eventually, launched
from zerotrain.contract.progress import Phase, Progress
from zerotrain.runtime.launch.library_status import with_status

POST = """
import json, os, time, urllib.request
while "FOLDER" and not os.path.exists({done!r}):
    token = open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read()
    metrics = [("current_step", 7), ("total_steps", 20), ("loss", 1.5), ("learning_rate", 1e-3)]
    status = {{"progressPercentage": 35, "metrics": [{{"name": n, "value": str(v)}} for n, v in metrics]}}
    data, headers = json.dumps({{"trainerStatus": status}}).encode(), {{"Authorization": "Bearer " + token}}
    request = urllib.request.Request(os.environ["KUBEFLOW_TRAINER_SERVER_URL"], data=data, headers=headers)
    if os.environ["RANK"] == "0":
        assert urllib.request.urlopen(request, timeout=5).status == 200
    time.sleep(0.05)
"""


@pytest.mark.ranks
def test_what_transformers_posts_is_shown_without_a_verdict(tmp_path: Path) -> None:
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(POST.format(done=str(done)))
    with launched(tmp_path, "", command=["zerotrain", "launch", str(script)]) as launcher:
        eventually(lambda: launcher.report()["ranks"][0]["step"] == 7, what="the post arrives")
        first, second = launcher.report()["ranks"]
        assert (first["total_steps"], first["loss"], first["phase"]) == (20, 1.5, "step")
        assert (first["motion"], first["heartbeat_at"], second["step"]) == (None, 0.0, 0)
        assert launcher.report()["ready"] is True
        assert launcher.request("/trainer-status", body=b"{}")[0] == 401
        done.touch()
        code, output = launcher.finish()
        assert code == 0, output


@pytest.mark.ranks
def test_other_programs_have_no_such_server(tmp_path: Path) -> None:
    text = f"""
    assert "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ
    while not os.path.exists({str(tmp_path / "done")!r}):
        time.sleep(0.05)
    """
    with launched(tmp_path, text, ranks=1) as launcher:
        assert launcher.request("/trainer-status", body=b"{}")[0] == 404
        (tmp_path / "done").touch()
        assert launcher.finish()[0] == 0


@pytest.mark.unit
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"trainerStatus": {"metrics": [1]}}', b'{"trainerStatus": {"metrics": 3}}']
)
def test_another_body_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        with_status(Progress(rank=0, attempt=1), body)


@pytest.mark.unit
def test_numbers_that_are_none_are_left_out() -> None:
    def status(**metrics: str) -> bytes:
        items = [{"name": name, "value": value} for name, value in metrics.items()]
        return json.dumps({"trainerStatus": {"metrics": items}}).encode()

    record = Progress(rank=0, attempt=1, loss=2.0)
    assert with_status(record, status(loss="nan", step="3")) == record
    assert with_status(record, status(current_step="3")).phase is Phase.STEP
