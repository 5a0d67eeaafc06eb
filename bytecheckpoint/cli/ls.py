# SPDX-License-Identifier: Apache-2.0
"""``bcp ls``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

from bytecheckpoint.cli.options import checkpoint_argument, json_option
from bytecheckpoint.cli.published import lines_of, names_in, published_in
from bytecheckpoint.cli.text import box_text, columns, counted, one_line, print_json, short_name
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Chunk, Contents, Item, open_contents, place_text
from bytecheckpoint.load_spec.patterns import matches
from bytecheckpoint.native import _core

__all__ = ["command"]


@click.command("ls")
@checkpoint_argument("path")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--shards", is_flag=True, help="Also print where each chunk is: its box, its file and its offset there.")
@click.option(
    "--sort",
    type=click.Choice(["name", "size"]),
    default="name",
    help="What to sort by. With size, the largest comes first.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, path: str, patterns: tuple[str, ...], shards: bool, sort: str, reverse: bool, as_json: bool
) -> None:
    """Lists tensors and objects: name, dtype, shape, bytes, number of shards.

    PATH is a checkpoint of bytecheckpoint or of stock DCP, or a step folder of bytecheckpoint.save, all parts of which
    are listed; or a place of a Publisher, whose bases and deltas are listed. Only the metadata are read. A PATTERN
    means what it means in a LoadSpec and in bcp convert --include: 'model' takes all below model, 'layers.{i}.w' has
    one part of a name in braces, '*.bias' any text, and 're:...' is a regular expression for whole names. Ends with 1
    if a PATTERN matches nothing.

    \b
    Example:
      bcp ls ckpt optim --sort size
      bcp ls ckpt 'model.layers.{i}.*.bias'
    """
    published = names_in(path) if not patterns else []
    if published:
        every = published_in(path, published)
        if as_json:
            print_json({"path": path, "published": [dataclasses.asdict(each) for each in every]})
        else:
            click.echo("\n".join(lines_of(every)))
        return
    contents = open_contents(path, config=Config.from_env(), with_chunks=shards, kind=_core.Checkpoint)
    everything = list(contents.items)
    items = [item for item in everything if not patterns or any(matches(pattern, item.name) for pattern in patterns)]
    in_vain = [pattern for pattern in patterns if not any(matches(pattern, item.name) for item in everything)]
    if sort == "size":
        items.sort(key=lambda item: -item.num_bytes)
    if reverse:
        items.reverse()
    if as_json:
        print_json(_as_json(contents, items))
    else:
        for line in _lines(contents, items):
            click.echo(line)
    for pattern in in_vain:
        click.echo(f"bcp: no name in {one_line(path)} matches '{one_line(pattern)}'", err=True)
    ctx.exit(1 if in_vain else 0)


def _totals(items: Sequence[Item]) -> dict[str, int]:
    return {
        "tensors": sum(item.dtype is not None for item in items),
        "objects": sum(item.dtype is None for item in items),
        "bytes": sum(item.num_bytes for item in items),
        "shards": sum(item.num_chunks for item in items),
    }


def _as_json(contents: Contents, items: Sequence[Item]) -> dict[str, Any]:
    return {
        "path": contents.path,
        "format": contents.format,
        "save_ids": contents.save_ids,
        "files": contents.num_files,
        "items": [_item_as_json(item) for item in items],
        "totals": _totals(items),
    }


def _item_as_json(item: Item) -> dict[str, Any]:
    out = {**item.to_dict(), "shards": item.num_chunks}
    if item.chunks is not None:
        out["chunks"] = [chunk.to_dict() for chunk in item.chunks]
    return out


def _lines(contents: Contents, items: Sequence[Item]) -> Iterator[str]:
    rows = [("NAME", "DTYPE", "SHAPE", "BYTES", "SHARDS")]
    for item in items:
        shape = "" if item.dtype is None else str(list(item.shape))
        name = place_text(item.component, item.rank) + short_name(item.name)
        shards = f"{item.num_chunks:,}{' (partial)' if item.is_partial else ''}"
        rows.append((name, item.dtype or "object", shape, f"{item.num_bytes:,}", shards))
    header, *lines = columns(rows, right=frozenset({3, 4}))
    yield header
    for line, item in zip(lines, items, strict=True):
        yield line
        yield from ("    " + _place(chunk) for chunk in item.chunks or ())
    totals = _totals(items)
    files = counted(contents.num_files, "file")
    writers = {"bytecheckpoint": "bytecheckpoint", "dcp": "stock DCP"}
    is_known = contents.format in writers
    what = f"checkpoint of {files} by {writers[contents.format]}" if is_known else f"{contents.format} in {files}"
    yield (
        f"{counted(totals['tensors'], 'tensor')}, {counted(totals['objects'], 'object')}; {totals['bytes']:,} bytes in "
        f"{counted(totals['shards'], 'shard')}; {what}"
    )


def _place(chunk: Chunk) -> str:
    box = box_text(chunk.offsets, chunk.sizes) + " " if chunk.sizes else ""
    if chunk.file is None:
        return f"{box}the metadata do not say where it is stored"
    return f"{box}{one_line(chunk.file)} at {chunk.offset:,}, {chunk.num_bytes:,} bytes"
