# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with our checkpoints, on two CPU ranks.

A callback saves model, optimizer, schedule and random number state in the background. Trainer itself writes the weights
for ``from_pretrained`` and its own counters (``save_only_model=True``). A second Trainer resumes in the middle, and at
the end both have the same weights and optimizer, bit for bit. Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training.comparison import compare
from training.two_ranks import on_two_ranks
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, logging

import bytecheckpoint

STEPS = 6
SAVED_AT = 3


class Checkpoints(TrainerCallback):
    """Saves to ``checkpoint-<step>/bytecheckpoint`` whenever Trainer saves, and loads from there to resume.

    Trainer removes old folders before it calls ``on_save``. A ``save_total_limit`` must be 2 or more, so that Trainer
    never removes a folder that is still being saved.

    Args:
        resume_from: The argument of ``Trainer.train(resume_from_checkpoint=...)``. None starts a new run.
    """

    def __init__(self, resume_from: Path | None = None) -> None:
        self.resume_from = resume_from
        self.random_numbers: torch.Tensor | None = None
        self.saving: bytecheckpoint.SaveHandle | None = None

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **of_trainer: Any) -> None:
        self.wait()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "bytecheckpoint"
        self.saving = bytecheckpoint.async_save_state_dict(folder, self.state_of(**of_trainer))

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **of_trainer: Any) -> None:
        if self.resume_from is None:
            return
        loaded = self.state_of(**of_trainer)
        bytecheckpoint.load_state_dict(self.resume_from / "bytecheckpoint", loaded)
        set_state_dict(
            of_trainer["model"],
            of_trainer["optimizer"],
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        of_trainer["lr_scheduler"].load_state_dict(loaded["schedule"])
        self.random_numbers = loaded["random_numbers"][str(dist.get_rank())]

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **of_trainer: Any) -> None:
        if self.random_numbers is not None:  # Trainer has by now skipped the data of earlier steps
            torch.set_rng_state(self.random_numbers)
            self.random_numbers = None

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **of_trainer: Any) -> None:
        self.wait()

    def wait(self) -> None:
        if self.saving is not None:
            self.saving.committed.result()

    @staticmethod
    def state_of(*, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {
            "model": of_model,
            "optimizer": of_optimizer,
            "schedule": lr_scheduler.state_dict(),
            "random_numbers": {str(dist.get_rank()): torch.get_rng_state()},
        }


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
        save_only_model=True,
        logging_strategy="no",
        report_to="none",
        log_level="error",
        disable_tqdm=True,
    )
    callback = Checkpoints(resume_from)
    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
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
        for saved in sorted(folder.glob("*/checkpoint-*/bytecheckpoint")):
            report = bytecheckpoint.verify(saved)
            report.raise_if_damaged()
            print(f"{saved.relative_to(folder)}: {report.num_records} records of {dist.get_world_size()} ranks, whole")
        print(f"resumed at step {SAVED_AT}; at step {STEPS}: {comparison}")


if __name__ == "__main__":
    on_two_ranks(__file__, main)
