# SPDX-License-Identifier: Apache-2.0
"""``bcp merge``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from bytecheckpoint.cli.options import Failure, bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.report.text import size_text

__all__ = ["command"]

_WRITTEN = (".pt", ".safetensors", ".safetensors.index.json")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.command("merge")
@checkpoint_argument("step")
@click.argument("folder", type=click.Path())
@click.option("--safetensors", is_flag=True, help="Write the model as safetensors instead of model.pt.")
@click.option("--model-only", is_flag=True, help="Leave the optimizer out.")
@click.option("--optimizer-only", is_flag=True, help="Leave the model out.")
@click.option("--untie", is_flag=True, help="Give each name of a tied parameter a tensor of its own.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Dtype for floating-point tensors of the model.")
@click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most bytes of a file of these.")
@json_option
@progress_option
def command(
    step: str,
    folder: str,
    safetensors: bool,
    model_only: bool,
    optimizer_only: bool,
    untie: bool,
    dtype: str | None,
    shard_size: str,
    as_json: bool,
    progress: bool,
) -> None:
    """Merges a step that bytecheckpoint.save saved into model.pt and optimizer.pt.

    STEP is the folder of a step. FOLDER is made if it is not there; files of these names in it are replaced. Memory
    does not grow with the checkpoint.

    \b
    Example:
      bcp merge run/global_step_100 merged --safetensors --model-only
    """
    import torch

    from bytecheckpoint.training_state.merging import bytecheckpoint_ckpt_to_pytorch_ckpt

    if model_only and optimizer_only:
        raise Failure("--model-only and --optimizer-only: pass one of them")
    before = _files_in(folder)
    with bar("merging", progress) as tell:
        bytecheckpoint_ckpt_to_pytorch_ckpt(
            step,
            folder,
            model_only=model_only,
            optimizer_only=optimizer_only,
            safetensors_format=safetensors,
            untie_embeddings=untie,
            dtype=None if dtype is None else getattr(torch, dtype),
            max_shard_size=shard_size,
            config=Config.from_env(),
            progress=tell,
        )
    # A file that was replaced has another inode: the old one was there while the new one was written.
    files = {
        name: status.st_size for name, status in _files_in(folder).items() if not _is_same(status, before.get(name))
    }
    if as_json:
        print_json({"folder": folder, "files": files})
    else:
        click.echo(one_line(f"{folder}: " + ", ".join(f"{name} {size_text(size)}" for name, size in files.items())))


def _files_in(folder: str) -> dict[str, os.stat_result]:
    """Returns the files of a folder that a merge may have written, by name; none if there is no folder."""
    path = Path(folder)
    there = sorted(path.iterdir()) if path.is_dir() else []
    return {each.name: each.lstat() for each in there if each.name.endswith(_WRITTEN)}


def _is_same(status: os.stat_result, before: os.stat_result | None) -> bool:
    """Whether a file is the one that was there before."""
    facts = ("st_ino", "st_mtime_ns", "st_size")
    return before is not None and all(getattr(status, name) == getattr(before, name) for name in facts)
