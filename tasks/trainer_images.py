"""Train a ResNet on handwritten digits with a Hugging Face Trainer, whose workers gossip by one callback.

accelerate launch --config_file configs/accelerate/cpu_4_workers.yaml tasks/trainer_images.py
"""

from argparse import ArgumentParser

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from dsgdac_accel import GossipCallback, join_slurm_step


def load_splits() -> tuple[Dataset, Dataset, Dataset]:
    """Load scikit-learn's digits, enlarged to 32 x 32: 1,197 training, 300 validation and 300 test images."""
    images, labels = load_digits(return_X_y=True)
    pixels = np.kron(images.reshape(-1, 1, 8, 8) / 8 - 1, np.ones((4, 4))).astype(np.float32)
    digits = Dataset.from_dict({"pixel_values": list(pixels), "labels": labels}).with_format("torch")
    rest, test = digits.train_test_split(300, seed=0).values()
    train, validation = rest.train_test_split(300, seed=0).values()
    return train, validation, test


def accuracy(evaluated) -> dict[str, float]:
    """Share of images whose most probable class is the right one."""
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def main() -> None:
    """Train, keep the best deployed model, save it and test it."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="runs/trainer_images")
    parser.add_argument("--num_train_epochs", type=int, default=8)
    options = parser.parse_args()
    join_slurm_step()

    torch.manual_seed(0)
    train, validation, test = load_splits()
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1] * 3, layer_type="basic"
    )
    config.num_labels = 10
    args = TrainingArguments(
        options.output_dir,
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="tensorboard",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        ResNetForImageClassification(config),
        args,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=accuracy,
        callbacks=[GossipCallback(stop_on_signals=True)],
    )
    trainer.train(resume_from_checkpoint="auto")  # resumes a run that was stopped
    trainer.save_model(f"{options.output_dir}/deployed")
    trainer.log_metrics("test", trainer.predict(test).metrics)


if __name__ == "__main__":
    main()
