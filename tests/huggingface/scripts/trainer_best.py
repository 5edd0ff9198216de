"""Train a classifier with the Trainer: metrics, the best model at the end, and few checkpoints."""

import os

import datasets
import transformers

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
args, more = parser.parse_args_into_dataclasses()
args.load_best_model_at_end, args.metric_for_best_model = True, "eval_loss"
args.save_total_limit, args.eval_steps, args.save_steps = 2, 4, 4

tokenizer = transformers.AutoTokenizer.from_pretrained(more.model)
model = transformers.AutoModelForCausalLM.from_pretrained(more.model)
rows = datasets.load_dataset(more.data)
rows = rows.map(lambda batch: tokenizer(batch["text"], truncation=True, max_length=48), batched=True)


def compute_metrics(prediction):
    labels = prediction.label_ids[:, 1:]
    right = prediction.predictions.argmax(-1)[:, :-1] == labels
    return {"accuracy": float(right[labels != -100].mean())}


trainer = transformers.Trainer(
    model=model,
    args=args,
    train_dataset=rows["train"],
    eval_dataset=rows["test"],
    processing_class=tokenizer,
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    compute_metrics=compute_metrics,
    callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=10)],
)
trainer.train()
best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
assert abs(trainer.state.best_metric - best) < 1e-9
assert abs(trainer.evaluate()["eval_loss"] - best) < 1e-6, "the best model was not loaded"
kept = sorted(name for name in os.listdir(args.output_dir) if name.startswith("checkpoint-"))
assert len(kept) <= 2, kept
print("predictions", trainer.predict(rows["test"]).metrics["test_accuracy"])
