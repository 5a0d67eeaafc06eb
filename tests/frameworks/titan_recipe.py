# SPDX-License-Identifier: Apache-2.0
"""A recipe for torchtitan's own trainer: a small version of its debug model, and data that need no download.

``python titan_recipe.py --module frameworks.titan_recipe --config debug ...`` runs torchtitan's trainer, on the CPU if
there is no GPU. It appends exact losses to the file that TITAN_LOSSES names: rank, step and loss on each line.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.titan import LENGTH, Samples, model_spec, on_cpu

on_cpu()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Tokenizer(BaseTokenizer):
    """Does nothing, because the data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Loader(ParallelAwareDataloader):
    """torchtitan's data loader over our samples."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        super().__init__(
            Samples(dp_rank, dp_world_size, seq_len),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


def debug() -> Trainer.Config:
    spec = model_spec()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=spec,
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=LENGTH,
            steps=6,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Loader.Config(),
        tokenizer=Tokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        activation_checkpoint=None,
    )


def debug_whole() -> Trainer.Config:
    """Returns torchtitan's original debug model, whose attention needs a GPU."""
    from torchtitan.models.llama3 import model_registry

    config = debug()
    config.model_spec = model_registry("debugmodel")
    config.training.seq_len = 256
    return config


def ours_in_the_recipe() -> Trainer.Config:
    from bytecheckpoint.torchtitan import with_bytecheckpoint

    return with_bytecheckpoint(debug(), io_threads=3)


def ours_with_a_spec() -> Trainer.Config:
    from bytecheckpoint import LoadSpec
    from bytecheckpoint.torchtitan import with_bytecheckpoint

    return with_bytecheckpoint(debug(), initial_load_spec=LoadSpec(rename={"net": ""}))


def main() -> None:
    from torchtitan import train

    path = os.environ.get("TITAN_LOSSES")
    if path:
        theirs = MetricsProcessor.log

        def log(self: Any, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            with Path(path).open("a") as file:
                file.write(json.dumps([int(os.environ["RANK"]), step, loss]) + "\n")
            theirs(self, step, loss, *args, **kwargs)

        MetricsProcessor.log = log
    train.main()


def run(rank: int, num_ranks: int, arguments: list[str], variables: dict[str, str]) -> None:
    """Does what ``torchrun titan_recipe.py arguments`` does in each of its processes."""
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OMP_NUM_THREADS="1")
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    main()
