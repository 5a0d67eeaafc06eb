# SPDX-License-Identifier: Apache-2.0
"""``bcp convert``."""

from __future__ import annotations

import dataclasses

import click

from bytecheckpoint.cli.options import bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.specs import spec_of, spec_options
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config

__all__ = ["command"]


@click.command("convert")
@checkpoint_argument("source")
@click.argument("target", type=click.Path())
@click.option("--to", type=click.Choice(["safetensors"]), default="safetensors", show_default=True, help="Format.")
@spec_options
@click.option("--dtype", metavar="DTYPE", help="Dtype for floating-point tensors, such as bfloat16.")
@click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most bytes of one file.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes that write files."
)
@click.option("--resume", is_flag=True, help="Go on with a conversion to TARGET that was interrupted.")
@click.option("--verify", is_flag=True, help="Read back what was written, and compare it.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@json_option
@progress_option
def command(
    source: str,
    target: str,
    to: str,
    spec_file: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    dtype: str | None,
    shard_size: str,
    workers: int,
    resume: bool,
    verify: bool,
    dry_run: bool,
    as_json: bool,
    progress: bool,
) -> None:
    """Converts a checkpoint to safetensors, as Hugging Face's from_pretrained reads them.

    SOURCE is a checkpoint of bytecheckpoint or of stock DCP, however it is sharded, or safetensors. TARGET is a folder
    that does not exist yet; it appears when everything is written. Memory does not grow with the checkpoint.

    \b
    Example:
      bcp convert run/step_100/model model-hf --dtype bfloat16 --verify
      bcp convert ckpt model-hf --include model --rename model=
    """
    from bytecheckpoint.convert.safetensors import convert

    with bar("converting", progress) as tell:
        report = convert(
            source,
            target,
            spec=spec_of(spec_file, include, exclude, rename),
            dtype=dtype,
            shard_size=shard_size,
            workers=workers,
            resume=resume,
            verify=verify,
            dry_run=dry_run,
            config=Config.from_env(),
            progress=tell,
        )
    if as_json:
        print_json({**dataclasses.asdict(report), "dry_run": dry_run})
    else:
        click.echo(one_line(("would write " if dry_run else "") + report.summary()))
