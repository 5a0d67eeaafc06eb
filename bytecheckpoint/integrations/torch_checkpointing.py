# SPDX-License-Identifier: Apache-2.0
"""A ``CheckpointManager`` of torch_checkpointing that saves and loads through our engine.

::

    from bytecheckpoint.integrations.torch_checkpointing import BcpCheckpointManager

    manager = BcpCheckpointManager(config)  # in the place of CheckpointManager(config), or config.build()

Importing this module imports torch_checkpointing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.errors import ConfigError, KeyMismatchError, UnsupportedError
from bytecheckpoint.integrations._needs import default_group, refuse_tiers, require_for_import
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.probes.of_integrations import TORCH_CHECKPOINTING
from bytecheckpoint.report import SaveReport
from bytecheckpoint.staging.save_handle import SaveHandle
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import as_place

require_for_import(TORCH_CHECKPOINTING)

from torch_checkpointing import CheckpointManager, ItemSpec  # noqa: E402
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # noqa: E402
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig  # noqa: E402
from torch_checkpointing.default_resharder import DefaultResharder  # noqa: E402
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402

__all__ = ["BcpCheckpointManager"]

_CALL = "BcpCheckpointManager"
# Settings of the manager's configuration that are for its own files and processes, and what to do instead.
_REFUSED = {
    "pre_finalize_callback": "nobody sees a checkpoint before it is committed; work with it when the future of save() "
    "is done",
    "finalize_callback": "wait for the future of save(), and do then what the callback does",
    "subprocess_init_fn": "there is no process beside this one",
}


class BcpCheckpointManager(CheckpointManager):
    """The ``CheckpointManager`` of torch_checkpointing, with our engine in the place of its saver and its reader.

    What it writes is a checkpoint of DCP: it is committed as a whole, every byte has a checksum, stock ``dcp.load``
    reads it, and any number of ranks loads it, on any device. All calls but ``lock`` and ``prewarm_staging`` are
    collective over the default group, and a failure is raised on all ranks. ``checkpoint_id`` is a path, or the URL of
    an object store.

    - An item with a resharder, or with a DTensor in it, is one for all ranks: its keys begin with its name. Of what is
      no DTensor ranks have the same; what differs is a warning, and that of the lowest rank is stored.
    - Any other item is of its rank, as it is there: ``trainer`` of rank 3 is below the key ``trainer_3``. Another
      number of ranks gets the items of the ranks that there were.
    - ``save`` returns when the state is copied, and a future of the ``SaveReport``; with ``SyncCheckpointSaverConfig``
      None, when all is committed. It first waits for the save before, and raises if that failed and nobody has asked
      its future; the next save goes on. An existing checkpoint is a ``CheckpointExistsError``, before anything is
      written.
    - ``lock`` waits until tensors on devices are copied. ``prewarm_staging`` does nothing: memory that a save has
      staged into stays for the next.
    - ``load`` also loads what torch_checkpointing itself has saved, by torch_checkpointing. ``map_location`` and
      ``metadata_format`` have a meaning for these alone. Other dtypes are converted if that loses no value. Objects
      load under torch's ``weights_only`` rules, see ``Config.allow_pickle``.

    Of the configuration ``items``, ``default``, ``save`` and ``save.wait_timeout_secs`` count. Settings of its writer,
    barrier, staging and process have no meaning.

    Args:
        config: Configuration of the manager; None takes its default, which saves in the background.
        engine: Settings of saves and loads; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        UnsupportedError: The configuration has a storage, a layout, a resharder or a callback that our engine cannot
            use; the message says what to do.
    """

    def __init__(self, config: CheckpointManager.Config | None = None, *, engine: Config | None = None) -> None:
        # Not their own: it starts a process for saves, and a barrier for it.
        self._of_theirs = CheckpointManager.Config() if config is None else config
        self._engine = engine
        self._group = default_group()
        self._saving: SaveHandle[SaveReport] | None = None
        self._is_closed = False
        _check(self._of_theirs)

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[Any] | None:
        """Saves items; collective.

        Args:
            checkpoint_id: Path or URL of the checkpoint; the same on all ranks.
            checkpoint: The items by name.

        Returns:
            A future of the report; None if the configuration says to save in the foreground.

        Raises:
            RuntimeError: The manager is closed.
            KeyError: A required item is missing, or the configuration does not know an item.
            CheckpointError: The save failed, or the one before, and nobody has asked its future.
        """
        self._refuse_closed("save")
        refuse_tiers(f"{_CALL}.save", checkpoint_id)
        state = self._state_of(checkpoint)
        if self._saving is not None:  # however it ends: this save raises its failure if nobody has asked its future
            concurrent.futures.wait([self._saving.committed], self._of_theirs.save.wait_timeout_secs)
        options: dict[str, Any] = {"process_group": self._group, "overwrite": False, "config": self._engine}
        if isinstance(self._of_theirs.save, SyncCheckpointSaverConfig):
            save_state_dict(checkpoint_id, state, **options)
            return None
        self._saving = async_save_state_dict(checkpoint_id, state, **options)
        return self._saving.committed

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Loads items in place; collective.

        Args:
            checkpoint_id: Path or URL of a checkpoint of ours, of DCP, or of torch_checkpointing.
            into: The items by name: their tensors are filled, and their other values are replaced. None takes the items
                of the configuration, which must then be single objects.
            map_location: For checkpoints of torch_checkpointing alone.
            strict: Whether a key that the checkpoint does not have is an error. Otherwise what is there stays. A whole
                item that is missing is an error in any case.
            metadata_format: For checkpoints of torch_checkpointing alone.

        Returns:
            The items by name.

        Raises:
            RuntimeError: The manager is closed.
            KeyError: A required item is missing, or the configuration does not know an item.
            ValueError: There is neither ``into`` nor an item in the configuration.
            CheckpointError: The load failed, see ``load_state_dict``; for example ``KeyMismatchError``: the checkpoint
                has no such item, or none of this rank.
        """
        self._refuse_closed("load")
        if into is None:
            into = dict.fromkeys(self._of_theirs.items)
            if not into:
                raise ValueError(f"{_CALL}.load({checkpoint_id}): pass into=, or items in the configuration")
        self._check_items(into)
        if metadata_format is not None or _is_theirs(checkpoint_id):
            options = {"map_location": map_location, "strict": strict, "metadata_format": metadata_format}
            with contextlib.closing(CheckpointManager(_to_load(self._of_theirs))) as theirs:
                loaded: Mapping[str, Any] = theirs.load(checkpoint_id, into, **options)
                return loaded
        rank = 0 if self._group is None else self._group.rank()
        planner = _ItemPlanner(into, rank, LoadSpec(strict="model" if strict else False))
        load_state_dict(checkpoint_id, dict(into), process_group=self._group, planner=planner, config=self._engine)
        return planner.items()

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: memory that a save has staged into stays for the next one.

        Args:
            checkpoint: Items that are not looked at.
        """

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Waits until the state of the last save is copied; then it may be changed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving.staged], self._of_theirs.save.wait_timeout_secs)
        yield

    def close(self) -> None:
        """Waits for the last save; collective if one is under way. Further calls do nothing.

        Raises:
            CheckpointError: It failed.
            TimeoutError: It has not ended after ``save.wait_timeout_secs``.
        """
        if not self._is_closed:
            self._is_closed = True
            if self._saving is not None:
                self._saving.committed.result(self._of_theirs.save.wait_timeout_secs)

    def _refuse_closed(self, call: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{_CALL}.{call}: the manager is closed")

    def _check_items(self, items: Mapping[str, Any]) -> None:
        """Refuses items that the configuration does not allow, as theirs does."""
        config = self._of_theirs
        missing = sorted(name for name, spec in config.items.items() if spec.required and name not in items)
        unknown = sorted({*items} - {*config.items}) if config.default is None else []
        if missing or unknown:
            what = (
                f"lacks the required items {missing}" if missing else f"has {unknown}, for which there is no ItemSpec"
            )
            raise KeyError(f"{_CALL}: the checkpoint {what}: pass them, or change Config.items and Config.default")

    def _state_of(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is saved: the items under their names, those of this rank under names of their own."""
        self._check_items(checkpoint)
        rank = 0 if self._group is None else self._group.rank()
        state: dict[str, Any] = {}
        for name, value in checkpoint.items():
            spec = self._of_theirs.items.get(name, self._of_theirs.default)
            is_shared = spec.resharder is not None or _has_sharded(value)
            key = name if is_shared else _of_rank(name, rank)
            if key in state:
                raise ConfigError(f"{_CALL}.save: two items are stored as {key!r}: give one of them another name")
            state[key] = value
        return state


