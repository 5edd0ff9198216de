"""Train a causal language model with the Trainer, as its examples do."""

import datasets
import transformers

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
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
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
