"""`zerotrain plan` and `explain memory`: the verdict first, then the numbers, their sources, and exit
codes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.local_jobs import zerotrain
from zerotrain.cli import probe
from zerotrain.cli.main import app
from zerotrain.cli.plan import parse_count

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def job_file(folder: Path, **spec: Any) -> Path:
    job = {
        "apiVersion": "zerotrain.dev/v1alpha1",
        "kind": "ZeroTrainingJob",
        "metadata": {"name": "llama"},
        "spec": {
            "workers": 1,
            "image": "example.org/image:1",
            "model": {"path": "/models/llama-3-8b"},
            "data": {"path": "/data"},
            "steps": 10,
            "resources": {"gpus": {"count": 8}, "memory": "1Ti"},
            "config": {
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3},
            },
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return path


def plan(*args: str | Path) -> Result:
    """Run `zerotrain plan` in this process; errors come as exceptions."""
    return CliRunner().invoke(app, ["plan", *map(str, args)])


@pytest.mark.unit
def test_a_job_that_fits(tmp_path: Path) -> None:
    done = plan(job_file(tmp_path), "--model-config", tmp_path, "--gpu", "H100", "--price", "24.80")
    assert done.exit_code == 0, done.output
    first = done.output.splitlines()[0]
    assert first.startswith("llama: Fits: each GPU needs ")
    assert "and has 79.6 GiB (H100-80GB)" in first
    for words in ("8.03 B parameters, 32 layers of width 4096, 2048 tokens", "1 x 8 = 8 ranks on GPUs"):
        assert words in done.output
    assert re.search(
        r"^GPU of a rank +\S+ GiB +\S+ GiB +\S+ GiB +\S+ GiB +79.6 GiB +\+\d+% +Fits", done.output, re.M
    )
    assert re.search(r"^about \S+ s a step, bound by compute in backward: \S+ k tokens/s", done.output, re.M)
    assert re.search(r"^[\d,.]+ per billion tokens at 24.8 a worker and hour", done.output, re.M)
    assert "40% of the H100-80GB's data sheet" in done.output
    assert "…" not in done.output, "numbers were cut"


@pytest.mark.unit
def test_samples_of_a_factorys_model_have_the_length_in_the_job(tmp_path: Path) -> None:
    path = job_file(tmp_path, model={"factory": {"function": "pkg.mod:build", "context": 32_768}})
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 131_072}))
    done = plan(path, "--model-config", tmp_path, "--gpu", "H100")
    assert "32 layers of width 4096, 32768 tokens a sample" in done.output


@pytest.mark.unit
def test_a_job_that_does_not(tmp_path: Path) -> None:
    """The proposal comes right after the verdict, and the speed is that of the proposal."""
    resources = {"gpus": {"count": 2, "memory": "40Gi"}, "memory": "512Gi"}
    done = plan(job_file(tmp_path, resources=resources), "--model-config", tmp_path, "--rate", "tflops=200")
    assert done.exit_code == 67
    first_line, way_out = done.output.splitlines()[:2]
    assert first_line.startswith("llama: DoesNotFit: each GPU needs ")
    assert "40.0 GiB (spec.resources.gpus.memory)" in first_line
    assert way_out.startswith("Nearest that fits: ")
    assert '"offload_optimizer": {"device": "cpu"}' in way_out
    assert "one step of the nearest that fits, estimated" in done.output
    assert "not counted, as the rate is not known: --rate " in done.output


@pytest.mark.unit
def test_the_way_out_costs_as_much_as_in_its_own_plan(tmp_path: Path) -> None:
    """Proposals have more workers, and so more samples in a step, only where the batch can be shared."""
    recompute = {"activation_checkpointing": {}, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    resources = {"gpus": {"count": 2, "memory": "40Gi"}, "memory": "32Gi"}
    small: dict[str, Any] = {"resources": resources, "nvme": {"size": "1Gi"}}
    rates = ("--rate", "tflops=400", "--rate", "network=50", "--rate", "device=2000", "--rate", "peer=300")

    def found(*options: str, more: dict[str, Any] | None = None, **batch: int) -> dict[str, Any]:
        path = job_file(tmp_path, config={**recompute, **batch}, **small, **(more or {}))
        done = plan(path, "--model-config", tmp_path, "--price", "9", *rates, "-o", "json", *options)
        return json.loads(done.output)  # type: ignore[no-any-return]

    proposed = found(train_micro_batch_size_per_gpu=1)
    assert proposed["nearest"] == ["spec.workers: 4"]
    assert proposed["pace"] == found("--workers", "4", train_micro_batch_size_per_gpu=1)["pace"]
    assert proposed["pace"]["cost_per_billion_tokens"] > 0
    assert found(train_batch_size=2)["nearest"] is None
    claim = {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}
    elastic = {"elastic": {"minWorkers": 1, "maxWorkers": 4}, "checkpoint": claim}
    kept = found(more=elastic, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)
    assert kept["nearest"] == ["spec.workers: 4"]
    assert kept["pace"]["tokens"] == proposed["pace"]["tokens"], "8 samples, at every size"


@pytest.mark.unit
def test_json_for_programs(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    done = plan(path, "--model-config", tmp_path / "config.json", "--workers", "2", "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["verdict"], found["ranks"], found["parameters"]) == ("Unknown", 16, 8_030_261_248)
    gpu = next(tier for tier in found["tiers"] if tier["tier"] == "gpu")
    parts = gpu["engine_bytes"] + gpu["activation_bytes"] + gpu["estimated_bytes"]
    assert (gpu["needed_bytes"], gpu["limit_bytes"]) == (parts, None)
    assert found["pace"] is None
    assert found["traffic"]["phases"]["backward_bytes"] > found["traffic"]["phases"]["forward_bytes"] > 0


@pytest.mark.unit
def test_a_cost_needs_every_rate(tmp_path: Path) -> None:
    """Two workers need the network: without its rate a cost would be too low."""
    args = (job_file(tmp_path, workers=2), "--model-config", tmp_path, "--gpu", "H100", "--price", "24.80")
    assert "no cost: rates are missing" in plan(*args).output
    assert "per billion tokens" in plan(*args, "--rate", "network=50").output


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("spec", "args", "words"),
    [
        ({}, (), "only the workers see /models/llama-3-8b; give its size as spec.model.parameters"),
        ({}, ("--model-config", "nowhere"), "cannot be read"),
        ({}, ("--model-config", ".", "--gpu", "TPU"), "--gpu 'TPU' is unknown or ambiguous; known are T4"),
        ({}, ("--model-config", ".", "--rate", "warp=9"), "no rate; known are tflops"),
        ({}, ("--model-config", ".", "--rate", "pcie=fast"), "'pcie=fast' is not NAME=NUMBER"),
        ({}, ("--model-config", ".", "--probe", "nowhere"), "--probe nowhere: No such file"),
        ({"steps": 0}, (), "spec.steps"),
        ({"nvme": {"size": "1Gi", "mountPath": "/dev"}}, (), "spec.nvme.mountPath"),
    ],
)
def test_what_cannot_be_planned(
    spec: dict[str, Any], args: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(tmp_path, **spec)
    monkeypatch.chdir(tmp_path)
    done = plan(path, *args)
    assert done.exit_code == 1  # an exception, which `main` turns into a message and a code
    assert words in str(done.exception)


@pytest.mark.ranks
def test_the_command_names_the_next_step(tmp_path: Path) -> None:
    done = zerotrain("plan", job_file(tmp_path))
    assert done.returncode == 64
    assert done.stderr.startswith("error (64):")
    assert "--model-config" in done.stderr


@pytest.mark.unit
def test_rates_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.05)
    monkeypatch.setattr(probe, "FILE_BYTES", 32 << 20)
    monkeypatch.setattr(probe, "COPY_BYTES", 16 << 20)
    monkeypatch.setattr(probe, "MATMUL_SIZE", 128)
    found = probe.measure(tmp_path, ranks=2, dtype="fp32")
    assert set(found) == {"host", "nvme", "tflops"}
    assert all(rate > 0 for rate in found.values())
    assert list(tmp_path.iterdir()) == [], "the file has no name"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "fp16"),
    ],
)
def test_products_are_measured_in_the_dtype_of_the_job(
    config: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs and GPUs are slower at fp32 than at bf16: `--probe` and the data sheet follow."""
    asked: list[str] = []

    def matmul(dtype: str) -> float:
        asked.append(dtype)
        return 1.0

    monkeypatch.setattr(probe, "SECONDS", 0.01)
    monkeypatch.setattr(probe, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "matmul_tflops", matmul)
    path = job_file(tmp_path, config={"train_micro_batch_size_per_gpu": 1, **config})
    done = plan(path, "--model-config", tmp_path, "--probe", tmp_path)
    assert asked == [dtype], done.output
    parts = [
        json.loads(plan(path, "--model-config", tmp_path, *options, "-o", "json").output)["pace"]["parts"]
        for options in (("--gpu", "H200"), ("--rate", f"tflops={0.4 * (67 if dtype == 'fp32' else 989)}"))
    ]
    by_sheet, given = (next(part for part in each if part["what"] == "compute") for each in parts)
    assert by_sheet["seconds"] == pytest.approx(given["seconds"])


@pytest.mark.unit
def test_the_probe_multiplies_in_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(probe, "SECONDS", 0.01)
    monkeypatch.setattr(probe, "MATMUL_SIZE", 16)
    made: list[Any] = []
    plain = torch.ones

    def ones(*size: int, **how: Any) -> Any:
        made.append(how["dtype"])
        return plain(*size, **how)

    monkeypatch.setattr(torch, "ones", ones)
    for dtype in ("fp32", "bf16", "fp16"):
        assert (probe.matmul_tflops(dtype) or 0) > 0
    assert made == [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.unit
def test_published_tables() -> None:
    done = CliRunner().invoke(app, ["explain", "memory", "7.5B", "--ranks", "64"])
    assert done.exit_code == 0, done.output
    (paper,) = (line for line in done.output.splitlines() if "ZeRO paper" in line)
    assert paper.split()[-4:] == ["120", "31.4062", "16.6406", "1.875"]
    assert "weights 2 + gradients 2 + states 12" in paper


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7 * 10**9), ("7.5e9", 7_500_000_000), ("350m", 350_000_000), ("12", 12)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.unit
@pytest.mark.parametrize("text", ["", "B", "-3", "0", "1e99", "nan", "many"])
def test_no_counts(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)
