"""Train an encoder-decoder with the Seq2SeqTrainer, which generates in its evaluations."""

import datasets
import numpy as np
import transformers

parser = transformers.HfArgumentParser(transformers.Seq2SeqTrainingArguments)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
args, more = parser.parse_args_into_dataclasses()
args.predict_with_generate, args.generation_max_length = True, 12

tokenizer = transformers.AutoTokenizer.from_pretrained(more.model)
transformers.set_seed(4)
sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
config = transformers.T5Config(
    vocab_size=96, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, **sizes
)
model = transformers.T5ForConditionalGeneration(config)


def tokenize(rows):
    short = [text[:10] for text in rows["text"]]
    inputs = tokenizer(rows["text"], truncation=True, max_length=24)
    return {**inputs, "labels": tokenizer(text_target=short)["input_ids"]}


def compute_metrics(prediction):
    tokens = np.where(prediction.predictions < 0, tokenizer.pad_token_id, prediction.predictions)
    assert len(tokenizer.batch_decode(tokens, skip_special_tokens=True)) == len(prediction.label_ids)
    return {"tokens": float(tokens.sum())}


data = datasets.load_dataset(more.data).map(tokenize, batched=True, remove_columns=["text"])
trainer = transformers.Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
    compute_metrics=compute_metrics,
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
print("beams", trainer.evaluate(max_length=12, num_beams=2))
trainer.save_model()
