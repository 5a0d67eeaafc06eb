# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning with our checkpoints, on two CPU ranks.

``BcpModelParallelStrategy`` is Lightning's strategy for FSDP2, with saves in the background. A second Trainer resumes
after the first epoch, and at the end both have the same weights and optimizer, bit for bit. Needs
``pip install lightning``.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from training.comparison import compare
from training.job import local_shards
from training.two_ranks import on_two_ranks

import bytecheckpoint
from bytecheckpoint.integrations.lightning import BcpModelParallelStrategy

EPOCHS = 2


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: Path, seed: int, resume_from: Path | None = None) -> dict[str, Any]:
    """Returns this rank's part of the state at the end."""
    torch.manual_seed(seed)
    model = Regression()
    rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BcpModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8)
    trainer.fit(model, loader, ckpt_path=resume_from)
    return local_shards(dict(enumerate(get_state_dict(model, trainer.optimizers[0]))))


def main(folder: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    whole = train(folder / "whole", seed=0)
    # The other weights make sure that values that are equal at the end came from the checkpoint.
    resumed = train(folder / "resumed", seed=1, resume_from=folder / "whole" / "epoch=0-step=4.ckpt")
    comparison = compare(whole, resumed)
    assert comparison.equal, comparison
    if dist.get_rank() == 0:
        for saved in sorted(folder.glob("*/*.ckpt")):
            report = bytecheckpoint.verify(saved)
            report.raise_if_damaged()
            print(f"{saved.relative_to(folder)}: {report.num_records} records in {report.num_files} files, whole")
        print(f"resumed after one epoch; of rank 0 after {EPOCHS}: {comparison}")


if __name__ == "__main__":
    on_two_ranks(__file__, main)
