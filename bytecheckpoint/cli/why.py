# SPDX-License-Identifier: Apache-2.0
"""``bcp why``: what failed, and where things are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from bytecheckpoint.cli.options import Failure, checkpoint_argument, json_option
from bytecheckpoint.cli.text import box_text, counted, json_value, one_line, print_json, safe_name
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Chunk, Contents, Item, Part, open_contents, place_text
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.load_spec.patterns import matches
from bytecheckpoint.native import _core
from bytecheckpoint.near_names import nearest
from bytecheckpoint.observability.journal import read_failures
from bytecheckpoint.observability.page.untrusted import cleaned
from bytecheckpoint.observability.save_records import SaveRecord, find_save_record
from bytecheckpoint.observability.summary import failure_text
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.names import rank_of_data

__all__ = ["command"]

_MOST_CRCS = 4
_MOST_NAMES = 5


@click.command("why")
@checkpoint_argument("run")
@click.argument("key", required=False)
@click.option(
    "--journal",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the journal, or of the run, if the journal is not in the checkpoint.",
)
@json_option
def command(run: str, key: str | None, journal: str | None, as_json: bool) -> None:
    """Says which saves of a run failed or died; with KEY: where a tensor or object is stored, and who wrote it.

    RUN is a run folder, or one step of it, or the URL of one. A save that was killed is told by what it left: in which
    phase it was, which rank wrote last, and of which ranks there is nothing. Loads that failed are told if
    Config(journal=...) named a folder, which is then passed as RUN.

    With KEY, RUN is a checkpoint, or a step folder of bytecheckpoint.save. KEY is a name as bcp ls shows it, or a
    pattern, as bcp ls takes them: 'model.layers' takes all below it. Of each piece it prints: its box; file, offset and
    bytes; the blocks of the file that it is in, and their CRC-32s; and the rank that wrote the file. Which other ranks
    held the same piece is stored nowhere. Host, time and speed are from the journal in the checkpoint,
    .bcp/journal.jsonl, if there is one. The metadata, and the checksums at the end of each file, are read, and no data.
    Ends with 2 if there is no such key.

    \b
    Example:
      bcp why run
      bcp why run/step_100 model.embed.weight
    """
    if key is None:
        _tell_failures(journal or run, as_json)
        return
    contents = open_contents(run, config=Config.from_env(), with_chunks=True, kind=_core.Checkpoint)
    items = _asked(contents, key)
    records, notes = _records(contents, journal)
    found = [_facts(part, item, records.get(part.checkpoint.save_id)) for part, item in items]
    if as_json:
        print_json(json_value({"path": run, "notes": notes, "items": found}))
        return
    for facts in found:
        for line in _lines(facts):
            click.echo(line)
    for note in notes:
        click.echo(f"note: {one_line(note)}")


def _tell_failures(run: str, as_json: bool) -> None:
    place = folder_at(run)
    if not place.keeps_journals and not place.keeps_notes:
        raise Failure(f"{run}: failed saves are kept in a run folder on a file system, or in an object store")
    if place.keeps_journals and not Path(run).is_dir():
        raise Failure(f"{run}: there is no such folder")
    failures = read_failures(run)[::-1]
    if not failures and place.keeps_notes and not place.names():
        raise Failure(f"{run}: there is nothing below this URL")
    if as_json:
        print_json({"run": run, "failures": [cleaned(record) for record in failures]})
        return
    for record in failures:
        click.echo(one_line(failure_text(record)))
    if not failures:
        click.echo(f"{one_line(run)}: no save failed or died, as far as journals and folders tell")


def _asked(contents: Contents, key: str) -> list[tuple[Part, Item]]:
    """Returns the items of a name, of a name with its part in front, or of a pattern; a name goes first."""
    every = [(part, item) for part in contents.parts for item in part.items.values()]
    component, _, within = key.partition(": ")
    for is_asked in (
        lambda item: item.name == key,
        lambda item: (item.component, item.name) == (component, within),
        lambda item: matches(key, item.name),
    ):
        found = [(part, item) for part, item in every if is_asked(item)]
        if found:
            return found
    names = list(dict.fromkeys(item.name for _, item in every))
    near = nearest(key, names, _MOST_NAMES)
    instead = f"; the nearest are {', '.join(map(safe_name, near))}" if near else "; bcp ls lists the names"
    raise Failure(f"'{key}' is not in {contents.path}{instead}")


def _records(contents: Contents, journal: str | None) -> tuple[dict[str, SaveRecord], list[str]]:
    """Returns the records of the saves by their ids, and notes about those that have none."""
    records: dict[str, SaveRecord] = {}
    notes: dict[str, None] = {}
    for part in contents.parts:
        save_id = part.checkpoint.save_id
        if part.is_foreign:
            notes["another writer made the checkpoint: no journal has its saves, and its blocks have no checksums"] = (
                None
            )
        elif save_id not in records:
            record, why = find_save_record(part.path, save_id, journal)
            if record is None:
                notes[f"{why}: hosts and times are not known"] = None
            else:
                records[save_id] = record
    return records, list(notes)


def _facts(part: Part, item: Item, record: SaveRecord | None) -> dict[str, Any]:
    """Returns everything that is known of an item."""
    checkpoint = part.checkpoint
    directory = checkpoint.data_directory(part.path)
    ranks = {name: rank for name, _, rank, _ in checkpoint.files()} if not part.is_foreign else {}
    elements = checkpoint.elements(item.name)
    tables: dict[str, Any] = {}
    chunks = []
    for chunk, place in zip(item.chunks or (), elements, strict=True):
        facts = {
            **chunk.to_dict(),
            "elements_offset": None if place is None else place[0],
            "elements_bytes": None if place is None else place[1],
        }
        if chunk.file is not None:
            if chunk.file not in tables:
                tables[chunk.file] = _table(checkpoint, directory, chunk.file)
            facts |= _blocks(chunk, tables[chunk.file])
            facts["rank"] = _rank(chunk.file, part, ranks)
        if record is not None and facts.get("rank") is not None:
            facts["written"] = {"began": record.began, "journal": record.journal, **record.of_rank(facts["rank"])}
        chunks.append(facts)
    return {
        **item.to_dict(),
        "format": checkpoint.format,
        "save_id": None if part.is_foreign else checkpoint.save_id,
        "chunks": chunks,
    }


def _table(checkpoint: Any, directory: str, file: str) -> tuple[int, int, list[int]] | str | None:
    """Returns bytes of a block, where the last one ends, and the CRCs of all blocks; or why they cannot be read."""
    try:
        table: tuple[int, int, list[int]] | None = checkpoint.block_checksums(directory, file)
        return table
    except CheckpointError as error:
        return str(error)


def _blocks(chunk: Chunk, table: tuple[int, int, list[int]] | str | None) -> dict[str, Any]:
    if isinstance(table, str):
        return {"blocks": None, "problem": table}
    if table is None:
        return {"blocks": None}
    block_bytes, end, crcs = table
    first = chunk.offset // block_bytes
    last = max(chunk.offset + chunk.num_bytes - 1, chunk.offset) // block_bytes
    of_chunk = crcs[first : last + 1]
    return {
        "blocks": {
            "first": first,
            "last": last,
            "offset": first * block_bytes,
            "end": min((last + 1) * block_bytes, end),
            "block_bytes": block_bytes,
            "crc32": [f"{crc:08x}" for crc in of_chunk],
        }
    }


def _rank(file: str, part: Part, ranks: Mapping[str, int]) -> int | None:
    if file in ranks:
        return ranks[file]
    found = rank_of_data(file)
    return part.rank if found is None else found


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    name = place_text(facts["part"] or "", facts["rank"]) + safe_name(facts["name"])
    shape = "object" if facts["dtype"] is None else f"{facts['dtype']} {facts['shape']}"
    save = f"; save {facts['save_id']}" if facts["save_id"] else f"; {one_line(facts['format'])}"
    yield f"{name}  {shape}, {facts['bytes']:,} bytes in {counted(len(facts['chunks']), 'shard')}{save}"
    for chunk in facts["chunks"]:
        box = box_text(chunk["offsets"], chunk["sizes"]) + " " if chunk["sizes"] else ""
        if chunk["file"] is None:
            yield f"    {box}the metadata do not say where it is stored"
            continue
        begin, size = chunk["elements_offset"], chunk["elements_bytes"]
        within = "" if begin is None or size == chunk["bytes"] else f"; its elements at {begin:,}, {size:,} bytes"
        yield f"    {box}{one_line(chunk['file'])} at {chunk['offset']:,}, {chunk['bytes']:,} bytes{within}"
        if chunk["blocks"] is not None:
            yield f"        {_block_text(chunk['blocks'])}"
        if "problem" in chunk:
            yield f"        its checksums cannot be read: {one_line(chunk['problem'])}"
        if chunk["rank"] is not None:
            yield f"        written by rank {chunk['rank']}{_written_text(chunk.get('written', {}))}"


def _block_text(blocks: Mapping[str, Any]) -> str:
    crcs = blocks["crc32"]
    listed = ", ".join(crcs[:_MOST_CRCS])
    more = f" and {len(crcs) - _MOST_CRCS:,} more" if len(crcs) > _MOST_CRCS else ""
    which = f"block {blocks['first']:,}" if len(crcs) == 1 else f"blocks {blocks['first']:,} to {blocks['last']:,}"
    return f"{which} of the file, bytes {blocks['offset']:,} to {blocks['end']:,}; CRC-32 {listed}{more}"


def _written_text(written: Mapping[str, Any]) -> str:
    host = f" on {one_line(written['host'])}" if "host" in written else ""
    notes = [f"in the save that began {written['began']}"] if written.get("began") else []
    if "num_bytes" in written and "seconds" in written:
        rate = f", {written['gb_per_s']:.2f} GB/s" if "gb_per_s" in written else ""
        notes.append(f"which took it {written['seconds']:.2f} s for {size_text(written['num_bytes'])}{rate}")
    if "write_s" in written:
        notes.append(f"{written['write_s']:.2f} s of its threads in writes")
    return f"{host}{', ' if notes else ''}{'; '.join(notes)}"
