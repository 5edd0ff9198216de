"""Train with TRL's DPOTrainer, which computes the reference's log probabilities before training."""

import datasets
import transformers
import trl

parser = transformers.HfArgumentParser(trl.DPOConfig)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
args, more = parser.parse_args_into_dataclasses()
args.precompute_ref_log_probs = True

# TRL keeps the log probabilities beside the data, where another run would find them.
data = datasets.load_dataset(more.data, cache_dir="cache")
trainer = trl.DPOTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(more.model),
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=transformers.AutoTokenizer.from_pretrained(more.model),
)
trainer.train()
trainer.evaluate()
