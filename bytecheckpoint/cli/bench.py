# SPDX-License-Identifier: Apache-2.0
"""``bcp bench``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from bytecheckpoint.checkpoint.journal_files import FOLDER
from bytecheckpoint.checkpoint.step_names import step_paths
from bytecheckpoint.cli.disk_speed import DiskSpeed, measure_disk, save_disk_speed, size_to_measure
from bytecheckpoint.cli.options import Failure, bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import columns, one_line, print_json
from bytecheckpoint.config import Config
from bytecheckpoint.object_store.urls import is_store_url
from bytecheckpoint.report.text import size_text

__all__ = ["command"]

_MIB = 1 << 20


@click.group("bench", no_args_is_help=False)
def command() -> None:
    """Measures what checkpoints depend on.

    \b
    Example:
      bcp bench disk run
    """


@command.command("disk")
@checkpoint_argument("path")
@click.option(
    "--size", "size_mib", type=click.IntRange(8), metavar="MIB", help="MiB of a file.  [1024, or what a quarter allows]"
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often to measure each.")
@click.option(
    "--save/--no-save",
    "is_saved",
    default=None,
    help="Keep the result as PATH/.bcp/disk.json, with which reports compare.  [if PATH has a folder .bcp; else in the "
    "newest step, if it has one]",
)
@json_option
@progress_option
def disk(path: str, size_mib: int | None, rounds: int, is_saved: bool | None, as_json: bool, progress: bool) -> None:
    """Measures the file system of PATH: sequential writes and reads, both at once, and syncs.

    PATH is a run folder, or any folder. Requests are of 8 MiB, past the page cache where the file system allows that,
    by as many threads as a save has. Writes are synced. Two files of --size are written at most, a quarter of what is
    free each; they have no names, and are gone even if the process is killed. On a shared file system this is what one
    host gets at this moment, and others notice it.

    \b
    Example:
      bcp bench disk run --size 4096
    """
    if is_store_url(path):
        raise Failure(f"{path} is in an object store: this measures file systems")
    folder = Path(path)
    if not folder.is_dir():
        raise Failure(f"{path} is not a folder: pass one in the file system to measure")
    config = Config.from_env()
    num_bytes = size_to_measure(folder, None if size_mib is None else size_mib * _MIB)
    with bar("measuring", progress) as tell:
        speed = measure_disk(folder, num_bytes, config=config, rounds=rounds, progress=tell)
    place = folder if is_saved else _place_of_result(folder) if is_saved is None else None
    saved = None if place is None else save_disk_speed(speed, place)
    if as_json:
        print_json({**speed.to_dict(), "saved": None if saved is None else os.fspath(saved)})
        return
    for line in _lines(path, speed):
        click.echo(line)
    if saved is not None:
        click.echo(f"saved as {one_line(str(saved))}")


def _place_of_result(folder: Path) -> Path | None:
    """Returns the run or the step whose ``.bcp`` keeps the result if nobody asks: nothing is made between steps."""
    if (folder / FOLDER).is_dir():
        return folder
    steps = step_paths(folder)
    return Path(steps[-1][1]) if steps else None


def _lines(path: str, speed: DiskSpeed) -> Iterator[str]:
    rows = [
        ("write and sync", f"{speed.write_gb_per_s:.2f} GB/s"),
        ("read", f"{speed.read_gb_per_s:.2f} GB/s"),
        ("both at once", f"{speed.both_gb_per_s:.2f} GB/s together"),
        ("sync of 4 KiB", f"{speed.fsync_s * 1e3:.2f} ms"),
    ]
    yield from columns(rows)
    how = "direct I/O" if speed.direct_io else "through the page cache: the file system refuses direct I/O"
    threads = f"{speed.num_threads} thread{'s' if speed.num_threads > 1 else ''}"
    yield f"{one_line(path)}: files of {size_text(speed.num_bytes)}, {threads}, median of {speed.rounds}; {how}"
