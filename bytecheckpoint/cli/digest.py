# SPDX-License-Identifier: Apache-2.0
"""``bcp digest``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from bytecheckpoint.checkpoint.digests import Digest, combined, digest_of
from bytecheckpoint.cli.options import bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.specs import spec_of, spec_options
from bytecheckpoint.cli.text import counted, one_line, print_json, safe_name
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import open_contents
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.in_use import reading

__all__ = ["command"]

# Digests of all parts, by the name of the part, or of the rank that saved it by itself; "" for an only part.
_Parts = dict[str, Digest]


@click.command("digest")
@checkpoint_argument("path")
@click.option("--keys", is_flag=True, help="Also print the digest of each key.")
@spec_options
@click.option(
    "--compare",
    "file",
    type=click.Path(dir_okay=False),
    help="Compare with what bcp digest --json has printed into this file.",
)
@json_option
@progress_option
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    keys: bool,
    spec_file: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    file: str | None,
    as_json: bool,
    progress: bool,
) -> None:
    """Prints a digest of what a checkpoint holds, whatever its shards, files and format.

    It covers names, dtypes, shapes and elements of tensors, and objects: two checkpoints with one digest load the same
    bits. PATH is a checkpoint of bytecheckpoint or of stock DCP, safetensors, or a step folder of bytecheckpoint.save.
    If the save stored its digest, they are compared. Memory use is bounded. Ends with 1 if the checkpoint differs from
    what the save stored, or from --compare.

    \b
    Example:
      bcp digest ckpt --include model --rename model=
    """
    before = None if file is None else _read(file)
    parts = _digests(path, spec_of(spec_file, include, exclude, rename), progress)
    found = _as_json(path, parts)
    differing = None if before is None else _differing(found, before)
    if as_json:
        print_json(found if differing is None else {**found, "equal": not differing, "differing": differing})
    else:
        for line in _lines(path, parts, found["total"], keys):
            click.echo(line)
        if differing is not None:
            what = f"differs from {file}: {listed([*map(safe_name, differing)])}" if differing else f"equal to {file}"
            click.echo(f"{one_line(path)}: {one_line(what)}")
    ctx.exit(0 if not differing and all(digest.is_as_saved for digest in parts.values()) else 1)


def _digests(path: str, spec: LoadSpec | None, progress: bool) -> _Parts:
    config = Config.from_env()
    with reading(path):
        contents = open_contents(path, config=config, kind=_core.Checkpoint, spec=spec)
        config = folder_at(path).tuned(config)
        parts: _Parts = {}
        for part in contents.parts:
            label = _label(part.component, part.rank) if len(contents.parts) > 1 else ""
            with bar(f"digesting {label}".strip(), progress) as tell:
                parts[label] = digest_of(part.checkpoint, part.path, rank=part.rank, config=config, progress=tell)
    return parts


def _label(component: str, rank: int | None) -> str:
    return component if rank is None else f"{component} rank {rank}".strip()


def _as_json(path: str, parts: _Parts) -> dict[str, Any]:
    def of_one(digest: Digest) -> dict[str, Any]:
        stored = {"total": digest.stored, "equal": digest.is_as_saved, "differing": [*digest.differing]}
        return {
            "total": digest.total,
            "keys": {**digest.keys},
            "as_stored": [*digest.as_stored],
            "stored": None if digest.stored is None else stored,
            "bytes": digest.num_bytes,
        }

    if "" in parts:
        return {"path": path, **of_one(parts[""])}
    total = combined({label: bytes.fromhex(digest.total) for label, digest in parts.items()})
    return {"path": path, "total": total.hex(), "parts": {label: of_one(digest) for label, digest in parts.items()}}


def _lines(path: str, parts: _Parts, total: str, keys: bool) -> Iterator[str]:
    for label, digest in parts.items():
        prefix = f"{label}: " if label else ""
        if keys:
            yield from (f"{of_key}  {prefix}{safe_name(name)}" for name, of_key in digest.keys.items())
        if label:
            yield f"{digest.total}  {prefix}{counted(len(digest.keys), 'key')}"
        if digest.as_stored:
            names = listed([*map(safe_name, digest.as_stored)])
            yield f"note: {prefix}not of builtin types, so their bytes as they are stored count: {names}"
        if digest.stored is not None:
            names = listed([*map(safe_name, digest.differing)]) or "the total"
            yield (
                f"{prefix}equal to the digest that the save stored"
                if digest.is_as_saved
                else f"{prefix}differs from the digest that the save stored: {names}"
            )
    yield f"{total}  {one_line(path)}"


def _read(file: str) -> Mapping[str, Any]:
    """Returns what ``--json`` has printed into a file."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--compare {file}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("total"), str):
        raise ConfigError(f"--compare {file}: bcp digest --json has not printed this")
    return found


def _by_key(found: Mapping[str, Any]) -> dict[str, Any]:
    parts = found.get("parts", {"": found})
    if not isinstance(parts, dict):
        return {}
    return {
        f"{label}: {name}" if label else name: value
        for label, part in parts.items()
        if isinstance(part, dict) and isinstance(part.get("keys"), dict)
        for name, value in part["keys"].items()
    }


def _differing(found: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Returns the keys that differ, or are in one of the two only."""
    if found["total"] == before["total"]:
        return []
    now, then = _by_key(found), _by_key(before)
    differing = [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
    return differing or ["the total"]
