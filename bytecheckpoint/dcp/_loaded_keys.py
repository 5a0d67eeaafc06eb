# SPDX-License-Identifier: Apache-2.0
"""Which keys a load fills, and which it leaves: compared with what the planner's ``LoadSpec`` allows, and reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint.errors import KeyMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.wrapped_names import spec_that_loads
from bytecheckpoint.native import _C
from bytecheckpoint.planning.plan_items import LoadKeys, LoadTargets, PlanItems, source_of
from bytecheckpoint.sharing.asked_keys import RequestedKeys, Unfilled, asked_by_any, compare
from bytecheckpoint.tensors.casts import Cast

__all__ = ["LoadedKeys", "asked_by", "planned_view"]

# A report names no more keys than this.
_MOST_REPORTED = 256
# A warning names no more keys of each kind than this.
_MOST_WARNED = 5


def planned_view(plan: LoadPlan, stored: _C.Checkpoint) -> _C.Checkpoint:
    """Returns what a plan reads: a view of ``stored``, if the planner's spec describes one, else ``stored`` itself."""
    source = source_of(plan.items)
    if isinstance(source, _C.ReadPlan) and source.checkpoint.is_view_of(stored):
        return source.checkpoint
    return stored


def asked_by(plan: LoadPlan, checkpoint: _C.Checkpoint, planner: object) -> RequestedKeys:
    """Returns which keys this rank asks for. ``planner`` is that of the load, or None if it is not known."""
    stored = checkpoint.names()
    fills = plan.items.fills if isinstance(plan.items, PlanItems) else targets_of_dcp(planner)
    if fills is not None:
        return RequestedKeys.of(stored, fills.flat, fills.tops, fills.paths)
    # For another planner the items show it. A tensor without elements has no item, so it counts as asked for.
    keys = {item.storage_index.fqn for item in plan.items}
    empty = {name for name, _, shape, *_ in checkpoint.contents() if 0 in shape} if len(keys) < len(stored) else set()
    return RequestedKeys.of(stored, keys | empty, keys)


def targets_of_dcp(planner: object) -> LoadTargets | None:
    """Returns what DCP's own load planner fills; None for any other planner, which may choose on purpose."""
    if type(planner) is not DefaultLoadPlanner:
        return None
    paths = planner.mappings if planner.flatten_state_dict else {}
    return LoadTargets(planner.state_dict, planner.original_state_dict.keys(), paths)


def _why_nothing(path: str, stored: _C.Checkpoint, unfilled: Unfilled) -> str:
    names = listed([*map(repr, stored.names()[:_MOST_WARNED])], _MOST_WARNED, stored.num_items) or "no keys"
    if not unfilled.num_missing_keys:
        return (
            f"load({path}): the state asks for no key, so nothing is loaded: a load fills the tensors and values that "
            f"the state has. The checkpoint has {names}. To read it without a state, list it with 'bcp ls {path}', and "
            f"write it as a file for torch.load with 'bcp convert {path} FILE --to torch'"
        )
    missing = listed([*map(repr, unfilled.missing_keys)], _MOST_WARNED, unfilled.num_missing_keys)
    way_out = spec_that_loads(unfilled.missing_keys, stored.names())
    return (
        f"load({path}): nothing is loaded, because the checkpoint has no key that the state asks for. The state asks "
        f"for {missing}; the checkpoint has {names}. "
        f"{way_out or 'LoadSpec(rename=...) gives keys of the checkpoint other names'}"
    )


class LoadedKeys:
    """The keys of one load, as this rank knows them.

    Attributes:
        unfilled: Keys that are left unfilled: for this rank; on the coordinator, for all ranks.
        num_loaded: Number of keys that are read by any rank that is known of; None before ``compare``.
        bytes_unread: Bytes of the other keys; None before ``compare``, and where that would need more of the metadata.
        numbers: Numbers that were loaded into tensors without dims, as the planner counts them.
    """

    def __init__(self, plan: LoadPlan | None = None) -> None:
        self._known: LoadKeys | None = plan.items.loads if plan and isinstance(plan.items, PlanItems) else None
        self.unfilled = Unfilled()
        self.num_loaded: int | None = None
        self.bytes_unread: int | None = None
        self.numbers: Sequence[Cast] = ()
        self._nothing = ""  # why nothing is loaded

    def note_missing(self, asked: RequestedKeys) -> None:
        """Notes what this rank asks for and the checkpoint does not have."""
        self.unfilled = Unfilled(asked.missing, asked.num_missing, missing_parts=asked.missing_parts)

    def compare(self, path: str, stored: _C.Checkpoint, asked: list[RequestedKeys]) -> None:
        """Finds out what is left unfilled.

        Args:
            path: Path of the checkpoint, for messages.
            stored: The checkpoint, or the view of it that is read.
            asked: What each rank asks for.

        Raises:
            KeyMismatchError: The spec refuses keys that no rank asks for, and there are some.
        """
        spec = None if self._known is None else self._known.spec
        self.unfilled = unfilled = compare(stored.names, asked, of_all_parts=spec is not None)
        marks = asked_by_any(asked)
        self.num_loaded = stored.num_items if marks is None else marks.count(1)
        self.bytes_unread = stored.bytes_beside(marks)
        if not self.num_loaded and (stored.num_items or unfilled.num_missing_keys):
            self._nothing = _why_nothing(path, stored, unfilled)
        if spec is None or not spec.refuses_unexpected or not unfilled.num_unexpected_keys:
            return
        names = listed([*map(repr, unfilled.unexpected_keys)], total=unfilled.num_unexpected_keys)
        raise KeyMismatchError(
            f"load({path}): these are in the checkpoint, but not asked for: {names}; "
            "LoadSpec(strict='model') leaves them out, exclude=... some of them",
            path,
        )

    def warning(self, path: str) -> str | None:
        """Returns the text of a warning, if nothing was loaded, or nothing of a part of the state, or a part in part.

        With a spec the last of these is on purpose.
        """
        if self._nothing:
            return self._nothing
        of_parts = None if self._known is not None else self.unfilled.warning_of_parts(path)
        texts = [text for text in (self.unfilled.warning_of_missing_parts(path), of_parts) if text is not None]
        return "; ".join(texts) or None

    def of_report(self) -> dict[str, Any]:
        """Returns the fields of a ``LoadReport``."""
        known = self._known
        casts = (*(known.casts if known else ()), *self.numbers)[:_MOST_REPORTED]
        return {
            **dataclasses.asdict(self.unfilled),
            "num_loaded_keys": self.num_loaded,
            "bytes_unread": self.bytes_unread,
            "casts": tuple((key, stored, str(to).removeprefix("torch.")) for key, stored, to in casts),
            "renamed_keys": tuple(known.renamed.items())[:_MOST_REPORTED] if known else (),
            "num_renamed_keys": len(known.renamed) if known else 0,
        }
