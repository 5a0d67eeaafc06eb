# SPDX-License-Identifier: Apache-2.0
"""Strategies that let Megatron-Core's ``dist_checkpointing`` save and load through our engine.

::

    import bytecheckpoint.integrations.megatron

    bytecheckpoint.integrations.megatron.register()  # once on every rank, before the first save or load

From then on ``dist_checkpointing.save`` and ``load``, and so Megatron-LM, use our engine wherever they would use
Megatron's own strategies for ``torch_dist``. Or pass ``BcpSaveStrategy()`` and ``BcpLoadStrategy()`` as
``sharded_strategy``. The checkpoints are ordinary ones: either side loads what the other wrote.

Importing this module imports megatron.core.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.direct_calls import failing_planner
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.errors import InvalidPlanError, UnsupportedError
from bytecheckpoint.integrations._needs import refuse_tiers, require_for_import
from bytecheckpoint.probes.of_integrations import MEGATRON
from bytecheckpoint.runtime.patching import Replacing
from bytecheckpoint.state_dicts import SaveHandle, async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.tensors.chunks import LocalChunks

require_for_import(MEGATRON)

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

__all__ = ["BcpLoadStrategy", "BcpSaveStrategy", "register", "unregister"]

_Path = str | os.PathLike[str]
_R = TypeVar("_R")

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SAVED = "saved"  # a file that appears when this rank's part of a background save has ended
_LOOK_S = 0.05


class _Saves:
    """The methods of a save strategy.

    Attributes:
        bytecheckpoint_config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
    """

    bytecheckpoint_config: Config | None = None
    separation_hint: str | None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path) -> None:
        """Saves what this rank is the main replica of. Collective over the default group.

        The checkpoint is durable when the call returns. Megatron writes ``metadata.json`` afterwards.

        Args:
            sharded_state_dict: Nested dicts and lists of ``ShardedTensor`` and ``ShardedObject``. They are not changed.
            checkpoint_dir: Folder of the checkpoint. A checkpoint in it stays loadable until the new one is committed.

        Raises:
            CheckpointError: The save failed. All ranks raise; see ``save_state_dict``.
        """
        self._begin(save_state_dict, sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path, async_strategy: str = "mcore"
    ) -> AsyncRequest:
        """Begins a save in the background of this process. Collective over the default group.

        The state is copied when this returns, so that training may change it.

        Args:
            sharded_state_dict: See ``save``.
            checkpoint_dir: See ``save``.
            async_strategy: Must be ``mcore``. Megatron-Core 0.16 does not pass it.

        Returns:
            A request for Megatron's ``AsyncCallsQueue``. The process that this starts only waits until the save has
            ended. The request is finalized when all ranks have committed; if the save failed, that raises its
            ``CheckpointError`` on all ranks, and ``metadata.json`` is not written.

        Raises:
            CheckpointError: This rank cannot copy its state; the save then fails on all ranks.
            UnsupportedError: ``async_strategy`` is another one.
        """
        if async_strategy != "mcore":
            raise UnsupportedError(
                f"async_save({checkpoint_dir}): async_strategy={async_strategy!r} is not supported, because its queue "
                "is not Megatron-Core's: pass async_strategy='mcore' to dist_checkpointing.save, in Megatron-LM "
                "--async-strategy mcore. Our save runs in the background all the same"
            )
        handle = self._begin(async_save_state_dict, sharded_state_dict, checkpoint_dir)
        handle.staged.result()
        return _request(handle)

    def _begin(self, save: Callable[..., _R], sharded_state_dict: dict[str, Any], checkpoint_dir: _Path) -> _R:
        """Calls ``save`` with the state as our planner takes it. What is wrong with it fails the save on all ranks."""
        refuse_tiers("save", checkpoint_dir)
        config = self.bytecheckpoint_config or Config.from_env()
        state: dict[str, Any] = {}
        planner: Any = BcpSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, config=config)
        try:
            if self.separation_hint is not None:
                raise UnsupportedError(
                    f"save({checkpoint_dir}): separation_hint={self.separation_hint!r} is not supported, because a "
                    "rank writes one file: leave it out"
                )
            state = _state_of(_leaves(sharded_state_dict, is_to_save=True))
        except Exception as error:
            planner = failing_planner(error)
        return save(checkpoint_dir, state, planner=planner, config=config)


class _Loads:
    """The methods of a load strategy.

    Attributes:
        bytecheckpoint_config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
    """

    bytecheckpoint_config: Config | None = None

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: _Path, async_strategy: str = "mcore"
    ) -> dict[str, Any]:
        """Loads tensors, in place, and objects. Collective over the default group.

        Args:
            sharded_state_dict: Nested dicts and lists of ``ShardedTensor`` and ``ShardedObject``. Tensors without data
                get some, on the CPU.
            checkpoint_dir: Folder of a checkpoint of ours or of Megatron's, saved in any layout.
            async_strategy: Of Megatron's own reader; it has no effect.

        Returns:
            A copy of the nested dicts and lists with tensors and objects in the place of their descriptions.

        Raises:
            CheckpointError: The load failed. All ranks raise; see ``load_state_dict``.
        """
        refuse_tiers("load", checkpoint_dir)
        leaves: list[Any] = []
        state: dict[str, Any] = {}
        planner: Any
        try:
            leaves = _leaves(sharded_state_dict)
            _prepare_to_fill(sharded_state_dict, leaves)
            state = _state_of(leaves)
            planner = _Planner(leaves)
        except Exception as error:
            planner = _Planner((), error)
        load_state_dict(checkpoint_dir, state, planner=planner, config=self.bytecheckpoint_config)

        def loaded(leaf: Any) -> Any:
            return leaf.data if isinstance(leaf, ShardedTensor) else _next_of(state[leaf.unique_key], leaf.unique_key)

        result: dict[str, Any] = _mapped(sharded_state_dict, loaded)
        return result


class BcpSaveStrategy(_Saves, TorchDistSaveShardedStrategy):
    """Saves through our engine. Pass it to ``dist_checkpointing.save`` as ``sharded_strategy``.

    ``FullyParallelSaveStrategyWrapper(BcpSaveStrategy())`` works, too. The format is Megatron's ``torch_dist``, with
    our checksums beside it. A rank writes one file. Settings of Megatron's own writer, such as ``thread_count`` and
    ``cached_metadata``, have no effect: our planner keeps plans in any case.

    Args:
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables at each save.
    """

    def __init__(self, *, config: Config | None = None) -> None:
        super().__init__("torch_dist", 1)
        self.bytecheckpoint_config = config


class BcpLoadStrategy(_Loads, TorchDistLoadShardedStrategy):
    """Loads through our engine. Pass it to ``dist_checkpointing.load`` as ``sharded_strategy``.

    ``FullyParallelLoadStrategyWrapper(BcpLoadStrategy())`` works, too. Objects load under torch's ``weights_only``
    rules, to which Megatron-Core adds its own types. ``config=Config(allow_pickle=True)`` loads any, and may run code
    of the checkpoint.

    Args:
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables at each load.
    """

    def __init__(self, *, config: Config | None = None) -> None:
        super().__init__()
        self.bytecheckpoint_config = config


def register(*, config: Config | None = None) -> None:
    """Makes all ``torch_dist`` strategies of Megatron-Core save and load through our engine.

    It replaces ``save``, ``async_save`` and ``load`` of Megatron's two classes. So it reaches strategies that exist
    already, and those that Megatron-LM makes itself. A second call changes nothing.

    Args:
        config: Settings of saves and loads; None reads ``BYTECHECKPOINT_*`` variables at each of them.
    """
    _replacing.install(config=config)


def unregister() -> None:
    """Gives Megatron's classes their own methods back. It has no effect without ``register``."""
    _replacing.uninstall()


