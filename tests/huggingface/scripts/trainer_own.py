"""Train with a Trainer of one's own: model, loss, optimizer with a rate per group, and schedule."""

import datasets
import torch
import transformers

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
args, more = parser.parse_args_into_dataclasses()

tokenizer = transformers.AutoTokenizer.from_pretrained(more.model)
transformers.set_seed(3)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = transformers.BertConfig(vocab_size=96, max_position_embeddings=64, **sizes, **off)
        self.body = transformers.BertModel(self.config)
        self.head = torch.nn.Linear(32, 2)
        self.register_buffer("weights", torch.tensor([1.0, 2.0]))

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None):
        return {"logits": self.head(self.body(input_ids, attention_mask).pooler_output)}


class WeightedTrainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=self.model.weights)
        loss = loss + 1e-2 * self.model.head.weight.pow(2).sum()
        return (loss, outputs) if return_outputs else loss


def tokenize(rows):
    return {**tokenizer(rows["text"], truncation=True, max_length=40), "labels": rows["label"]}


model = Classifier()
groups = [{"params": model.body.parameters(), "lr": 1e-2}, {"params": model.head.parameters(), "lr": 1e-1}]
optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)
data = datasets.load_dataset(more.data).map(tokenize, batched=True, remove_columns=["text", "label"])
trainer = WeightedTrainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.evaluate()
rates = [group["lr"] for group in trainer.optimizer.param_groups]
assert rates == [1e-2 * 0.95**args.max_steps, 1e-1 * 0.95**args.max_steps], rates
