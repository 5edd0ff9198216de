"""The rows of the table that let scripts report, stop and resume in a job."""

from __future__ import annotations

from zerotrain.compat.libraries.surface import Surface

IN_A_JOB: tuple[Surface, ...] = (
    Surface(
        module="transformers.trainer_utils",
        symbol="get_last_checkpoint",
        why="a script would resume from a checkpoint that was not written to its end",
        mend="jobs.find_whole_checkpoints",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._save_checkpoint",
        why="a killed job would leave half a checkpoint under the name of a whole one",
        mend="jobs.keep_checkpoints_whole",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._get_output_dir",
        why="a checkpoint would be written in its final place",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._push_from_checkpoint",
        why="a checkpoint would be uploaded from a folder that is moved meanwhile",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._run_epoch",
        why="an attempt that begins after the last step would take one more",
        mend="jobs.take_no_step_too_many",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer.train",
        why="a later attempt of a job would begin anew, and a stop would save nothing",
        mend="jobs.resume_by_itself",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer.evaluate",
        why="an evaluation would count as a step that hangs",
        mend="jobs.pause_for_evaluation",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._load_best_model",
        why="the steps of a complete training would fall back to those of its best model",
        mend="jobs.keep_reported_steps",
    ),
    Surface(
        module="transformers.trainer",
        symbol="sort_checkpoints",
        why="the end of a training would remove the checkpoint from which the job goes on",
        mend="jobs.keep_last_checkpoint",
    ),
    Surface(
        module="transformers.training_args",
        symbol="TrainingArguments.__post_init__",
        why="a job on another number of ranks would train with another batch",
        mend="jobs.check_arguments",
    ),
    Surface(
        module="transformers.integrations.deepspeed",
        symbol="HfTrainerDeepSpeedConfig.trainer_config_process",
        why="the JSON and the arguments would name different accumulation steps",
        mend="jobs.follow_in_json",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.save_state",
        why="a killed job would leave half a checkpoint under the name of a whole one",
        mend="jobs.keep_states_whole",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.load_state",
        why="a resume would be reported under another name than the script's",
        mend="jobs.report_loads",
    ),
)
