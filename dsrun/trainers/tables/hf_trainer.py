"""Scripts on HF's Trainer: `python train.py --model_name_or_path ... --per_device_train_batch_size 4`.

Their own arguments are often those of transformers' examples or of TRL; their defaults are TrainingArguments' alone.
"""

from __future__ import annotations

from dataclasses import replace

from dsrun.trainers.tables import trl

TRAINER = replace(
    trl.TRAINER,
    name="transformers",
    title="HF Trainer",
    telling=(
        "per_device_train_batch_size",
        "num_train_epochs",
        "model_name_or_path",
        "learning_rate",
        "output_dir",
    ),
    starts=(),
)
