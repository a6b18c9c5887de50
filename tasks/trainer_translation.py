"""Train an English-German translator with a Hugging Face Seq2SeqTrainer, whose workers gossip by one callback.

It trains on the sentences of a small grammar, from scratch, or with --model FOLDER from a saved encoder-decoder:

accelerate launch --config_file configs/accelerate/cpu_4_workers.yaml tasks/trainer_translation.py
"""

from argparse import ArgumentParser

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from dsgdac_accel import GossipCallback, GossipConfig, join_slurm_step
from tasks.translation.config import ModelConfig
from tasks.translation.grammar import grammar_splits
from tasks.translation.model import build_model
from tasks.translation.scores import compute_metrics, decode_ids
from tasks.translation.tokenizer import END, PAD, train_tokenizer


def main() -> None:
    """Train or fine-tune, save the deployed model and translate the test split with it."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a saved encoder-decoder and its tokenizer; default: from scratch")
    parser.add_argument("--output_dir", default="runs/trainer_translation")
    parser.add_argument("--num_train_epochs", type=int, default=6)
    options = parser.parse_args()
    join_slurm_step()

    torch.manual_seed(0)
    splits = grammar_splits()
    if options.model:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(options.model)  # type: ignore[assignment]
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    else:
        vocabulary = train_tokenizer((text for pair in splits["train"] for text in pair), vocab_size=1000)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token=PAD, eos_token=END)
        model = build_model(ModelConfig(size="small"), len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    model.generation_config.update(max_length=64, max_new_tokens=None)
    tokens = {}
    for name, pairs in splits.items():
        english, german = map(list, zip(*pairs, strict=True))
        tokens[name] = Dataset.from_dict(dict(tokenizer(english, text_target=german)))
    args = Seq2SeqTrainingArguments(
        options.output_dir,
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=2e-3 if options.model else 5e-3,
        warmup_steps=40,
        predict_with_generate=True,
        generation_num_beams=1,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Seq2SeqTrainer(
        model,
        args,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=tokens["train"],
        eval_dataset=tokens["validation"],
        processing_class=tokenizer,
        compute_metrics=compute_metrics(tokenizer),
        callbacks=[GossipCallback(GossipConfig(power=2, start_epoch=1), stop_on_signals=True)],
    )
    trainer.train(resume_from_checkpoint="auto")  # resumes a run that was stopped
    trainer.save_model(f"{options.output_dir}/deployed")
    test = trainer.predict(tokens["test"])
    if trainer.is_world_process_zero():
        found = decode_ids(tokenizer, test.predictions[:3])
        for (source, reference), translation in zip(splits["test"], found, strict=False):
            print(f"  {source}\n    -> {translation}\n    reference: {reference}")
    trainer.log_metrics("test", test.metrics)


if __name__ == "__main__":
    main()
