# SPDX-License-Identifier: Apache-2.0
"""Every difference between versions of torch, and every use of its private names.

``probes/of_torch.py`` says what each name is used for. If torch lacks a name, the features that need it raise when they
are used. Importing this module never fails.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from bytecheckpoint.native import _C, _core
from bytecheckpoint.probes.of_torch import GROUPS, META_TENSORS, NAMES_OF_2_3
from bytecheckpoint.probes.probe import find, holds, require
from bytecheckpoint.runtime.patching import Replacing
from bytecheckpoint.tensors.chunks import LocalChunks
from bytecheckpoint.tensors.sharded import copy_sharded

__all__ = [
    "PLAIN_DTYPES",
    "TORCH_SAVE",
    "HandleTrainingState",
    "ShardedTensor",
    "StorageInfo",
    "archived_pickle",
    "chunks_of",
    "close_connections",
    "current_stream",
    "default_store",
    "flatten_as_2_3",
    "gives_shards",
    "gloo_between",
    "has_lost",
    "holds_more_than_itself",
    "host_copy",
    "increment_version",
    "init_meta_tensors",
    "is_fake",
    "is_gloo_on_host",
    "is_quantized_alike",
    "is_registered",
    "like_dtensor",
    "narrow",
    "new_dtensor",
    "new_gloo_group",
    "new_metadata",
    "object_device",
    "plain_tensor",
    "quantization",
    "write_items_of",
]

_DCP = "torch.distributed.checkpoint"
# DCP's own readers expect objects of this class in `Metadata.storage_data`.
StorageInfo: Any = find(f"{_DCP}.filesystem:_StorageInfo")

# The only serialization format that the writer supports.
TORCH_SAVE: Any = getattr(getattr(filesystem, "SerializationFormat", None), "TORCH_SAVE", None)

# Returns the chunks that this rank holds of a tensor of any kind.
chunks_of: Callable[[torch.Tensor], list[ChunkStorageMetadata]] = find(f"{_DCP}.planner_helpers:_create_chunk_list")

# Returns the WriteItems of a value of any kind.
write_items_of: Callable[[str, Any], list[WriteItem]] = find(f"{_DCP}.planner_helpers:_create_write_items")


class Absent:
    """Stands for a class that this torch does not have: nothing is an instance of it."""


StateDictStager: Any = find(f"{_DCP}._state_dict_stager:StateDictStager")
ShardedTensor: Any = find("torch.distributed._shard.sharded_tensor:ShardedTensor", Absent)
HandleTrainingState: Any = find("torch.distributed.fsdp._common_utils:HandleTrainingState")


def is_fake(group: dist.ProcessGroup) -> bool:
    """Returns whether ``group`` is torch's process group for dry runs, whose other ranks do not exist."""
    return "fake" in _backend_names(group)


def is_gloo_on_host(group: dist.ProcessGroup) -> bool:
    """Returns whether ``group`` uses gloo for tensors in host memory."""
    return any(device.type == "cpu" and group._get_backend(device).name() == "gloo" for device in _devices(group))


def gloo_between(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Makes a gloo group of the ranks of ``group``, for host memory, without torch's registry of groups. Collective.

    ``new_group`` would not do. It counts the groups of a process and names groups by that count. So it would change the
    names of groups that the caller makes later, and ranks that belong to different numbers of groups would not find
    each other.

    Args:
        group: Group whose ranks the new group has.
        name: Name of the new group, the same on all ranks. No other group of this world may have had it.

    Raises:
        UnsupportedError: This version of torch lacks what the group is made of. All ranks raise it.
    """
    require(GROUPS)
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(name, default_store())
    kind = c10d.ProcessGroup.BackendType.GLOO
    between: Any = c10d.ProcessGroup(store, group.rank(), group.size())
    between._set_default_backend(kind)
    gloo = c10d.ProcessGroupGloo(store, group.rank(), group.size())
    between._register_backend(torch.device("cpu"), kind, gloo)
    between._set_group_name(name)
    made: dist.ProcessGroup = between
    return made


def new_gloo_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Makes and registers a gloo group with ``dist.new_group``, but under a name of our own. Collective over ``ranks``.

    torch's name for the group contains the number of groups that this rank belongs to. Ranks that belong to different
    numbers of groups would wait for each other under different names.

    Args:
        ranks: Global ranks of the group.
        name: Name of the group, the same on all ranks. No other group of this world may have had it.
    """
    with _naming.block():
        _of_thread.name = name
        try:
            made: Any = dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True)
        finally:
            _of_thread.name = None
    group: dist.ProcessGroup = made
    return group


