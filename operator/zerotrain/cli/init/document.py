"""The job as YAML with explanatory comments."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from zerotrain.cli.init.answers import Answers
from zerotrain.cli.init.propose import Proposal, as_object
from zerotrain.contract.planner import bytes_text

HEAD = """A training job for zerotrain.
Here:           zerotrain run {file}
In a cluster:   zerotrain submit {file}
What it needs:  zerotrain plan {file}
Every field:    kubectl explain ztj.spec
"""

COMMENTS = {
    ("workers",): "Pods; each has one rank per GPU, or one without GPUs.",
    ("image",): "Must hold the zerotrain runtime.",
    ("steps",): "Optimizer steps, over all restarts.",
    ("resources",): "Of each worker; requests equal limits.",
    ("nvme",): "A volume of each worker for state that is spilled out of memory, encrypted.",
    ("checkpoint",): "Without it a restart begins at step 0.",
    ("config",): "A DeepSpeed-style configuration; zerotrain config check explains every key.",
}


def as_yaml(answers: Answers, proposal: Proposal, *, file: str) -> str:
    """Return the text of the file."""
    root = _commented(as_object(answers, proposal.choice))
    root.yaml_set_start_comment(HEAD.format(file=file))
    spec = root["spec"]
    for (key,), text in COMMENTS.items():
        if key in spec:
            spec.yaml_set_comment_before_after_key(key, before=text, indent=2)
    zero = f"{proposal.choice.text}. {proposal.reason}"
    spec["config"].yaml_set_comment_before_after_key("zero_optimization", before=zero, indent=4)
    if answers.gpus and answers.device is not None:
        device = answers.device
        spec["resources"]["gpus"].yaml_add_eol_comment(
            f"{device.name}: {bytes_text(device.memory_bytes)}, for the memory planner", "memory"
        )
    yaml = YAML()
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(root, stream)
    return stream.getvalue()


def _commented(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = CommentedMap()
    for key, item in value.items():
        made[key] = _commented(item)
    return made
