"""Workload of a job: model, data and the DeepSpeed-style configuration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from zerotrain.operator.constants import MAX_FREE_ENTRIES

from .base import ApiModel, FileKey, Int, ObjectName, one_of, rule
from .paths import DataPath, FilePath


class ConfigKey(ApiModel):
    """One key of a ConfigMap in the job's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""

    key: FileKey
    """Key that holds the JSON text."""


class ConfigSource(ApiModel):
    """Reference to the configuration."""

    config_map_key_ref: ConfigKey
    """Key of a ConfigMap in the job's namespace. It is mounted into the workers unchanged."""


class Gpt(ApiModel):
    """A byte-level GPT: pre-norm blocks, learned positions, a vocabulary of the 256 bytes, tied head."""

    RULES = (
        rule(
            "self.dModel % self.heads == 0",
            "dModel must be a multiple of heads",
            holds=lambda self: self.d_model % self.heads == 0,
            field_path=".dModel",
        ),
    )

    d_model: Annotated[Int, Field(ge=8, le=65536)]
    """Width of the model; a multiple of heads. 8 to 65536."""

    layers: Annotated[Int, Field(ge=1, le=1024)]
    """Number of blocks. 1 to 1024."""

    heads: Annotated[Int, Field(ge=1, le=1024)]
    """Attention heads of a block. 1 to 1024."""

    context: Annotated[Int, Field(ge=2, le=1_048_576)]
    """Tokens (bytes) per sample. 2 to 1048576."""


class Factory(ApiModel):
    """A Python function of the image that builds the model."""

    function: Annotated[
        str,
        StringConstraints(
            max_length=256,
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$",
        ),
    ]
    """Function as `package.module:function`. It returns an nn.Module whose call on a batch of token ids
    returns the loss."""

    args: Annotated[dict[str, Any], Field(max_length=MAX_FREE_ENTRIES)] | None = None
    """Keyword arguments of the function, any JSON; none unless given."""

    context: Annotated[Int, Field(ge=2, le=1_048_576)] | None = None
    """Tokens per sample that the trainer feeds to the model. 2 to 1048576."""


class Model(ApiModel):
    """The model to train; exactly one of gpt, preset, path, factory."""

    RULES = (one_of("gpt", "preset", "path", "factory"),)

    gpt: Gpt | None = None
    """A byte-level GPT of the given shape, trained from scratch."""

    preset: (
        Annotated[
            str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")
        ]
        | None
    ) = None
    """A shape by name, such as gpt-125m."""

    path: FilePath | None = None
    """Folder in the worker with a model in Hugging Face format (config.json and safetensors)."""

    factory: Factory | None = None
    """A Python function of the image that builds the model."""

    parameters: Annotated[Int, Field(ge=1, le=10**15)] | None = None
    """Number of parameters, 1 to 10^15, for the memory planner: the operator sees neither the files of path
    nor what a factory builds. Not needed with gpt and preset, whose sizes are known."""


class Data(ApiModel):
    """Training data."""

    path: DataPath
    """File or folder of text in the worker (mount it with podTemplate.volumes), as an absolute path; or
    builtin:python-stdlib for the text of the worker's own Python standard library."""
