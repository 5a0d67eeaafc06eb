# SPDX-License-Identifier: Apache-2.0
"""A place of checkpoints as the contract sees it, and the checkpoints that its cases save there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from bytecheckpoint import Config, load_state_dict, save_state_dict, verify
from bytecheckpoint.storage.folder import Folder
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.names import is_data
from bytecheckpoint.storage.paths import below, location

__all__ = [
    "NUMELS",
    "Place",
    "assert_nothing_left",
    "data_files",
    "flip_a_bit",
    "loaded_generation",
    "names_in",
    "save_generation",
    "state_of",
]

# Whole blocks, an end that is none, one element, and more than a request.
NUMELS = {"blocks": 1 << 18, "odd": (1 << 16) + 3, "one": 1, "long": (3 << 18) + 77}
_MARK = ".metadata"


@dataclass(frozen=True)
class Place:
    """A folder of a kind of storage, that no other case uses.

    Attributes:
        text: Its path or URL.
        config: Settings that it needs.
        written: Path or URL through which it is written, if ``text`` can only be read.
    """

    text: str
    config: Config = dataclasses.field(default_factory=Config)
    written: str = ""

    def at(self, *names: str) -> str:
        """Returns the path or URL to read at, of a folder in it."""
        return str(below(location(self.text), *names))

    def to_write(self, *names: str) -> str:
        """Returns the path or URL to write to, of a folder in it."""
        return str(below(location(self.written or self.text), *names))

    def folder(self, *names: str) -> Folder:
        """Returns a folder in it, as it is read."""
        known(location(self.text), self.config)
        return folder_at(self.at(*names))

    def writable(self, *names: str) -> Folder:
        """Returns a folder in it, as it is written."""
        known(location(self.written or self.text), self.config)
        return folder_at(self.to_write(*names))


def state_of(generation: int) -> dict[str, Any]:
    values: dict[str, Any] = {name: torch.arange(float(numel)) + generation for name, numel in NUMELS.items()}
    return values | {"generation": generation}


def save_generation(place: Place, generation: int, *names: str) -> None:
    save_state_dict(place.to_write(*names), state_of(generation), no_dist=True, config=place.config)


def loaded_generation(place: Place, *names: str) -> int:
    """Returns the generation of the checkpoint there, after all of its values were compared."""
    got = state_of(-1)
    load_state_dict(place.at(*names), got, no_dist=True, config=place.config)
    generation: int = got["generation"]
    for name, wanted in state_of(generation).items():
        assert torch.equal(got[name], wanted) if isinstance(wanted, torch.Tensor) else got[name] == wanted, name
    return generation


def data_files(folder: Folder) -> list[str]:
    return sorted(filter(is_data, folder.names()))


def flip_a_bit(folder: Folder) -> str:
    """Changes a bit of a data file, and returns its name."""
    name = data_files(folder)[0]
    data = bytearray(folder.read_file(name, 1 << 30) or b"")
    data[len(data) // 2] ^= 1
    folder.write_file(name, bytes(data))
    return name


def names_in(folder: Folder) -> list[str]:
    """Returns the names in a folder, but for that of journals and notes: some stores list a folder that was emptied."""
    return sorted(name for name in folder.names() if name != ".bcp")


def assert_nothing_left(place: Place) -> None:
    """Fails unless there are only the mark, the data files that it names, and the journal of saves."""
    folder = place.folder()
    assert not [name for name in names_in(folder) if name != _MARK and not is_data(name)]
    assert not verify(place.text, config=place.config).problems
