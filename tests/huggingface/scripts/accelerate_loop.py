"""Train with a loop of one's own over Accelerate, whose plugin holds a DeepSpeed JSON."""

import argparse
from pathlib import Path

import datasets
import torch
import transformers
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--deepspeed")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--resume_from_checkpoint", type=Path)
args = parser.parse_args()

plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed) if args.deepspeed else None
accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
set_seed(1)
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
model = transformers.AutoModelForSequenceClassification.from_pretrained(args.model)
rows = datasets.load_dataset(args.data).map(lambda row: {**tokenizer(row["text"]), "labels": row["label"]})
rows = rows.remove_columns(["text", "label"])


def loader(split: str, **options):
    collate = transformers.DataCollatorWithPadding(tokenizer)
    return torch.utils.data.DataLoader(rows[split], batch_size=2, collate_fn=collate, **options)


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, 3, 100)
model, optimizer, train, test, schedule = accelerator.prepare(
    model, optimizer, loader("train", shuffle=True), loader("test"), schedule
)
done = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    done = int(args.resume_from_checkpoint.name.removeprefix("step_"))


def batches():
    epoch = 0
    while True:
        train.set_epoch(epoch)
        yield from train
        epoch += 1


taken = batches()
for _ in range(2 * done):
    next(taken)
model.train()
while done < args.steps:
    batch = next(taken)
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        done += 1
        if done % args.save_steps == 0:
            accelerator.save_state(f"{args.output_dir}/step_{done}")

model.eval()
right = count = 0
for batch in test:
    with torch.no_grad():
        guesses = model(**batch).logits.argmax(-1)
    guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
    right, count = right + int((guesses == labels).sum()), count + len(labels)
accelerator.print("accuracy", right / count, "of", count, "rate", schedule.get_last_lr())
assert count == len(rows["test"])

state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    args.output_dir, is_main_process=accelerator.is_main_process, state_dict=state
)
accelerator.wait_for_everyone()
again = transformers.AutoModelForSequenceClassification.from_pretrained(args.output_dir)
if accelerator.is_main_process:
    assert all(torch.equal(value, state[name].cpu()) for name, value in again.state_dict().items())
accelerator.end_training()
