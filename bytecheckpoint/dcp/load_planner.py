# SPDX-License-Identifier: Apache-2.0
"""``BcpLoadPlanner``, the load planner for DCP."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._own_keys import OwnKeys
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import checkpoint_of, stored_checkpoint
from bytecheckpoint.errors import InvalidPlanError, KeyMismatchError, ShapeMismatchError, UnsupportedError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.load_spec.view import view_of
from bytecheckpoint.load_spec.wrapped_names import spec_that_loads
from bytecheckpoint.native import _C
from bytecheckpoint.planning.plan_items import LoadKeys, LoadTargets, PlanItems
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.tensors.casts import Cast, refused
from bytecheckpoint.tensors.dtensor_pieces import with_pieces
from bytecheckpoint.tensors.hidden_tensors import refuse_hidden_tensors
from bytecheckpoint.tensors.numbers import dtype_of_number, fill_with_number, has_value
from bytecheckpoint.tensors.sharded import flatten_sharded
from bytecheckpoint.tensors.stored_tensors import StoredTensor
from bytecheckpoint.tensors.subclass_context import difference
from bytecheckpoint.tensors.subclass_parts import DESCRIPTION, StoredKeys, with_stored_parts

__all__ = ["BcpLoadPlanner", "as_plain", "fills_state", "is_meant_to_fill"]

_CASTS_ALL = LoadSpec(cast="any")
# torch hands values of such keys to `set_extra_state` of a module, which may take a tensor and other values.
_EXTRA_STATE = "_extra_state"


class BcpLoadPlanner(DefaultLoadPlanner):
    """Plans a load in C++. It compares the names, shapes and dtypes of all keys before a byte is read.

    Pass it to ``dcp.load`` as ``planner``. It works with any ``StorageReader``. With ``BcpReader`` no Python code runs
    for a plain tensor in host memory, unless a subclass overrides a hook that DCP calls per tensor.

    Subclasses may use and override whatever subclasses of ``DefaultLoadPlanner`` may. The plan follows ``state_dict``,
    ``mappings``, ``original_state_dict`` and ``metadata`` as they are after ``set_up_planner``.

    Args:
        flatten_state_dict: Handle nested dicts and lists.
        flatten_sharded_tensors: Handle ShardedTensors within ShardedTensors, as FSDP over tensor parallelism makes
            them.
        allow_partial_load: Leave out keys that the checkpoint does not have, instead of raising; ``LoadReport`` names
            them.
        spec: What to load, under which names, in which form; see ``LoadSpec``. Needs ``BcpReader``. Its ``strict``
            takes the place of ``allow_partial_load``. None loads what the state asks for under its own names; tensors
            of another dtype are converted, with a warning if the new dtype lacks some values of the stored one.

    Attributes:
        warns: Whether the coordinator gives a RuntimeWarning if the ranks together load only some keys of a top-level
            part of the checkpoint, such as ``optimizer``. Parts that no rank asks for do not count.
            ``LoadReport.unexpected_keys`` names the keys even without the warning.
        refuses_lossy_casts: Whether a load without ``spec`` refuses casts that may lose values. Otherwise ``BcpReader``
            warns of them.
        numbers: Numbers that this load put into tensors without dims: key, type of the number, dtype of the tensor.
        rounded: Those of them that the dtype does not have exactly: key, and a clause for a warning.

    A load may fail with these errors, on all ranks and inside DCP's ``CheckpointException``: ``KeyMismatchError``
    (names all keys that are missing and all that nobody asks for), ``ShapeMismatchError`` (names all tensors of another
    shape, or of a dtype that ``spec`` does not allow; if keys are missing, the ``KeyMismatchError`` names these, too),
    ``ConfigError`` (``spec`` does not fit the checkpoint), ``InvalidPlanError``.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        spec: LoadSpec | None = None,
    ) -> None:
        require(SAVE_AND_LOAD)
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.warns = True
        self.spec = spec
        self.refuses_lossy_casts = False
        self.numbers: list[Cast] = []
        self.rounded: dict[str, str] = {}
        self._own_keys = OwnKeys()
        self._items: PlanItems[Any] | None = None
        self._subclasses: list[str] = []  # keys of tensors that may be stored by their parts
        self._descriptions: dict[str, Any] = {}  # of those that are, by key

    def __repr__(self) -> str:
        return described(
            self, flatten_state_dict=True, flatten_sharded_tensors=True, allow_partial_load=False, warns=True, spec=None
        )

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keeps the state dict, flattened if ``flatten_state_dict``.

        Tensors on the meta device are replaced by empty ones on the default device.
        """
        self.numbers, self.rounded, self._own_keys = [], {}, OwnKeys()
        CallContext.of_load(self)  # from here on the call sends failures safely, with any storage reader
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        flat, mappings = _C.flatten_state_dict(state_dict)
        special = _C.find_special_tensors(flat)
        if special.has_meta_tensor:
            _make_meta_tensors(state_dict)
            flat, mappings = _C.flatten_state_dict(state_dict)
        self._subclasses = special.subclasses
        if special.has_sharded_tensor and self.flatten_sharded_tensors:
            flat = flatten_sharded(flat)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat, mappings
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Returns a plan of all that this rank wants, and where it is in the checkpoint."""
        if self.metadata is None:
            raise AssertionError("set_up_planner was given no metadata")
        checkpoint, renamed = checkpoint_of(self.metadata), dict[str, str]()
        if self.spec is not None:
            checkpoint, renamed = self._view(self.metadata, self.spec)
        if self._subclasses:
            for key in self._subclasses:
                refuse_hidden_tensors(self.state_dict.get(key), key)
            stored = StoredKeys(checkpoint.has, checkpoint.names)
            self.state_dict, self.mappings, self._descriptions = with_stored_parts(
                self.state_dict, self.mappings, self._subclasses, stored
            )
        if self.flatten_state_dict and checkpoint.has_others_than(self.state_dict):
            self._use_names_of_2_3(checkpoint)
        if self.spec is not None and self.spec.as_stored:
            self._take_as_stored(checkpoint, self.spec)
        self.state_dict = with_pieces(self.state_dict, from_dcp=checkpoint.format == "dcp")
        plan = self._planned(checkpoint)
        self._items = PlanItems(plan)
        self._items.may_send_handle = _hooks.are_own(self, "create_global_plan")
        self._items.fills = LoadTargets(
            self.state_dict,
            getattr(self, "original_state_dict", self.state_dict).keys(),
            self.mappings if self.flatten_state_dict else {},
        )
        if self.spec is not None:
            self._items.loads = LoadKeys(self.spec, renamed, plan.casts())
        return LoadPlan(self._items)  # type: ignore[arg-type]  # DCP only needs a sequence

    def _planned(self, checkpoint: _C.Checkpoint) -> _C.ReadPlan:
        try:
            return _C.ReadPlan.of_state(
                checkpoint,
                dict(self.state_dict),
                _compat.chunks_of,
                allow_partial=self.allow_partial_load if self.spec is None else not self.spec.refuses_missing,
                refuse_unexpected=self.spec is not None and self.spec.refuses_unexpected,
                refuse_casts=self._why_not_cast,
            )
        except ShapeMismatchError as error:
            if f"{_EXTRA_STATE}'" not in str(error):
                raise
            way_out = f"LoadSpec(as_stored='*{_EXTRA_STATE}') takes such values as they are stored"
            raise ShapeMismatchError(f"{error}; {way_out}") from None
        except KeyMismatchError as error:
            stored = checkpoint.names()
            there = set(stored)
            way_out = spec_that_loads([key for key in self.state_dict if key not in there], stored, self.state_dict)
            if not way_out or not (self.spec is None or self.spec.changes_nothing):
                raise
            raise KeyMismatchError(f"{error} {way_out}") from None

    def _take_as_stored(self, checkpoint: _C.Checkpoint, spec: LoadSpec) -> None:
        """Puts what is stored of the keys that the spec names, without values, in the place of what the state has.

        Raises:
            UnsupportedError: A tensor is larger than the spec allows, or this torch does not have its dtype.
        """
        wanted = {key for key, value in self.state_dict.items() if _is_plain(value) and spec.is_as_stored(key)}
        for key, dtype, shape, _, record_bytes, *_ in checkpoint.contents() if wanted else ():
            if key not in wanted:
                continue
            value, stored = self.state_dict[key], StoredTensor.of(dtype, shape, record_bytes)
            new = None if stored is None else stored.as_stored(key, value, spec.as_stored_bytes)
            if new is not value:
                self._replace(key, new)

    def _replace(self, key: str, value: Any) -> None:
        """Puts a value into the flat state and into the caller's."""
        container, own_key = self.original_state_dict, key
        if self.flatten_state_dict:
            container, own_key = self._own_keys.container_of(self.original_state_dict, self.mappings[key])
        self.state_dict[key] = container[own_key] = value

    @staticmethod
    def _view(metadata: Metadata, spec: LoadSpec) -> tuple[_C.Checkpoint, dict[str, str]]:
        """Returns the checkpoint as ``spec`` describes it, and which keys have a new name there."""
        if spec.changes_nothing:
            return checkpoint_of(metadata), {}
        stored = stored_checkpoint(metadata)
        if stored is None:
            raise UnsupportedError(
                "BcpLoadPlanner(spec=...): include, exclude, rename and transforms need BcpReader, and metadata "
                "that nobody has looked into"
            )
        return view_of(stored, spec, _C)

    def _why_not_cast(self, casts: Sequence[Cast]) -> str:
        """Returns the clause of the error that names the casts which are refused; an empty one if none is."""
        others = [
            f"'{key}' is {stored}, to be loaded into {str(to).removeprefix('torch.')}"
            for key, stored, to in refused(casts, self._allowed_casts())
        ]
        if not others:
            return ""
        return (
            f"the stored dtypes differ: {listed(others)}; LoadSpec(cast='any') converts them, cast='widen' only where "
            "no value is lost"
        )

    def _allowed_casts(self) -> LoadSpec:
        return self.spec or (LoadSpec(cast="widen") if self.refuses_lossy_casts else _CASTS_ALL)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickles an object and puts it into the caller's state dict.

        Like DCP's planner, it runs the code that the pickle names. Unless ``Config(allow_pickle=True)``, ``BcpReader``
        passes only records that run no code.
        """
        self.put_object(read_item.dest_index.fqn, torch.load(value, weights_only=False))

    def put_object(self, fqn: str, value: Any) -> None:
        """Puts a loaded object into the caller's state dict, at the path of ``fqn`` and under the key that is there.

        A number fills a tensor without dims in place. The description of a tensor that is stored by its parts is
        compared instead.

        Raises:
            InvalidPlanError: It describes another tensor than the one whose parts were filled.
            ShapeMismatchError: There is a tensor at that path that cannot be filled with the object.
        """
        if fqn in self._descriptions:
            other = difference(value, self._descriptions[fqn])
            if other is not None:
                raise InvalidPlanError(f"'{fqn.removesuffix('.' + DESCRIPTION)}': {other}")
            return
        target = self.state_dict.get(fqn)
        if isinstance(target, torch.Tensor) and not fqn.endswith(_EXTRA_STATE):
            self._fill(fqn, target, value)
        elif self.flatten_state_dict:
            container, key = self._own_keys.container_of(self.original_state_dict, self.mappings[fqn])
            container[key] = value
        else:
            self.state_dict[fqn] = self.original_state_dict[fqn] = value

    def why_not_into_tensor(self, fqn: str, value: Any) -> str:
        """Returns why an object cannot be loaded into the tensor that the state has under ``fqn``; "" if it can be."""
        target = self.state_dict[fqn]
        dtype = str(target.dtype).removeprefix("torch.")
        dtype_of_value = dtype_of_number(value)
        if dtype_of_value is None or target.ndim:
            return (
                f"'{fqn}': stored is a value of type {type(value).__name__}, to be loaded into a tensor of "
                f"{[*target.shape]}; put None there for the stored value"
            )
        is_exact = has_value(target.dtype, value)
        if is_exact is None:
            return f"'{fqn}': stored is {value!r}, to be loaded into a tensor of {dtype}, which cannot hold it"
        if is_exact or not refused([(fqn, dtype_of_value, target.dtype)], self._allowed_casts()):
            return ""
        return (
            f"'{fqn}': stored is {value!r}, to be loaded into a tensor of {dtype}, which does not have this value; "
            "LoadSpec(cast='any') takes the nearest"
        )

    def _fill(self, fqn: str, target: torch.Tensor, value: Any) -> None:
        why_not = self.why_not_into_tensor(fqn, value)
        if why_not:
            raise ShapeMismatchError(why_not)
        try:
            fill_with_number(target, value)
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidPlanError(f"'{fqn}': the tensor cannot be filled with {value!r}: {error}") from error
        self.numbers.append((fqn, type(value).__name__, target.dtype))
        if not has_value(target.dtype, value):
            self.rounded[fqn] = f"'{fqn}' is {value!r}, loaded into {str(target.dtype).removeprefix('torch.')}"

    def _use_names_of_2_3(self, checkpoint: _C.Checkpoint) -> None:
        """Plans with the names that DCP gave to items of lists until torch 2.3, if the checkpoint has such names."""
        flat, mappings = _compat.flatten_as_2_3(self.original_state_dict)
        # Not `self.state_dict`: it leaves out a ShardedTensor of which this rank has no shard.
        names, _ = _C.flatten_state_dict(self.original_state_dict)
        if any(fqn not in names and checkpoint.has(fqn) for fqn in flat):
            self.state_dict = flatten_sharded(flat) if self.flatten_sharded_tensors else flat
            self.mappings = mappings


_hooks = Hooks(BcpLoadPlanner)
_dcps_hooks = Hooks(DefaultLoadPlanner)
_PER_TENSOR = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
_PER_ITEM = (*_PER_TENSOR, "load_bytes")


def as_plain(planner: object) -> BcpLoadPlanner | None:
    """Returns ``planner`` if its hooks per item need not be called, else None.

    They need not be called if they are those of this class and of DCP, and the state dict is a plain dict.
    """
    if isinstance(planner, BcpLoadPlanner) and _hooks.are_own(planner, *_PER_ITEM) and type(planner.state_dict) is dict:
        return planner
    return None


def fills_state(planner: LoadPlanner) -> bool:
    """Returns whether ``planner`` resolves tensors to memory of its state dict, as DCP's planner and ours do."""
    is_dcps = _hooks.are_own(planner, *_PER_TENSOR) or _dcps_hooks.are_own(planner, *_PER_TENSOR)
    return is_dcps and type(planner.state_dict) is dict  # type: ignore[attr-defined]


def is_meant_to_fill(planner: LoadPlanner) -> bool:
    """Returns whether the planner loads all of the state dict that it got. Other planners leave out keys on purpose."""
    return planner.warns if isinstance(planner, BcpLoadPlanner) else type(planner) is DefaultLoadPlanner


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or type(value) is torch.Tensor


def _make_meta_tensors(container: Any) -> None:
    """Replaces the meta tensors in ``container`` and in the containers within it.

    It changes the containers and not the flat dict, because a key need not equal its text in the flat name.
    """
    for key, value in [*(container.items() if isinstance(container, Mapping) else enumerate(container))]:
        if isinstance(value, torch.Tensor):
            # A ShardedTensor does not always know whether it is on the meta device. It keeps its shards, and the load
            # refuses to fill them.
            if not isinstance(value, ShardedTensor) and value.is_meta:
                made = {"": value}
                _compat.init_meta_tensors(made)
                container[key] = made[""]
        elif isinstance(value, Mapping | list):
            _make_meta_tensors(value)
