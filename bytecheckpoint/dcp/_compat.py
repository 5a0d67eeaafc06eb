# SPDX-License-Identifier: Apache-2.0
"""Every difference between torch versions, and uses of private names of torch. ``probes/of_torch.py`` says what for.

A name that torch does not have makes the features fail that need it, when they are used: importing this never does.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import types
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from bytecheckpoint import _C, _core
from bytecheckpoint.dcp import _collectives
from bytecheckpoint.dcp._sharded import copy_sharded
from bytecheckpoint.dcp.chunks import LocalChunks
from bytecheckpoint.errors import sendable
from bytecheckpoint.probes.of_torch import ENTRY_POINTS, GROUPS, META_TENSORS, NAMES_OF_2_3
from bytecheckpoint.probes.probe import find, holds, require

__all__ = [
    "PLAIN_DTYPES",
    "TORCH_SAVE",
    "DistWrapper",
    "HandleTrainingState",
    "ShardedTensor",
    "StorageInfo",
    "archived_pickle",
    "chunks_of",
    "close_connections",
    "current_stream",
    "flatten_as_2_3",
    "gives_shards",
    "gloo_between",
    "holds_more_than_itself",
    "host_copy",
    "increment_version",
    "init_meta_tensors",
    "is_fake",
    "is_gloo_on_host",
    "is_quantized_alike",
    "is_registered",
    "like_dtensor",
    "load_state",
    "narrow",
    "new_dtensor",
    "new_gloo_group",
    "new_metadata",
    "object_device",
    "plain_tensor",
    "quantization",
    "save_state",
    "set_element",
    "write_items_of",
]

_DCP = "torch.distributed.checkpoint"
# DCP's own readers want this very class in `Metadata.storage_data`.
StorageInfo: Any = find(f"{_DCP}.filesystem:_StorageInfo")

# The one serialization format that can be honoured.
TORCH_SAVE: Any = getattr(getattr(filesystem, "SerializationFormat", None), "TORCH_SAVE", None)

# The chunks that this rank holds of a tensor of any kind.
chunks_of: Callable[[torch.Tensor], list[ChunkStorageMetadata]] = find(f"{_DCP}.planner_helpers:_create_chunk_list")

# The WriteItems of a value of any kind.
write_items_of: Callable[[str, Any], list[WriteItem]] = find(f"{_DCP}.planner_helpers:_create_write_items")

# Puts a value where a path of keys says.
set_element: Any = find(f"{_DCP}._traverse:set_element")


class Absent:
    """Stands for a class that this torch does not have: nothing is an instance of it."""


StateDictStager: Any = find(f"{_DCP}._state_dict_stager:StateDictStager")
ShardedTensor: Any = find("torch.distributed._shard.sharded_tensor:ShardedTensor", Absent)
HandleTrainingState: Any = find("torch.distributed.fsdp._common_utils:HandleTrainingState")
DistWrapper: Any = find(f"{_DCP}.utils:_DistWrapper", Absent)
_is_wrapped_exception: Any = find(f"{_DCP}.api:_is_wrapped_exception")


class _GroupWrapper(DistWrapper):  # type: ignore[misc]
    """DCP's exchanges over a gloo group itself, also when the process has destroyed its groups meanwhile.

    What hooks raised is made such that it can be sent: DCP sends it as it is, and what cannot be unpickled ends the
    exchange, and only on the receiver.
    """

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        self._own = group if use_dist and group is not None and not is_fake(group) else None
        if self._own is None:
            super().__init__(group, use_dist, coordinator_rank)
            return
        self.group, self.use_dist = self._own, True
        self.coordinator_rank = self.global_coordinator_rank = coordinator_rank
        self.rank = self._own.rank()
        self.is_coordinator = self.rank == coordinator_rank

    def get_world_size(self) -> int:
        return super().get_world_size() if self._own is None else self._own.size()

    def gather_object(self, object: Any) -> Any:
        object = _sendable_failure(object)
        if self._own is None:
            return super().gather_object(object)
        return _collectives.gather(self._own, object, self.coordinator_rank)

    def all_gather_object(self, object: Any) -> Any:
        object = _sendable_failure(object)
        return super().all_gather_object(object) if self._own is None else _collectives.all_gather(self._own, object)

    def scatter_object(self, object_list: Any) -> Any:
        object_list = object_list and [_sendable_failure(value) for value in object_list]
        if self._own is None:
            return super().scatter_object(object_list)
        return _collectives.scatter(self._own, object_list, self.coordinator_rank)

    def broadcast_object(self, object: Any) -> Any:
        object = _sendable_failure(object)
        if self._own is None:
            return super().broadcast_object(object)
        return _collectives.broadcast(self._own, object, self.coordinator_rank)

    def barrier(self) -> None:
        if self._own is None:
            super().barrier()
        else:
            _collectives.barrier(self._own)


def _sendable_failure(value: Any) -> Any:
    """What DCP is about to send; if it is exceptions, such that can be sent."""
    if isinstance(value, CheckpointException):
        failures = {rank: (sendable(error), stack) for rank, (error, stack) in value.failures.items()}
        return CheckpointException(value.args[0], failures)
    if _is_wrapped_exception(value):
        error, stack = value
        return sendable(error), stack
    return value


def _unlogged(**_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """In the place of DCP's log of its steps, which asks the registry of groups, and fails where the group is gone."""
    return lambda step: step


