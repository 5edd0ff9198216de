"""Fine-tune with TRL's SFTTrainer as its users write it."""

import argparse

import datasets
import peft
import torch
import transformers
import trl

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--lora", action="store_true")
given = parser.parse_args()

torch.set_num_threads(1)
transformers.set_seed(3)
rows = datasets.load_dataset("json", data_files=given.data, split="train")
parts = rows.train_test_split(test_size=0.25, seed=3)
trainer = trl.SFTTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
    args=trl.SFTConfig(
        output_dir="out",
        max_steps=8,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        max_length=64,
        gradient_checkpointing=False,
        bf16=False,
        seed=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    processing_class=transformers.AutoTokenizer.from_pretrained(given.model),
    peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if given.lora
    else None,
)
trainer.train()
