"""Evaluate, predict and train in any order with one Trainer, as notebooks do."""

import datasets
import transformers

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--order", nargs="+", required=True)
args, more = parser.parse_args_into_dataclasses()

tokenizer = transformers.AutoTokenizer.from_pretrained(more.model)
model = transformers.AutoModelForCausalLM.from_pretrained(more.model)
data = datasets.load_dataset(more.data)
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=48), batched=True)
trainer = transformers.Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
for step in more.order:
    if step == "predict":
        trainer.log({"eval_loss": trainer.predict(data["test"]).metrics["test_loss"]})
    elif step.isdigit():
        trainer.args.max_steps = int(step)
    else:
        getattr(trainer, step)()