_of_thread = threading.local()  # its attribute `name` is the name of the group that the thread makes now
_naming_of_torch: list[Callable[..., str]] = []


def _begin_naming() -> None:
    c10d: Any = dist.distributed_c10d
    if _naming_of_torch:
        return
    theirs = c10d._process_group_name

    def name_of(*args: Any, **kwargs: Any) -> Any:
        return getattr(_of_thread, "name", None) or theirs(*args, **kwargs)

    c10d._process_group_name = name_of
    _naming_of_torch.append(theirs)


def _end_naming() -> None:
    c10d: Any = dist.distributed_c10d
    c10d._process_group_name = _naming_of_torch.pop()


# Several threads may make groups at once, so the replacement is counted.
_naming = Replacing(_begin_naming, _end_naming)


def object_device(group: dist.ProcessGroup) -> torch.device:
    """Returns the device on which ``group`` needs the tensors with which it sends objects."""
    c10d: Any = dist.distributed_c10d
    device: torch.device = c10d._get_object_coll_device(group)
    return device


def _backend_names(group: dist.ProcessGroup) -> set[str]:
    return {group._get_backend(device).name() for device in _devices(group)}


def _devices(group: dist.ProcessGroup) -> list[torch.device]:
    devices: list[torch.device] = group._device_types
    return devices


# Nobody sends messages with this tag.
_NO_TAG = 0xB9CDEAD


def close_connections(group: dist.ProcessGroup) -> None:
    """Ends all current and later operations on a gloo group on this rank, at once and with a RuntimeError. Any thread.

    It does not end the wait for a message that has travelled in part: see ``distributed/waits.py``.

    It receives from each peer with a timeout of 1 ms, because gloo closes all connections of the group when a receive
    times out. A receive from one peer is not enough: if its connection is closed already, the others stay open.
    ``abort`` of torch 2.13 would not do, because it does not end operations that already wait.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def has_lost(group: dist.ProcessGroup, peer: int) -> bool:
    """Returns whether the connection to ``peer`` of a gloo group has ended. Does not wait, and changes nothing.

    It begins to send what the peer never receives. gloo refuses that at once on a connection that has ended; else it
    only tells the peer that there is something to receive.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    try:
        backend.send([torch.empty(1, device="cpu")], peer, _NO_TAG)
    except RuntimeError:
        return True
    return False


def default_store() -> Any:
    """Returns the store of the default group."""
    c10d: Any = dist.distributed_c10d
    return c10d._get_default_store()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Returns whether ``group`` is in torch's registry, so that nobody has destroyed it."""
    c10d: Any = dist.distributed_c10d
    return group in c10d._world.pg_map


def init_meta_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """Replaces tensors on the meta device by empty ones.

    They are on the device of the default group, if there is one, else on torch's default device.

    Args:
        tensors: Flat dict of tensors; changed in place.
    """
    if dist.is_available() and dist.is_initialized():
        require(META_TENSORS)
        # In a nested dict DCP's function would lose values of types that it does not know; this dict is flat.
        find(f"{_DCP}.planner_helpers:_init_state_dict")(tensors)
        return
    for fqn, tensor in tensors.items():
        tensors[fqn] = torch.empty_like(tensor, device=torch.get_default_device())
        if _C.is_marked_as_parts(tensor):
            _C.copy_marks(tensor, tensors[fqn])


