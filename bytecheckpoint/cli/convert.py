# SPDX-License-Identifier: Apache-2.0
"""``bcp convert``."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from bytecheckpoint.cli.options import Failure, bar, checkpoint_argument, json_option, progress_option, whole_dtype
from bytecheckpoint.cli.specs import spec_of, spec_options
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.report.text import size_text

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["command"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FORMATS = ("safetensors", "bcp", "dcp", "torch")


def _weights(ctx: click.Context, param: click.Parameter, value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(each) for each in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value}: must be numbers with commas, such as 0.5,0.25,0.25") from None


def _conversion_options(function: _Function) -> _Function:
    """Adds what the conversion itself takes."""
    for option in reversed(
        [
            click.option(
                "--dtype",
                metavar="DTYPE",
                callback=whole_dtype,
                help="Dtype for floating-point tensors, such as bfloat16, or bf16.",
            ),
            click.option(
                "--average",
                metavar="PATH",
                multiple=True,
                help="Write the average of SOURCE and this checkpoint of the same tensors; may be repeated.",
            ),
            click.option(
                "--weights", metavar="W,W...", callback=_weights, help="Weights for --average, that of SOURCE first."
            ),
            click.option("--adapter", metavar="PATH", help="Add a LoRA adapter of peft to SOURCE, which is its base."),
            click.option(
                "--lora-alpha", type=float, metavar="X", help="lora_alpha of an adapter without adapter_config.json."
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
@click.option(
    "--to",
    type=click.Choice(_FORMATS),
    default="safetensors",
    show_default=True,
    help="Format of TARGET: safetensors, our own, as stock DCP writes it, or a file for torch.load.",
)
@spec_options
@click.option("--model-only", is_flag=True, help="Take the model alone, under its own names.")
@click.option("--optimizer-only", is_flag=True, help="Of a step, --to torch: leave the model out.")
@click.option("--untie", is_flag=True, help="Of a step, --to torch: one tensor for each name of a tied weight.")
@_conversion_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: str,
    target: str,
    spec_file: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    model_only: bool,
    optimizer_only: bool,
    untie: bool,
    **options: Any,
) -> None:
    """Converts a checkpoint to another format.

    SOURCE is a checkpoint of bytecheckpoint or of stock DCP, however it is sharded, or safetensors. TARGET is a folder
    that does not exist yet; it appears when everything is written. With --to bcp it may be the URL of an object store.
    Memory does not grow with the checkpoint. Hugging Face's from_pretrained reads a TARGET of safetensors that has its
    config, which --hf-config copies from another folder of the same model.

    With --model-only, SOURCE is a training checkpoint: the folder of a step, or one checkpoint of model, optimizer and
    the rest, as of torchtitan or OLMo-core. A prefix "model." of its keys is taken away. The folder of a step --to
    torch becomes a folder with model.pt and optimizer.pt, as torch's own state dicts.

    \b
    Example:
      bcp convert run/step_100 model-hf --model-only --hf-config Llama-3.2-1B --dtype bfloat16 --verify
      bcp convert run/global_step_100 files --to torch
      bcp convert ckpt renamed --to bcp --rename 'h.{i}.attn=layers.{i}.attention' --rename wte=embed
      bcp convert base-hf merged --adapter run/adapter --dtype bfloat16
      bcp convert run/step_100 mean --model-only --average run/step_200 --average run/step_300
      bcp convert model-hf ckpt --to bcp
      bcp convert s3://bucket/model-hf s3://bucket/ckpt --to bcp
      torchrun --nproc-per-node 8 -m bytecheckpoint convert ckpt model-hf
    """
    from bytecheckpoint.convert.model_keys import is_step_of_parts, model_of

    spec = spec_of(spec_file, include, exclude, rename)
    if spec is not None and (model_only or optimizer_only):
        raise Failure("--model-only, --optimizer-only: not beside a spec, --include, --exclude or --rename")
    if options["to"] == "torch" and spec is None and is_step_of_parts(source, Config.from_env()):
        _convert_step(ctx, source, target, model_only, optimizer_only, untie)
        return
    if optimizer_only or untie:
        raise Failure("--optimizer-only, --untie: only for a step that bytecheckpoint.save saved, with --to torch")
    if model_only:
        source, spec = model_of(source, Config.from_env())
        options["average"] = [model_of(each, Config.from_env())[0] for each in options["average"]]
    _convert(source, target, spec, **options)


# What has no effect on a step that becomes files of torch.
_NOT_FOR_STEPS = (
    *("average", "weights", "adapter", "lora_alpha"),
    *("hf_config", "shard_size", "workers", "resume", "verify", "dry_run"),
)


def _convert_step(
    ctx: click.Context, step: str, target: str, model_only: bool, optimizer_only: bool, untie: bool
) -> None:
    """Makes ``model.pt`` and ``optimizer.pt`` of the parts of a step."""
    import torch

    from bytecheckpoint.convert.local_destination import whole_folder
    from bytecheckpoint.storage.paths import local_path
    from bytecheckpoint.training_state.merging import bytecheckpoint_ckpt_to_pytorch_ckpt

    if model_only and optimizer_only:
        raise Failure("--model-only and --optimizer-only: pass one of them")
    for name in _NOT_FOR_STEPS:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise Failure(
                f"--{name.replace('_', '-')}: not for a step --to torch; convert its parts one by one, as {step}/model"
            )
    options = ctx.params
    place = local_path(target)
    with bar("converting", options["progress"]) as tell, whole_folder(place, f"torch files of {step}") as folder:
        bytecheckpoint_ckpt_to_pytorch_ckpt(
            step,
            folder,
            model_only=model_only,
            optimizer_only=optimizer_only,
            untie_embeddings=untie,
            dtype=None if options["dtype"] is None else getattr(torch, options["dtype"]),
            config=Config.from_env(),
            progress=tell,
        )
    files = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    if options["as_json"]:
        print_json({"source": step, "target": target, "format": "torch", "files": files})
    else:
        click.echo(one_line(f"{target}: " + ", ".join(f"{name} {size_text(size)}" for name, size in files.items())))


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