class _ItemPlanner(BcpLoadPlanner):
    """Loads each item from where it is in the checkpoint: below its name, or below that of this rank."""

    def __init__(self, into: Mapping[str, Any], rank: int, spec: LoadSpec) -> None:
        super().__init__(spec=spec)
        self.warns = False  # what is not asked for is theirs to know
        self._into, self._rank = into, rank
        self._keys: dict[str, str] = {}
        self._state: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None, "set_up_planner was given no metadata"
        stored = [key for key, *_ in checkpoint_of(metadata).contents()]
        above = {name for key in stored for name in _names_above(key)}
        there = above.union(stored)
        self._keys = {name: self._key_of(name, there) for name in self._into}
        for name, key in self._keys.items():
            if self._into[name] is None and key in above:
                raise ConfigError(
                    f"{_CALL}.load: the item {name!r} holds several values, and into= has none for it: pass what they "
                    "are put into"
                )
        self._state = {key: self._into[name] for name, key in self._keys.items()}
        super().set_up_planner(self._state, metadata, is_coordinator)

    def _key_of(self, name: str, there: set[str]) -> str:
        own = _of_rank(name, self._rank)
        if own in there:
            return own
        if name in there or (isinstance(self._into[name], dict | list | tuple) and not self._into[name]):
            return name
        has_others = any(key.startswith(f"{name}_") and key[len(name) + 1 :].isdecimal() for key in there)
        raise KeyMismatchError(
            f"{_CALL}.load: "
            + (
                f"each rank has saved an item {name!r} of its own, and there was no rank {self._rank}: leave it out of "
                "into=, or save it with a resharder, which makes it one for all ranks"
                if has_others
                else f"the checkpoint has no item {name!r}: leave it out of into="
            )
        )

    def items(self) -> dict[str, Any]:
        """Returns what was loaded, by item."""
        return {name: self._state[key] for name, key in self._keys.items()}


