# SPDX-License-Identifier: Apache-2.0
"""What a load did, as each rank saw it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.listing import table
from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.report.text import duration_text, in_words, rate_text, ratio, size_text, to_plain, who

__all__ = ["LoadReport", "RankLoadReport"]


@dataclass(frozen=True, kw_only=True)
class RankLoadReport:
    """What one rank did until it had everything that it wanted.

    The phases ``metadata_s``, ``plan_s``, ``exchange_s``, ``read_s`` and ``objects_s`` follow one another.

    Attributes:
        rank: Number of the rank in the load.
        num_boxes: Number of stored boxes that were read into tensors or buffers.
        num_files: Number of data files that were opened.
        bytes_wanted: Bytes of these boxes.
        bytes_read: Bytes that this rank read: whole blocks of 256 KiB, each once.
        bytes_received: Bytes that other ranks read for this one: whole blocks, which they sent to it, or of which it
            took what it wants from their memory.
        seconds: Seconds of reading, verifying and scattering tensors and objects.
        metadata_s: Seconds of reading ``.metadata``.
        plan_s: Seconds from then until this rank's own plan was ready.
        exchange_s: Seconds from then until all ranks had agreed on what to read.
        read_s: Seconds of reading tensors into their places.
        objects_s: Seconds of reading and unpacking everything that is not a tensor.
        num_requests: Number of requests to the object store; 0 for a directory. A request that obstore tried again
            counts once: it does not tell.
        trace: Where and when the rank did this, and what its threads did; None with ``Config(trace="off")``.
    """

    rank: int = 0
    num_boxes: int = 0
    num_files: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    metadata_s: float = 0.0
    plan_s: float = 0.0
    exchange_s: float = 0.0
    read_s: float = 0.0
    objects_s: float = 0.0
    num_requests: int = 0
    trace: RankTrace | None = None


@dataclass(frozen=True, kw_only=True)
class LoadReport(RankLoadReport):
    """On the coordinator, a report of the whole load; on another rank, of that rank's part.

    The phases, with ``wait_s`` after them, add up to ``total_s``.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits.
        mesh: Name and size of each axis of the device mesh that the ranks are arranged in; on the coordinator, if the
            state has a DTensor whose mesh has all ranks in their order. Empty otherwise.
        began_at: Unix time at which the load began on this rank.
        reading: ``independent``, or ``cooperative`` where the ranks shared their reading.
        wait_s: Seconds of waiting at the end. Where ranks share their reading, a rank waits until no other rank needs
            it any more. The coordinator, if it knows the ``ranks``, waits until all of them have what they wanted.
        total_s: Seconds from the beginning to the end on this rank.
        ranks: On the coordinator, the reports of all ranks, sorted by rank; empty on other ranks. It is also empty if
            it was not certain that all ranks would report: the reader is wrapped, its ``read_data`` or the planner's
            ``finish_plan`` is overridden, or each rank read what it had saved without collectives.
        missing_keys: Keys that were asked for and are not in the checkpoint, so that ``allow_partial_load=True`` left
            their values as they were; 256 at most. On the coordinator those of all ranks, on another rank its own.
            Unknown, and so empty, with a planner that is neither ours nor DCP's own.
        num_missing_keys: Number of missing keys. On the coordinator it is a lower bound if several ranks lack more than
            256 keys each, and not the same ones.
        missing_parts: Dicts and lists of the state, such as ``optimizer``, of which every key is missing. On the
            coordinator those of which no rank has found a key, on another rank its own.
        unexpected_keys: Keys of the checkpoint that no rank asked for, although some rank asked for another key of the
            same top-level part (``optimizer`` of ``optimizer.state.0.step``); 256 at most. Only the coordinator has
            them, except that each rank has its own where it read what it had saved without collectives.
        num_unexpected_keys: Number of unexpected keys.
        num_loaded_keys: Number of keys of the checkpoint that any rank asked for. Only the coordinator knows it; it is
            None on the others, except that each has its own where it read what it had saved without collectives.
        bytes_unread: Bytes of what is in the checkpoint and no rank asked for: other keys, and what a ``LoadSpec`` left
            out. None where ``num_loaded_keys`` is None, and for metadata so large that only parts of them were read.
        casts: With a ``LoadSpec``, keys of this rank that were loaded into another dtype: key, stored dtype, dtype of
            the state; 256 at most. With any load, numbers that were loaded into tensors without dims; their stored
            dtype is ``int``, ``float``, ``bool`` or ``complex``.
        renamed_keys: With a ``LoadSpec``, keys of the checkpoint that were loaded under another name, and that name;
            256 at most.
        num_renamed_keys: Number of these keys.
        as_given: Why the planner that DCP had planned the load, and none of ours; empty if ours did.
    """

    path: str
    save_id: str
    mesh: tuple[tuple[str, int], ...] = ()
    began_at: float = 0.0
    reading: str = "independent"
    wait_s: float = 0.0
    total_s: float = 0.0
    ranks: tuple[RankLoadReport, ...] = ()
    missing_keys: tuple[str, ...] = ()
    num_missing_keys: int = 0
    missing_parts: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    num_unexpected_keys: int = 0
    num_loaded_keys: int | None = None
    bytes_unread: int | None = None
    casts: tuple[tuple[str, str, str], ...] = ()
    renamed_keys: tuple[tuple[str, str], ...] = ()
    num_renamed_keys: int = 0
    as_given: str = ""

    @property
    def total_bytes_wanted(self) -> int:
        """``bytes_wanted`` of all ``ranks``; if ``ranks`` is empty, of this rank."""
        return sum(of_rank.bytes_wanted for of_rank in self.ranks) if self.ranks else self.bytes_wanted

    @property
    def total_bytes_read(self) -> int:
        """``bytes_read`` of all ``ranks``; if ``ranks`` is empty, of this rank."""
        return sum(of_rank.bytes_read for of_rank in self.ranks) if self.ranks else self.bytes_read

    @property
    def total_requests(self) -> int:
        """``num_requests`` of all ``ranks``; if ``ranks`` is empty, of this rank."""
        return sum(of_rank.num_requests for of_rank in self.ranks) if self.ranks else self.num_requests

    @property
    def gb_per_s(self) -> float:
        """``total_bytes_wanted`` in units of 10^9 bytes, divided by ``total_s``."""
        return ratio(self.total_bytes_wanted / 1e9, self.total_s)

    @property
    def read_amplification(self) -> float:
        """``total_bytes_read`` divided by ``total_bytes_wanted``.

        It is 0 if nothing was wanted, and may be below 1 where ranks share their reading.
        """
        return ratio(self.total_bytes_read, self.total_bytes_wanted)

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One line for people. Its phases add up to the whole."""
        phases = {
            "metadata": self.metadata_s,
            "plan": self.plan_s + self.exchange_s,
            "read": self.read_s,
            "objects": self.objects_s,
            "wait": self.wait_s,
        }
        notes = [in_words(phases), f"read {self.read_amplification:.2f}x what was wanted"]
        if self.total_requests:
            notes.append(f"{self.total_requests} requests")
        if self.num_missing_keys:
            notes.append(f"{self.num_missing_keys:,} keys not in the checkpoint")
        if self.num_unexpected_keys:
            notes.append(f"{self.num_unexpected_keys:,} keys not asked for")
        return (
            f"loaded {self.path}: {size_text(self.total_bytes_wanted)} by {who(self.rank, len(self.ranks))} "
            f"in {duration_text(self.total_s)} ({rate_text(self.gb_per_s)}; {'; '.join(notes)})"
        )

    def table(self, most: int = 20) -> str:
        """Returns a table of what was loaded and what was not, for people.

        Args:
            most: The most keys of each kind that are named.
        """
        loaded = (
            []
            if self.num_loaded_keys is None
            else [(f"{self.num_loaded_keys:,} key{'s' * (self.num_loaded_keys != 1)}", "")]
        )
        unread = [] if self.bytes_unread is None else [(size_text(self.bytes_unread), "")]
        return table(
            {
                "loaded": (loaded, 1),
                "not in the checkpoint": ([(key, "") for key in self.missing_keys], self.num_missing_keys),
                "not asked for": ([(key, "") for key in self.unexpected_keys], self.num_unexpected_keys),
                "cast": ([(key, f"{stored} -> {to}") for key, stored, to in self.casts], len(self.casts)),
                "renamed": ([(new, f"from {old}") for old, new in self.renamed_keys], self.num_renamed_keys),
                "not read": (unread, 1),
            },
            most,
        )

    def to_dict(self, *, with_ranks: bool = True) -> dict[str, Any]:
        """Returns all fields and properties by name, as plain values.

        Instead of ``trace`` there are the ``host`` of the rank and ``phases``: seconds by phase.

        Args:
            with_ranks: Whether what the traces and the ``ranks`` say is in it. Without, it is soon made for any number
                of ranks.
        """
        return to_plain(
            self,
            () if with_ranks else ("ranks", "trace"),
            total_bytes_wanted=self.total_bytes_wanted,
            total_bytes_read=self.total_bytes_read,
            total_requests=self.total_requests,
            gb_per_s=self.gb_per_s,
            read_amplification=self.read_amplification,
        )

    def to_json(self) -> str:
        """Returns ``to_dict()`` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)
