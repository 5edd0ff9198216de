"""Train an adapter of a causal model with the Trainer, by a method of PEFT."""

import peft
import torch
import transformers
from datasets import load_dataset

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--method", default="lora")
parser.add_argument("--tokens", type=int, nargs="+")
args, more = parser.parse_args_into_dataclasses()

tokenizer = transformers.AutoTokenizer.from_pretrained(more.model)
model = transformers.AutoModelForCausalLM.from_pretrained(more.model)
torch.manual_seed(5)
layers = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
tokens = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
lora = {"r": 4, "lora_alpha": 8, "trainable_token_indices": more.tokens, **layers}
config = {
    "lora": lambda: peft.LoraConfig(**lora),
    "dora": lambda: peft.LoraConfig(use_dora=True, **lora),
    "parameters": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["up_proj.weight"], task_type="CAUSAL_LM"
    ),
    "ia3": lambda: peft.IA3Config(feedforward_modules=["up_proj"], **layers),
    "vera": lambda: peft.VeraConfig(r=8, **(layers | {"target_modules": ["q_proj", "o_proj"]})),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=8, **layers),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, **layers),
    "ln": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(**tokens),
    "prefix": lambda: peft.PrefixTuningConfig(**tokens),
}[more.method]()
model = peft.get_peft_model(model, config)
start = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
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
for name, value in peft.get_peft_model_state_dict(again).items():
    is_projection = "vera_A" in name or "vera_B" in name
    assert is_projection == torch.equal(value, start[name]), name
