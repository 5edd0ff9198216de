"""The program of a job with `spec.finetune`."""

from __future__ import annotations

import os

from zerotrain.compat.finetune.training import train
from zerotrain.compat.refusal import CompatError
from zerotrain.contract.finetune_spec import FINETUNE_FILE, FinetuneSpec, FinetuneSpecError
from zerotrain.contract.worker_environment import LaunchError, LaunchSpec


def main() -> None:
    """Read the job's fine-tuning part and train. Raises CompatError for what cannot be trained."""
    try:
        config = LaunchSpec.from_env(os.environ).config_path
        spec = FinetuneSpec.from_json(config.with_name(FINETUNE_FILE).read_text())
    except (LaunchError, OSError) as error:
        raise CompatError(f"the module of spec.finetune runs in a job only: {error}") from error
    except FinetuneSpecError as error:
        raise CompatError(f"spec.finetune.{error}") from error
    train(spec, config)


if __name__ == "__main__":
    main()