def flatten_as_2_3(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flattens a state dict as DCP did until torch 2.3, with a global switch that DCP has for that.

    Returns:
        The flat dict and the mappings; both are empty if this version of torch no longer has the switch.
    """
    if not holds(NAMES_OF_2_3):
        return {}, {}
    version: Any = find(f"{_DCP}._version")
    version._derived_version = "2_3"
    try:
        flat: tuple[dict[str, Any], dict[str, Any]] = find(f"{_DCP}._nested_dict:flatten_state_dict")(state_dict)
        return flat
    finally:
        version._derived_version = None


# For these types the elements of a tensor are those in its storage. For any other subclass they may be something else.
_PLAIN_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


# The dtypes of the format that this version of torch has.
PLAIN_DTYPES = frozenset(getattr(torch, name) for name in _core.dtype_names() if hasattr(torch, name))


def plain_tensor(value: object) -> torch.Tensor | None:
    """Returns ``value`` as a dense CPU tensor that holds its own elements; None if it is not such a tensor.

    It copies device tensors to the host, waits for a pending asynchronous collective, and resolves conjugate and
    negative views.
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
    """Returns whether ``value`` gives DCP its shards by code of its own, so that any memory may be returned.

    DTensor and ``LocalChunks`` also have such code, but they are known to return their own memory.
    """
    kind = type(value)
    return kind not in _PLAIN_TYPES and kind not in (DTensor, LocalChunks) and hasattr(kind, "__get_tensor_shard__")


def host_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy of any value, on the host.

    Args:
        value: Value to copy.
        memo: Memo of ``copy.deepcopy``. Pass the same one for all values of a state: objects that two values share are
            then shared by the copies.

    Raises:
        RuntimeError: It cannot be copied.
    """
    if type(value).__name__ == "AsyncCollectiveTensor":
        value = value.wait()
    if not isinstance(value, torch.Tensor):
        try:
            return copy.deepcopy(value, memo)
        except RuntimeError:  # tensors that autograd made cannot be deep-copied; DCP's stager copies them
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


# An archive of torch.save begins with this. Its older files do not.
_ARCHIVE = b"PK\x03\x04"


def archived_pickle(file: io.BytesIO) -> bytes | None:
    """Returns the pickle that ``torch.load`` finds in an archive, read by torch's own reader.

    Returns None if ``torch.load`` does not take the file for an archive.
    """
    with file.getbuffer() as data:
        if data[: len(_ARCHIVE)] != _ARCHIVE:
            return None
    return torch._C.PyTorchFileReader(file).get_record("data.pkl")


def current_stream(device: int) -> int:
    """Returns the handle of this thread's current CUDA stream on ``device``."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def new_dtensor(local: torch.Tensor, spec: Any, requires_grad: bool) -> DTensor:
    """Returns a DTensor with the specification ``spec`` and the local tensor ``local``."""
    make: Any = DTensor
    dtensor: DTensor = make(local, spec, requires_grad=requires_grad)
    return dtensor


def like_dtensor(dtensor: DTensor, local: torch.Tensor) -> DTensor:
    """Returns a DTensor like ``dtensor`` with the local tensor ``local``."""
    return new_dtensor(local, dtensor._spec, dtensor.requires_grad)


def holds_more_than_itself(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is a view of a larger storage.

    torch.save would then write the whole storage, and not only the elements of the tensor.
    """
    try:
        return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except (NotImplementedError, RuntimeError):
        return False  # a subclass that has no storage of its own


def quantization(tensor: torch.Tensor) -> str:
    """Returns the dtype and the quantization of ``tensor`` as text.

    For a quantized target ``copy_`` changes only elements if and only if both texts are equal.
    """
    if not tensor.is_quantized:
        return f"{tensor.dtype}, not quantized"
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.dtype}, {scheme}, scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}"
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    return f"{tensor.dtype}, {scheme}, axis {axis}, scales {scales.tolist()}, zero points {points.tolist()}"


def is_quantized_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether neither tensor is quantized, or both are with the same parameters."""
    return not (a.is_quantized or b.is_quantized) or quantization(a) == quantization(b)


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Returns a view of the box of ``tensor`` that has ``sizes`` elements per dim and begins at ``offsets``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def new_metadata(**fields: Any) -> Metadata:
    """Returns a ``Metadata``. Fields that this version of torch lacks are set as attributes, as its unpickler does."""
    known = {name: fields.pop(name) for name in list(fields) if name in Metadata.__dataclass_fields__}
    metadata = Metadata(**known)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return metadata


def increment_version(tensors: list[torch.Tensor]) -> None:
    """Tells autograd that ``tensors`` were written to without its knowledge."""
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    if tracked:
        torch.autograd.graph.increment_version(tracked)
