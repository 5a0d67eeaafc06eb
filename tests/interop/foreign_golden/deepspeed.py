# SPDX-License-Identifier: Apache-2.0
"""Writes run folders of DeepSpeed, ZeRO 1 to 3 and universal ones, into ``FOLDER/deepspeed-VERSION``.

    python3.12 -m venv /tmp/env && DS_BUILD_OPS=0 /tmp/env/bin/pip install deepspeed==0.19.8 torch==2.13.0 numpy
    cd tests && /tmp/env/bin/python -m interop.foreign_golden.deepspeed FOLDER

Two ranks write each of ``zeroSTAGE-fp32`` and ``zeroSTAGE-bf16``. The model has two groups of parameters, sizes that 2
does not divide, tied weights, a frozen parameter, one without a gradient, and buffers. ``zero3-bf16`` has small
subgroups, so that a rank has several flat tensors. ``zero2-fp32`` and ``zero3-fp32`` have a universal checkpoint, too,
and the former alone keeps ``zero_to_fp32.py`` and ``zero_to_torch.py``, which DeepSpeed puts into all of them.

``expected.pt`` has ``model.NAME``, which is what ``zero_to_fp32.py`` makes of it (buffers and frozen parameters keep
their dtype, and ZeRO-1 has no frozen ones), and ``optim.NAME.KEY``, the moments, as ``safe_get_full_optimizer_state``
gathers them from the engine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist

from interop.foreign_golden.names import check_names
from interop.foreign_golden.ranks import run, write_expected

KINDS = [f"zero{stage}-{dtype}" for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
UNIVERSAL = ("zero2-fp32", "zero3-fp32")
STEP = 3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 5)
        self.frozen = torch.nn.Linear(5, 5, bias=False)
        self.norm = torch.nn.LayerNorm(5)
        self.middle = torch.nn.Linear(5, 5)
        self.unused = torch.nn.Parameter(torch.zeros(3))
        self.scale = torch.nn.Parameter(torch.tensor([2.0]))
        self.head = torch.nn.Linear(5, 11, bias=True)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.tensor([0.5, 1.5, 2.5]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(tokens))
        return self.head(self.middle(self.norm(hidden)) * self.scale).float().square().mean()


def network() -> Net:
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 8).round() / 8)
    return model


def engine_of(kind: str) -> Any:
    import deepspeed

    model = network()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for _, parameter in named if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75), foreach=False)
    zero: dict[str, Any] = {"stage": int(kind[4])}
    if kind == "zero3-bf16":
        zero["sub_group_size"] = 16
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": kind.endswith("bf16")},
    }
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    return engine


def save(kind: str, root: str) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    engine = engine_of(kind)
    for step in range(STEP):
        engine.backward(engine(torch.arange(8) % (5 + step + dist.get_rank())))
        engine.step()
    folder = Path(root, kind)
    engine.save_checkpoint(str(folder / "run"), tag=f"global_step{STEP}", client_state={"epoch": 2, "name": "golden"})
    moments = _moments(engine)
    dist.barrier()
    if dist.get_rank() == 0:
        _finish(kind, folder, moments)


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    """Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # they are linked before AdamW makes any
        engine.optimizer._lazy_init_hp_params_optimizer_state()

    found = {}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(parameter, key) if parameter.requires_grad else None
            if value is not None:
                found[f"optim.{name}.{key}"] = value
    return found


def _finish(kind: str, folder: Path, moments: dict[str, torch.Tensor]) -> None:
    from deepspeed.checkpoint.ds_to_universal import main as make_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    tensors = get_fp32_state_dict_from_zero_checkpoint(str(folder / "run"))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write_expected(folder, {**{f"model.{name}": tensor for name, tensor in tensors.items()}, **moments}, shapes)
    if kind in UNIVERSAL:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        make_universal(
            argparse.Namespace(
                input_folder=str(folder / "run" / f"global_step{STEP}"),
                output_folder=str(folder / "run" / f"global_step{STEP}_universal"),
                inject_missing_state=True,
                **options,
            )
        )
    if kind != "zero2-fp32":
        for script in (folder / "run").glob("*.py"):
            script.unlink()


def main() -> None:
    from importlib.metadata import version

    root = Path(sys.argv[1]).absolute()
    os.chdir(root)
    for kind in sys.argv[2:] or KINDS:
        run(2, save, kind, f"deepspeed-{version('deepspeed')}")
    check_names(root)


if __name__ == "__main__":
    main()
