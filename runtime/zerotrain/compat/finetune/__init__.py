"""Fine-tuning as a job: TRL's SFTTrainer and PEFT, set by one JSON instead of a script.

    __main__ > training > rows

Each rank runs `python -m zerotrain.compat -m zerotrain.compat.finetune`, as it would run a user's script, and
all that scripts have applies: reports, whole checkpoints, stops, resumes.
"""
