"""Train a LoRA or DoRA adapter of a causal model with the Trainer."""

import peft
import torch
import transformers
from datasets import load_dataset

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--dora", action="store_true")
parser.add_argument("--tokens", type=int, nargs="+")
args, more = parser.parse_args_into_dataclasses()

tokenizer = transformers.AutoTokenizer.from_pretrained(more.model)
model = transformers.AutoModelForCausalLM.from_pretrained(more.model)
torch.manual_seed(5)
config = peft.LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "v_proj", "up_proj"],
    use_dora=more.dora,
    trainable_token_indices=more.tokens,
    task_type="CAUSAL_LM",
)
model = peft.get_peft_model(model, config)
data = load_dataset(more.data)
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

trainer.accelerator.wait_for_everyone()
transformers.integrations.deepspeed.unset_hf_deepspeed_config()
again = peft.PeftModel.from_pretrained(
    transformers.AutoModelForCausalLM.from_pretrained(more.model), args.output_dir
)
moved = [value.abs().sum() for name, value in again.named_parameters() if "lora_B" in name]
assert moved
assert all(moved)
