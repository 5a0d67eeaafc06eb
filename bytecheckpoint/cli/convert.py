# SPDX-License-Identifier: Apache-2.0
"""``bcp convert``."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import click

from bytecheckpoint.cli.options import Failure, bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.load_spec.spec import LoadSpec

__all__ = ["command"]


@click.command("convert")
@checkpoint_argument("source")
@click.argument("target", type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["safetensors", "bcp", "dcp", "torch"]),
    default="safetensors",
    show_default=True,
    help="Format of TARGET: safetensors, a checkpoint of ours, one as stock DCP writes it, or a file for torch.load.",
)
@click.option("--spec", "spec_file", type=click.Path(dir_okay=False), help="TOML file with a LoadSpec.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Keys to take; may be repeated. Default: all.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Keys to leave out; may be repeated.")
@click.option("--rename", multiple=True, metavar="PATTERN=NAME", help="New names, as in a LoadSpec; may be repeated.")
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
    """Converts a checkpoint to another format.

    SOURCE is a checkpoint of bytecheckpoint or of stock DCP, however it is sharded, or safetensors. TARGET is a folder
    that does not exist yet; it appears when everything is written. Memory does not grow with the checkpoint.

    \b
    Example:
      bcp convert run/step_100/model model-hf --dtype bfloat16 --verify
      bcp convert ckpt model-hf --include model --rename model=
      bcp convert model-hf ckpt --to bcp
    """
    from bytecheckpoint.convert import convert

    with bar("converting", progress) as tell:
        report = convert(
            source,
            target,
            to=cast(Any, to),
            spec=_spec(spec_file, include, exclude, rename),
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


def _spec(
    file: str | None, include: tuple[str, ...], exclude: tuple[str, ...], rename: tuple[str, ...]
) -> LoadSpec | None:
    if file is not None and (include or exclude or rename):
        raise Failure("--spec: pass a file or --include, --exclude and --rename, not both")
    if file is not None:
        return LoadSpec.from_file(file)
    rules = {}
    for rule in rename:
        pattern, equals, name = rule.partition("=")
        if not equals:
            raise Failure(f"--rename {rule}: must be PATTERN=NAME")
        rules[pattern] = name
    return LoadSpec(include=include, exclude=exclude, rename=rules) if include or exclude or rules else None
