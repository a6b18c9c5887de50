"""Train or fine-tune a small causal language model with a Hugging Face Trainer, by gossip or a baseline.

python tasks/trainer_language.py --config configs/language/pretraining.yaml
python tasks/trainer_language.py --config configs/language/fine_tuning.yaml
"""

from pathlib import Path

from dsgdac_accel import join_slurm_step
from tasks.common.cli_errors import starting_up
from tasks.common.config import parse_config
from tasks.language.config import LanguageConfig
from tasks.language.training import build_trainer, train_language_model


def main() -> None:
    """Read the configuration and train."""
    default = Path(__file__).resolve().parents[1] / "configs" / "language" / "pretraining.yaml"
    with starting_up():
        join_slurm_step()
        config = parse_config(LanguageConfig, default_file=default, description=__doc__)
        trainer = build_trainer(config)
    train_language_model(config, trainer)


if __name__ == "__main__":
    main()
