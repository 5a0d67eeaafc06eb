# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with our checkpoints, on two CPU ranks.

``CheckpointCallback`` saves model, optimizer, schedule and random numbers in the background. Trainer itself writes the
weights for ``from_pretrained`` and its own counters. A second Trainer resumes in the middle, and at the end both have
the same weights and optimizer, bit for bit. Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from training.comparison import compare
from training.two_ranks import on_two_ranks
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, logging

import bytecheckpoint
from bytecheckpoint.integrations.transformers import CheckpointCallback

STEPS = 6
SAVED_AT = 3


def train(folder: Path, seed: int, resume_from: Path | None = None) -> dict[str, Any]:
    """Returns the state at the end."""
    torch.manual_seed(seed)
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=64, n_layer=2, n_head=2, **tokens))
    rows = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_steps=SAVED_AT,
        logging_strategy="no",
        report_to="none",
        log_level="error",
        disable_tqdm=True,
    )
    checkpoints = CheckpointCallback()
    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[checkpoints]
    )
    # To go on with the newest: trainer.train(resume_from_checkpoint=checkpoints.latest(folder))
    checkpoints.resume_from = None if resume_from is None else str(resume_from)
    trainer.train(resume_from_checkpoint=checkpoints.resume_from)
    of_model, of_optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    whole = train(folder / "whole", seed=0)
    # The other weights make sure that values that are equal at the end came from the checkpoint.
    resumed = train(folder / "resumed", seed=1, resume_from=folder / "whole" / f"checkpoint-{SAVED_AT}")
    comparison = compare(whole, resumed)
    assert comparison.equal, comparison
    if dist.get_rank() == 0:
        for saved in sorted(folder.glob("*/checkpoint-*")):
            report = bytecheckpoint.verify(saved)
            report.raise_if_damaged()
            print(f"{saved.relative_to(folder)}: {report.num_records} records of {dist.get_world_size()} ranks, whole")
        print(f"resumed at step {SAVED_AT}; at step {STEPS}: {comparison}")


if __name__ == "__main__":
    on_two_ranks(__file__, main)