# What was replaced: class, name, and what the class itself had under it, if anything.
_replaced: list[tuple[type, str, tuple[Any, ...]]] = []


def _replace(config: Config | None) -> None:
    if _replaced:
        return
    for theirs, ours in ((TorchDistSaveShardedStrategy, _Saves), (TorchDistLoadShardedStrategy, _Loads)):
        methods = {name: value for name, value in vars(ours).items() if not name.startswith("__")}
        for name, value in {**methods, "bytecheckpoint_config": config}.items():
            _replaced.append((theirs, name, (vars(theirs)[name],) if name in vars(theirs) else ()))
            setattr(theirs, name, value)


def _give_back() -> None:
    while _replaced:
        theirs, name, before = _replaced.pop()
        if before:
            setattr(theirs, name, before[0])
        else:
            delattr(theirs, name)


_replacing = Replacing(_replace, _give_back)


class _Planner(BcpLoadPlanner):
    """Plans a load in which some tensors may have another shape than the stored ones (``allow_shape_mismatch``).

    Of these, what is stored within the wanted shape is loaded, and the rest is zero.

    Args:
        leaves: What is to be loaded.
        error: An error of this rank, with which the load fails on all ranks.
    """

    def __init__(self, leaves: Any, error: Exception | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._error = error
        self._flexible: dict[str, list[Any]] = {}
        for leaf in leaves:
            if isinstance(leaf, ShardedTensor) and leaf.allow_shape_mismatch:
                self._flexible.setdefault(leaf.key, []).append(leaf)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if self._error is not None:
            raise self._error
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None or not self._flexible:
            return
        for key, _, stored, *_ in checkpoint_of(metadata).contents():
            shards = self._flexible.get(key, ())
            if shards and tuple(stored) != tuple(shards[0].global_shape) and len(stored) == len(shards[0].global_shape):
                self.state_dict[key] = _cut(key, shards, tuple(stored))


def _mapped(tree: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Returns a copy of nested dicts and lists with what ``of_leaf`` makes of each value, called in their order."""
    if isinstance(tree, dict):
        return {key: _mapped(value, of_leaf) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, of_leaf) for value in tree]
    return of_leaf(tree)


def _leaves(tree: Any, *, is_to_save: bool = False) -> list[Any]:
    """Returns the descriptions in ``tree``, in its order; to be saved are those of main replicas.

    Raises:
        InvalidPlanError: Something else is in it, or nothing is there to be saved.
    """
    found: list[Any] = []

    def note(leaf: Any) -> None:
        if not isinstance(leaf, ShardedTensor | ShardedObject):
            raise InvalidPlanError(
                f"dist_checkpointing: a {type(leaf).__name__} is where a ShardedTensor or a ShardedObject must be: "
                "call dist_checkpointing.save and load, which take the other values out first"
            )
        if is_to_save and not is_main_replica(leaf.replica_id):
            return
        if is_to_save and isinstance(leaf, ShardedTensor):
            if leaf.data is None:
                raise InvalidPlanError(f"'{leaf.key}': the ShardedTensor has no data to save")
            if type(leaf.data) not in _PLAIN:
                raise UnsupportedError(
                    f"'{leaf.key}': a {type(leaf.data).__name__} cannot be saved, only plain tensors: give its "
                    "dequantized tensor to the ShardedTensor, or save with Megatron's own strategy"
                )
        found.append(leaf)

    _mapped(tree, note)
    return found


def _state_of(leaves: list[Any]) -> dict[str, Any]:
    """Returns a flat state of the descriptions: of a tensor all boxes of this rank, of an object a list of the values.

    A list, because Megatron stores one: a rank may have the same part of an object twice.
    """
    tensors: dict[str, list[Any]] = {}
    objects: dict[str, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            tensors.setdefault(leaf.key, []).append(leaf)
        else:
            objects.setdefault(leaf.unique_key, []).append(leaf.data)
    return {**{key: _chunks(key, shards) for key, shards in tensors.items()}, **objects}


def _next_of(values: Any, key: str) -> Any:
    """Returns the value of an object that is loaded: where several were saved under the key, each once."""
    if not isinstance(values, list) or not values:
        raise UnsupportedError(
            f"load: '{key}' is a {type(values).__name__} in the checkpoint, where Megatron-Core has a list of values: "
            "it was saved otherwise than by dist_checkpointing.save"
        )
    return values.pop(0) if len(values) > 1 else values[0]


def _box(shard: Any) -> torch.Tensor:
    """Returns the data of a shard as a view with the dims of the whole tensor: prepended axes have one element."""
    view: torch.Tensor = shard.data.detach()[(None,) * shard.prepend_axis_num]
    return view


def _chunks(key: str, shards: list[Any]) -> LocalChunks:
    first = shards[0]
    if any(shard.global_shape != first.global_shape or shard.dtype != first.dtype for shard in shards):
        described = ", ".join(sorted({f"{[*shard.global_shape]} {shard.dtype}" for shard in shards}))
        raise InvalidPlanError(f"'{key}': the ShardedTensors of this rank must have one shape and dtype: {described}")
    try:
        boxes = [_box(shard) for shard in shards]
        return LocalChunks(first.global_shape, [shard.global_offset for shard in shards], boxes, first.dtype)
    except ValueError as error:
        raise InvalidPlanError(f"'{key}': {error}") from error


def _cut(key: str, shards: list[Any], stored: tuple[int, ...]) -> LocalChunks:
    """Returns the boxes of ``shards`` that lie in a tensor of the shape ``stored``, and zeroes the shards."""
    offsets, boxes = [], []
    for shard in shards:
        box, at = _box(shard).zero_(), tuple(shard.global_offset)
        ends = [min(size, begin + length) for size, begin, length in zip(stored, at, box.shape, strict=True)]
        if all(begin < end for begin, end in zip(at, ends, strict=True)):
            offsets.append(at)
            boxes.append(box[tuple(slice(end - begin) for begin, end in zip(at, ends, strict=True))])
    try:
        return LocalChunks(stored, offsets, boxes, shards[0].dtype)
    except ValueError as error:
        raise InvalidPlanError(f"'{key}': {error}") from error


def _prepare_to_fill(tree: dict[str, Any], leaves: list[Any]) -> None:
    """Gives memory to the tensors that have none, and dequantizes those of TransformerEngine, as Megatron does."""
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            leaf.init_data("cpu")
    if any(isinstance(leaf, ShardedTensor) and type(leaf.data) not in _PLAIN for leaf in leaves):
        from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

        force_all_tensors_to_non_fp8(tree)
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor) and type(leaf.data) not in _PLAIN:
            raise UnsupportedError(
                f"'{leaf.key}': a {type(leaf.data).__name__} cannot be loaded into, only plain tensors: give one to "
                "the ShardedTensor, or load with Megatron's own strategy"
            )


def _request(handle: SaveHandle[Any]) -> AsyncRequest:
    """Returns a request that Megatron finalizes when the save has ended on all ranks.

    Megatron asks whether a process of its own still runs; without one it would finalize at once, and so block training.
    That process may be forked or spawned, so a file tells it.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="bytecheckpoint-"))
    except OSError:  # the other ranks go on, so this one must, too; only that it may block training
        return AsyncRequest(None, (), [handle.committed.result])

    def note(_: object) -> None:
        if folder.exists():
            (folder / _SAVED).touch()

    def finish() -> None:
        try:
            handle.committed.result()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    handle.committed.add_done_callback(note)
    return AsyncRequest(partial(_wait_until_saved, str(folder), os.getpid()), (), [finish])


def _wait_until_saved(folder: str, saver: int) -> None:
    """Waits until a save of the process ``saver`` has ended, or that process: the parent of this one, or this one."""
    at = Path(folder)
    while at.exists() and not (at / _SAVED).exists() and saver in (os.getpid(), os.getppid()):
        time.sleep(_LOOK_S)