def _over_group(function: Callable[..., Any], **others: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of DCP, with its ranks wrapped by the class above; DCP itself stays as it is."""
    function = inspect.unwrap(function)
    own = {"_DistWrapper": _GroupWrapper, "_dcp_method_logger": _unlogged}
    names = {**function.__globals__, **others, **own}
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _WithoutBeingAlone:
    """``warnings`` for DCP's ``load``: that it runs without process group is what callers of our entry points know."""

    @staticmethod
    def warn(message: str, *args: Any, **kwargs: Any) -> None:
        if not message.startswith("torch.distributed is disabled"):
            warnings.warn(message, *args, **kwargs)


# Made now, of names as they are without register().
if holds(ENTRY_POINTS):
    _save_flow = _over_group(find(f"{_DCP}.state_dict_saver:_save_state_dict"))
    _load_flow = _over_group(
        find(f"{_DCP}.state_dict_loader:load"),
        _load_state_dict=_over_group(find(f"{_DCP}.state_dict_loader:_load_state_dict")),
        warnings=_WithoutBeingAlone,
    )


def save_state(**arguments: Any) -> Metadata:
    """DCP's own flow of the hooks of a save. With a gloo group it needs no registry of groups.

    Raises:
        UnsupportedError: This torch is built otherwise.
    """
    require(ENTRY_POINTS)
    metadata: Metadata = _save_flow(**arguments)
    return metadata


def load_state(state_dict: dict[str, Any], **arguments: Any) -> None:
    """DCP's own flow of the hooks of a load, in the same way."""
    require(ENTRY_POINTS)
    _load_flow(state_dict, **arguments)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether it is torch's process group for dry runs, whose other ranks do not exist."""
    return "fake" in _backend_names(group)


def is_gloo_on_host(group: dist.ProcessGroup) -> bool:
    """Whether gloo moves its tensors of host memory."""
    return any(device.type == "cpu" and group._get_backend(device).name() == "gloo" for device in _devices(group))


def gloo_between(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``group``, in host memory, of which torch's registry knows nothing. Collective.

    ``new_group`` counts the groups of a process, and names groups by that count: it would change the names of those
    that the caller makes afterwards, and ranks that belong to different numbers of groups would not find each other.

    Args:
        name: The same on all ranks; of no other group that was made in this world.

    Raises:
        UnsupportedError: This torch is built otherwise; on all ranks.
    """
    require(GROUPS)
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(name, c10d._get_default_store())
    kind = c10d.ProcessGroup.BackendType.GLOO
    between: Any = c10d.ProcessGroup(store, group.rank(), group.size())
    between._set_default_backend(kind)
    gloo = c10d.ProcessGroupGloo(store, group.rank(), group.size())
    between._register_backend(torch.device("cpu"), kind, gloo)
    between._set_group_name(name)
    made: dist.ProcessGroup = between
    return made


def new_gloo_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """As ``dist.new_group`` makes and registers it. Collective over ``ranks``.

    Torch's own name for it has in it how many groups this rank belongs to: ranks of different numbers of groups would
    wait for each other under different names.

    Args:
        name: As for ``gloo_between``.
    """
    c10d: Any = dist.distributed_c10d
    theirs, wanted = c10d._process_group_name, sorted(ranks)

    def name_of(of: Any, *args: Any, **kwargs: Any) -> Any:
        return name if list(of) == wanted else theirs(of, *args, **kwargs)  # of another thread's

    c10d._process_group_name = name_of
    try:
        made: Any = dist.new_group(wanted, backend="gloo", use_local_synchronization=True)
    finally:
        c10d._process_group_name = theirs
    group: dist.ProcessGroup = made
    return group


def object_device(group: dist.ProcessGroup) -> torch.device:
    """Where ``group`` wants the tensors by which it sends objects."""
    c10d: Any = dist.distributed_c10d
    device: torch.device = c10d._get_object_coll_device(group)
    return device


def _backend_names(group: dist.ProcessGroup) -> set[str]:
    return {group._get_backend(device).name() for device in _devices(group)}


def _devices(group: dist.ProcessGroup) -> list[torch.device]:
    devices: list[torch.device] = group._device_types
    return devices


# Of messages that nobody sends.
_NO_TAG = 0xB9CDEAD


def close_connections(group: dist.ProcessGroup) -> None:
    """Ends all that is, or will be, under way on a gloo group, on this rank: with a RuntimeError, at once. Any thread.

    ``abort`` of torch 2.13 ends nothing that waits already. A receive that runs out of its time does, for gloo then
    closes all connections of the group; one with a peer whose connection is closed already does not.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def is_registered(group: dist.ProcessGroup) -> bool:
    """Has nobody destroyed it?"""
    c10d: Any = dist.distributed_c10d
    return group in c10d._world.pg_map


def init_meta_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """Replaces tensors on the meta device by empty ones, on the device of the default group, or else of torch."""
    if dist.is_available() and dist.is_initialized():
        require(META_TENSORS)
        # Of nested dicts it would lose values that it does not know.
        find(f"{_DCP}.planner_helpers:_init_state_dict")(tensors)
        return
    for fqn, tensor in tensors.items():
        tensors[fqn] = torch.empty_like(tensor, device=torch.get_default_device())
        if _C.is_marked_as_parts(tensor):
            _C.copy_marks(tensor, tensors[fqn])


def flatten_as_2_3(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As DCP flattened until torch 2.3; it has a global switch for that. Nothing where torch no longer has it."""
    if not holds(NAMES_OF_2_3):
        return {}, {}
    version: Any = find(f"{_DCP}._version")
    version._derived_version = "2_3"
    try:
        flat: tuple[dict[str, Any], dict[str, Any]] = find(f"{_DCP}._nested_dict:flatten_state_dict")(state_dict)
        return flat
    finally:
        version._derived_version = None


# Types whose elements are exactly their storage; any other subclass may mean something else.
_PLAIN_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


# Those of the format that this torch has.
PLAIN_DTYPES = frozenset(getattr(torch, name) for name in _core.dtype_names() if hasattr(torch, name))


def plain_tensor(value: object) -> torch.Tensor | None:
    """``value`` as a dense CPU tensor that holds its own elements, or None if it is none.

    Device tensors are copied to the host. A pending asynchronous collective is waited for. Conjugate and negative views
    are resolved.
    """
    if type(value) not in _PLAIN_TYPES:
        wait = getattr(value, "wait", None)
        if type(value).__name__ != "AsyncCollectiveTensor" or wait is None:
            return None
        value = wait()
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return None
    if value.device.type == "meta":
        return None
    tensor = value.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def gives_shards(value: object) -> bool:
    """Whether ``value`` gives DCP its elements by code of its own, in whatever memory. DTensor and ours have theirs."""
    kind = type(value)
    return kind not in _PLAIN_TYPES and kind not in (DTensor, LocalChunks) and hasattr(kind, "__get_tensor_shard__")


def host_copy(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of any value, on the host.

    Args:
        memo: As of ``copy.deepcopy``, for all values of one state: what two of them share is shared by the copies.
    """
    if type(value).__name__ == "AsyncCollectiveTensor":
        value = value.wait()
    if not isinstance(value, torch.Tensor):
        try:
            return copy.deepcopy(value, memo)
        except RuntimeError:  # tensors that autograd made cannot be deep-copied; DCP's own stager can
            if StateDictStager is None:
                raise
            stager = StateDictStager()
            copied = stager.stage(value)
            stager.close()
            return copied
    if isinstance(value, ShardedTensor):
        return copy_sharded(value, lambda tensor: host_copy(tensor, memo))
    copied = value.detach().clone()
    if copied.device.type not in ("cpu", "meta"):
        copied = copied.cpu()
    return copied.requires_grad_() if value.requires_grad else copied


def archived_pickle(file: io.BytesIO) -> bytes | None:
    """The pickle that ``torch.load`` finds in an archive, by torch's own reader; None of what is no archive to it."""
    if not torch.serialization._is_zipfile(file):
        return None
    return torch._C.PyTorchFileReader(file).get_record("data.pkl")


def current_stream(device: int) -> int:
    """The handle of the CUDA stream on ``device`` that this thread enqueues on."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def new_dtensor(local: torch.Tensor, spec: Any, requires_grad: bool) -> DTensor:
    """The DTensor of ``spec`` whose part here is ``local``."""
    make: Any = DTensor
    dtensor: DTensor = make(local, spec, requires_grad=requires_grad)
    return dtensor


def like_dtensor(dtensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor as ``dtensor`` is, but of ``local``."""
    return new_dtensor(local, dtensor._spec, dtensor.requires_grad)


def holds_more_than_itself(tensor: torch.Tensor) -> bool:
    """Would torch.save write more than the elements of ``tensor``, because it is a view of a larger storage?"""
    try:
        return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except (NotImplementedError, RuntimeError):
        return False  # a subclass without a storage of its own


def quantization(tensor: torch.Tensor) -> str:
    """What ``copy_`` would have to change besides elements, in words that are equal if and only if it is."""
    if not tensor.is_quantized:
        return f"{tensor.dtype}, not quantized"
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.dtype}, {scheme}, scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}"
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    return f"{tensor.dtype}, {scheme}, axis {axis}, scales {scales.tolist()}, zero points {points.tolist()}"


def is_quantized_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Both not, or with the same parameters."""
    return not (a.is_quantized or b.is_quantized) or quantization(a) == quantization(b)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The box of ``tensor`` of ``sizes`` elements at ``offsets``, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def new_metadata(**fields: Any) -> Metadata:
    """A ``Metadata``; fields that this torch does not have yet are set as attributes, as its unpickler would."""
    known = {name: fields.pop(name) for name in list(fields) if name in Metadata.__dataclass_fields__}
    metadata = Metadata(**known)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return metadata


def increment_version(tensors: list[torch.Tensor]) -> None:
    """Tells autograd that ``tensors`` were written to behind its back."""
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    if tracked:
        torch.autograd.graph.increment_version(tracked)
