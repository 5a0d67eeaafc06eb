# SPDX-License-Identifier: Apache-2.0
"""What is known of a checkpoint besides its tensors: when, by whom and how fast it was saved, what was noted of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bytecheckpoint.checkpoint.commit_times import commit_times
from bytecheckpoint.checkpoint.keeping import pins_of
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Contents, Part, open_contents
from bytecheckpoint.native import _core
from bytecheckpoint.observability.page.untrusted import cleaned
from bytecheckpoint.observability.save_records import SaveRecord, find_save_record
from bytecheckpoint.storage.parts import description_in, json_of
from bytecheckpoint.storage.stored_digest import stored_in, without_stored

__all__ = ["facts_of"]

_DESCRIPTION = "bytecheckpoint"


def facts_of(path: str, config: Config) -> dict[str, Any]:
    """Returns what is known of a checkpoint as plain data. Reads its metadata and its journal, and no data.

    Args:
        path: Folder of a checkpoint or of a step of ``bytecheckpoint.save``, or its URL.
        config: Settings.

    Returns:
        ``path``, ``format``, ``committed_at`` (Unix time, or None), ``began_at``, ``parts``, ``ranks``, ``mesh`` (name
        and size of each dim), ``hosts``, ``tensors``, ``objects``, ``bytes``, ``files``, ``seconds``, ``gb_per_s``,
        ``is_async``, ``versions``, ``digest``, ``pinned``, ``step``, ``framework`` and ``user_metadata``. What is not
        known is None.

    Raises:
        CheckpointError: The checkpoint cannot be opened; see ``open_contents``.
    """
    contents = open_contents(path, config=config, kind=_core.Checkpoint)
    records = [*_records_of(contents)]
    known = [record.record for record in records if record is not None]
    items = [*contents.items]
    described = [json_of(part.checkpoint.user_metadata, part.path) for part in contents.parts]
    last = described[-1]  # that of the model, which is committed last
    description = description_in(last, path)
    num_bytes = sum(item.num_bytes for item in items)
    seconds = _sum_of(known, len(records))
    committed = commit_times([path]).get(path)
    mesh = next((record.get("mesh") for record in known if isinstance(record.get("mesh"), Mapping)), None)
    return {
        "path": path,
        "format": contents.format,
        "committed_at": None if committed is None else committed / 1e9,
        "began_at": min((record["at"] for record in known if isinstance(record.get("at"), int | float)), default=None),
        "parts": [part.component for part in contents.parts if part.component],
        "ranks": _first(known, "world_size") or description.get("world_size") or _ranks_of(contents) or None,
        "mesh": _mesh_of(mesh),
        "hosts": sorted({str(host) for record in known for host in _listed(record.get("hosts"))}) or None,
        "tensors": sum(item.dtype is not None for item in items),
        "objects": sum(item.dtype is None for item in items),
        "bytes": num_bytes,
        "files": contents.num_files,
        "seconds": seconds,
        "gb_per_s": num_bytes / 1e9 / seconds if seconds else None,
        "is_async": _first(known, "is_async"),
        "versions": cleaned(_first(known, "versions")),
        "digest": _digest_of(contents, described),
        "pinned": pins_of([path]).get(path),
        "step": description.get("global_step"),
        "framework": description.get("framework"),
        "user_metadata": _of_user(last),
    }


def _records_of(contents: Contents) -> Iterator[SaveRecord | None]:
    for part in contents.parts:
        is_own = not part.is_foreign
        yield find_save_record(part.path, part.checkpoint.save_id, None)[0] if is_own else None


def _first(records: list[dict[str, Any]], name: str) -> Any:
    return next((record[name] for record in records if record.get(name) is not None), None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _sum_of(records: list[dict[str, Any]], num_parts: int) -> float | None:
    """Returns the seconds of all parts together; None unless all are known."""
    reports = [record.get("report") for record in records]
    seconds = [report.get("total_s") for report in reports if isinstance(report, Mapping)]
    known = [float(each) for each in seconds if isinstance(each, int | float) and each >= 0]
    return sum(known) if len(known) == num_parts > 0 else None


def _ranks_of(contents: Contents) -> int:
    return len({rank for part in contents.parts if not part.is_foreign for _, _, rank, _ in part.checkpoint.files()})


def _mesh_of(mesh: Any) -> list[list[Any]] | None:
    if not isinstance(mesh, Mapping):
        return None
    names, sizes = _listed(mesh.get("names")), _listed(mesh.get("shape"))
    return [[str(name), size] for name, size in zip(names, sizes, strict=False) if isinstance(size, int)] or None


def _digest_of(contents: Contents, described: list[Any]) -> str | None:
    """Returns the digest that the save has stored; None if there are several parts, or none is stored."""
    if len(contents.parts) != 1:
        return None
    part: Part = contents.parts[0]
    stored = stored_in(described[0], part.checkpoint.names(), part.path)
    return None if stored is None else stored[0]


def _of_user(user_metadata: Any) -> Any:
    """Returns what the user passed, without what a save has added."""
    found = without_stored(user_metadata)
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if name != _DESCRIPTION} or None
    return found
