"""`zerotrain launch` in a job's command: what each rank gets, and what is refused with the field to use."""

from __future__ import annotations

import pytest

from zerotrain.contract.launch_command import (
    LaunchCommandError,
    arguments_of_rank,
    begins_with_launch,
    instead_of_deepspeeds,
)

pytestmark = pytest.mark.unit

LAUNCH = ("zerotrain", "launch")


@pytest.mark.parametrize(
    ("command", "is_launch"),
    [
        (("zerotrain", "launch", "train.py"), True),
        (("/opt/venv/bin/zerotrain", "launch"), True),
        (("zerotrain", "run", "launch"), False),
        (("python", "zerotrain", "launch"), False),
        (("bash", "-c", "zerotrain launch train.py"), False),
        (("zerotrain",), False),
        ((), False),
    ],
)
def test_which_commands_are_meant(command: tuple[str, ...], is_launch: bool) -> None:
    assert begins_with_launch(command) is is_launch


@pytest.mark.parametrize(
    "arguments",
    [
        ("train.py",),
        ("train.py", "--ranks", "2", "--num_gpus=3", "-m"),
        ("--replace-deepspeed", "train.py", "--x"),
        ("--pass-local-rank", "--replace-deepspeed", "-m", "package.train", "--nodes", "2"),
    ],
)
def test_ranks_get_the_script_and_its_arguments(arguments: tuple[str, ...]) -> None:
    assert arguments_of_rank((*LAUNCH, *arguments)) == arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "2", "train.py"), "--ranks of zerotrain launch is for a run without a job; remove it"),
        (("--ranks=2", "train.py"), "in a job, spec.ranksPerWorker or resources.gpus.count says it"),
        (("--replace-deepspeed", "--nodes", "2", "train.py"), "spec.workers says it"),
        (("--node-rank", "0", "train.py"), "the operator says it"),
        (("--num_gpus=2", "train.py"), "--num_gpus is an option of DeepSpeed's launcher; remove it"),
        (("--verbose", "train.py"), "--verbose is not an option of zerotrain launch in a job"),
        ((), "no script"),
        (("--replace-deepspeed",), "no script"),
        (("-m",), "no script"),
    ],
)
def test_other_options_are_refused(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(LaunchCommandError) as caught:
        arguments_of_rank((*LAUNCH, *arguments))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--num_gpus", "--ranks N"),
        ("--num_gpus=4", "--ranks N"),
        ("--num_nodes", "--nodes N"),
        ("--master_port", "--master HOST:PORT"),
        ("--hostfile", "on every host"),
        ("--include", "CUDA_VISIBLE_DEVICES"),
        ("--module", "-m MODULE"),
    ],
)
def test_options_of_deepspeeds_launcher_name_ours(option: str, ours: str) -> None:
    assert ours in str(instead_of_deepspeeds(option))


@pytest.mark.parametrize("option", ["--ranks", "-m", "--deepspeed"])
def test_other_options_are_not_deepspeeds(option: str) -> None:
    assert instead_of_deepspeeds(option) is None
