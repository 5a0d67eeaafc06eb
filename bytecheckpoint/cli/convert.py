# SPDX-License-Identifier: Apache-2.0
"""``bcp convert``, ``bcp extract`` and ``bcp rename``: three ways to call one function."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bytecheckpoint.cli.options import bar, checkpoint_argument, json_option, progress_option, whole_dtype
from bytecheckpoint.cli.specs import rules_of, spec_of, spec_options
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.load_spec.spec import LoadSpec

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["command", "extract", "rename"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FORMATS = ("safetensors", "bcp", "dcp", "torch")


def _to_option(default: str) -> Callable[[_Function], _Function]:
    return click.option(
        "--to",
        type=click.Choice(_FORMATS),
        default=default,
        show_default=True,
        help="Format of TARGET: safetensors, our own, as stock DCP writes it, or a file for torch.load.",
    )


def _conversion_options(function: _Function) -> _Function:
    """Adds what all conversions have in common."""
    for option in reversed(
        [
            click.option(
                "--dtype",
                metavar="DTYPE",
                callback=whole_dtype,
                help="Dtype for floating-point tensors, such as bfloat16, or bf16.",
            ),
            click.option(
                "--hf-config",
                metavar="DIR",
                type=click.Path(),
                help="Folder of a model of Hugging Face, to copy config (with the new dtype) and tokenizer from.",
            ),
            click.option(
                "--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most bytes of one file."
            ),
            click.option(
                "--workers",
                type=click.IntRange(1, 256),
                default=1,
                show_default=True,
                help="Processes that write files.",
            ),
            click.option("--resume", is_flag=True, help="Go on with a conversion to TARGET that was interrupted."),
            click.option("--verify", is_flag=True, help="Read back what was written, and compare it."),
            click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
            json_option,
            progress_option,
        ]
    ):
        function = option(function)
    return function


@click.command("convert")
@checkpoint_argument("source")
@click.argument("target", type=click.Path())
@_to_option("safetensors")
@spec_options
@_conversion_options
def command(
    source: str,
    target: str,
    spec_file: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    **options: Any,
) -> None:
    """Converts a checkpoint to another format.

    SOURCE is a checkpoint of bytecheckpoint or of stock DCP, however it is sharded, or safetensors. TARGET is a folder
    that does not exist yet; it appears when everything is written. With --to bcp it may be the URL of an object store.
    Memory does not grow with the checkpoint. Hugging Face's from_pretrained reads a TARGET of safetensors that has its
    config, which --hf-config copies from another folder of the same model.

    \b
    Example:
      bcp convert run/step_100/model model-hf --hf-config Llama-3.2-1B --dtype bfloat16 --verify
      bcp convert ckpt model-hf --include model --rename model=
      bcp convert model-hf ckpt --to bcp
      bcp convert s3://bucket/model-hf s3://bucket/ckpt --to bcp
      torchrun --nproc-per-node 8 -m bytecheckpoint convert ckpt model-hf
    """
    _convert(source, target, spec_of(spec_file, include, exclude, rename), **options)


@click.command("extract")
@checkpoint_argument("source")
@click.argument("target", type=click.Path())
@_to_option("safetensors")
@_conversion_options
def extract(source: str, target: str, **options: Any) -> None:
    """Takes the model out of a training checkpoint, for inference.

    SOURCE is the folder of a step, or one checkpoint of model, optimizer and the rest, as of torchtitan or OLMo-core.
    The keys are those of the model: a prefix "model." is taken away. With others, use bcp convert --include.

    \b
    Example:
      bcp extract run/global_step_100 model-hf --hf-config Llama-3.2-1B --dtype bfloat16
    """
    from bytecheckpoint.convert.model_keys import model_of

    place, spec = model_of(source, Config.from_env())
    _convert(place, target, spec, **options)


@click.command("rename")
@checkpoint_argument("source")
@click.argument("target", type=click.Path())
@click.argument("rules", nargs=-1, required=True, metavar="PATTERN=NAME...")
@_to_option("bcp")
@_conversion_options
def rename(source: str, target: str, rules: tuple[str, ...], **options: Any) -> None:
    """Writes a checkpoint again under other names of its keys.

    A rule has a pattern and the name that takes its place. The first that matches a key counts; other keys keep their
    names. Nothing is changed in place.

    \b
    Example:
      bcp rename ckpt renamed 'h.{i}.attn=layers.{i}.attention' 'wte=embed'
    """
    _convert(source, target, LoadSpec(rename=rules_of(rules)), **options)


def _convert(
    source: str, target: str, spec: LoadSpec | None, *, as_json: bool, progress: bool, dry_run: bool, **options: Any
) -> None:
    from bytecheckpoint.convert import convert

    with _group_of_torchrun() as group:
        is_first = group is None or group.rank() == 0
        with bar("converting", progress and is_first) as tell:
            report = convert(
                source,
                target,
                spec=spec,
                dry_run=dry_run,
                process_group=group,
                config=Config.from_env(),
                progress=tell,
                **options,
            )
    if not is_first:
        return
    if as_json:
        print_json({**dataclasses.asdict(report), "dry_run": dry_run})
    else:
        click.echo(one_line(("would write " if dry_run else "") + report.summary()))
        for note in report.notes:
            click.echo(f"note: {one_line(note)}")


@contextmanager
def _group_of_torchrun() -> Iterator[dist.ProcessGroup | None]:
    """Makes a group of the processes that torchrun has started; None if it has started none."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    import torch.distributed as dist

    # A rank that ends first closes its connections. Others must hear of that as an error, and not die of SIGPIPE.
    # It stays so, because connections also end behind the group.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    dist.init_process_group("gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