def _of_rank(name: str, rank: int) -> str:
    return f"{name}_{rank}"


def _names_above(key: str) -> Iterator[str]:
    """Yields the names that stand above a key: ``a`` and ``a.b`` above ``a.b.c``."""
    yield from (key[:end] for end, letter in enumerate(key) if letter == ".")


def _has_sharded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_sharded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_sharded, value))
    return isinstance(value, DTensor | ShardedTensor)


def _is_theirs(path: str | os.PathLike[str]) -> bool:
    """Whether torch_checkpointing itself has saved what is at a path. A checkpoint of DCP has a ``.metadata``."""
    place = as_place(path)
    return isinstance(place, Path) and place.is_dir() and not folder_at(place).has(".metadata")


def _to_load(config: CheckpointManager.Config) -> CheckpointManager.Config:
    """Returns the configuration of a manager of theirs that loads alone, so without a process and a barrier."""
    writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    return dataclasses.replace(config, save=SyncCheckpointSaverConfig(writer_config=writer))


def _check(config: CheckpointManager.Config) -> None:
    """Refuses settings that would have no effect, but must have one."""
    if not isinstance(config.save, SyncCheckpointSaverConfig | AsyncCheckpointSaverConfig):
        raise UnsupportedError(f"{_CALL}: save={config.save!r}: must be a SyncCheckpointSaverConfig, or an Async one")
    if config.storage_config is not None and type(config.storage_config) is not LocalFileSystemStorageConfig:
        raise UnsupportedError(
            f"{_CALL}: storage_config={config.storage_config!r}: our engine writes to paths and URLs itself: leave it "
            "out, and pass save() a path, or the URL of an object store"
        )
    for name, instead in _REFUSED.items():
        if getattr(config, name) is not None:
            raise UnsupportedError(f"{_CALL}: {name} cannot be called: {instead}")
    for name, spec in {"default": config.default, **config.items}.items():
        if spec is not None:
            _check_spec(name, spec)


def _check_spec(name: str, spec: ItemSpec) -> None:
    if spec.layout is not None:
        raise UnsupportedError(
            f"{_CALL}: the ItemSpec of {name!r} has a layout, {spec.layout.file_path}: a checkpoint of DCP has files "
            "of its own: leave it out; bcp convert writes safetensors of a checkpoint"
        )
    if spec.resharder is not None and type(spec.resharder) is not DefaultResharder:
        raise UnsupportedError(
            f"{_CALL}: the ItemSpec of {name!r} has a {type(spec.resharder).__name__}: only DefaultResharder is known, "
            "because another one may take plain tensors for parts: hold these in DTensors"
        )
