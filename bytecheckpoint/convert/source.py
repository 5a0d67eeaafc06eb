# SPDX-License-Identifier: Apache-2.0
"""What is converted: a checkpoint of any format, as a ``LoadSpec`` describes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.contents import opening as contents
from bytecheckpoint.convert.change import Change
from bytecheckpoint.errors import CheckpointChangedError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core

__all__ = ["Opened", "Source", "identity_of"]

# With the ring that is read into, all memory of a worker beside its interpreter's.
_WRITE_RING_BYTES = 32 << 20


Opened = contents.Opened[_core.Checkpoint]


def identity_of(opened: Opened) -> str:
    """Returns what tells a save from every other one: its id, or the versions of all files of another writer."""
    stored = opened.stored
    return stored.save_id if stored.foreign is None else hashlib.sha256(stored.file_versions().encode()).hexdigest()


@dataclass(frozen=True)
class Source:
    """What every process of a conversion needs to know of the source.

    Attributes:
        place: Path or URL.
        spec: What to take of it; None takes it as it is.
        config: Settings.
        planned: Identity of the save for which the conversion was planned; None before it is. No other one is opened.
        change: What computes elements from those of other checkpoints; None takes them as they are.
    """

    place: str
    spec: LoadSpec | None
    config: Config
    planned: str | None = None
    change: Change | None = None

    def planned_for(self, opened: Opened) -> Source:
        """Returns this source, of which only the save in ``opened`` can be opened any more."""
        return replace(self, planned=identity_of(opened))

    def check_unchanged(self, opened: Opened) -> None:
        """Refuses a source of another writer whose files are not those that were opened. Those of ours have ids.

        Raises:
            CheckpointChangedError: A file was replaced, written again or removed.
        """
        opened.stored.check_unchanged(opened.stored.data_directory(self.place))

    def open(self) -> Opened:
        """Opens it.

        Raises:
            CheckpointChangedError: It is another save than the conversion was planned for.
            CheckpointError: It cannot be read.
            ConfigError: The spec does not fit.
        """
        opened = contents.open_checkpoint(self.place, self.config, kind=_core.Checkpoint)
        if self.planned not in (None, identity_of(opened)):
            raise CheckpointChangedError(
                f"convert({self.place}): another save has replaced the source since this conversion was planned; "
                "begin it anew",
                self.place,
            )
        opened = opened if self.spec is None else contents.viewed(opened.stored, self.spec)
        if self.change is not None:
            self.change.prepare(opened.wanted, self.place, self.spec, self.config)
        return opened

    def reader(self, opened: Opened, names: Sequence[str]) -> _core.RowMajorReader:
        """Returns what reads elements of these tensors in row-major order, and objects."""
        return _core.RowMajorReader(
            opened.wanted,
            names,
            directory=self.place,
            rank=None,
            direct_io=self.config.direct_io,
            verify=self.config.verify,
            num_io_threads=self.config.io_threads,
            ring_bytes=self.config.ring_bytes,
            io_timeout_s=self.config.io_timeout_s,
        )

    def options(self, progress: Callable[[int], object]) -> dict[str, Any]:
        """Returns the arguments that all functions of the engine which convert have in common."""
        return {
            "directory": self.place,
            "direct_io": self.config.direct_io,
            "verify": self.config.verify,
            "num_io_threads": self.config.io_threads,
            "ring_bytes": _WRITE_RING_BYTES,
            "io_timeout_s": self.config.io_timeout_s,
            "convert": self._converted,
            "computed": set() if self.change is None else set(self.change.names),
            "progress": progress,
        }

    def _converted(
        self, name: str, first: int, stored: str, elements: memoryview, dtype: str, converted: memoryview
    ) -> None:
        """Converts some elements of a tensor; see ``csrc/bridge/callbacks.h``."""
        import torch

        source = torch.frombuffer(elements, dtype=getattr(torch, stored))
        if self.change is not None and name in self.change.names:
            source = self.change.compute(name, first, source)
        torch.frombuffer(converted, dtype=getattr(torch, dtype)).copy_(source)
