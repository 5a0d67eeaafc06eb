# SPDX-License-Identifier: Apache-2.0
"""Which boxes of which tensors this rank has in a state, and the keys of their changes in a delta."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.dcp.direct_calls import with_states
from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.native import _C
from bytecheckpoint.tensors.chunks import LocalChunks
from bytecheckpoint.tensors.dtensor_pieces import with_pieces

__all__ = ["OBJECT", "POSITIONS", "VALUES", "VERSION", "Held", "HeldBox", "box_of_key", "held_in", "key_of_box"]

POSITIONS, VALUES, OBJECT = "positions:", "values:", "object:"  # what keys of a delta begin with
VERSION = "version"  # a key that every delta has

_KEY = re.compile(rf"{POSITIONS}(.*)@([\d,]*)\+([\d,]*)", re.DOTALL)

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class HeldBox:
    """A box of a tensor, and the plain tensor of this rank that holds it.

    Attributes:
        fqn: Name of the tensor in the flat state.
        shape: Shape of the whole tensor.
        offsets: Where the box begins in it.
        tensor: What holds the box, on any device, with any strides.
        value: What stands in the state: the tensor itself, or what it is a part of.
    """

    fqn: str
    shape: Numbers
    offsets: Numbers
    tensor: torch.Tensor
    value: torch.Tensor

    @property
    def key(self) -> str:
        """Names the tensor and the box: what a key of a delta ends with."""
        return key_of_box(self.fqn, self.offsets, self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_on_host(self) -> bool:
        """Whether its memory can be read and written here."""
        return self.tensor.device.type == "cpu"

    @property
    def layout(self) -> tuple[str, Numbers, str]:
        """What must not change between a version and a delta that builds on it."""
        return self.key, self.shape, str(self.tensor.dtype)

    @property
    def memory(self) -> tuple[object, ...]:
        """What tells its memory from that of another tensor, and from itself after torch has written to it.

        The address alone does not: memory that was freed is handed out again. A weak reference is equal to another one
        only if both are of the same storage, or both are the same object.
        """
        tensor = self.tensor
        storage = weakref.ref(tensor.untyped_storage())
        layout = tensor.data_ptr(), tensor.stride(), str(tensor.dtype), str(tensor.device)
        return self.key, storage, layout, _num_writes(tensor), _num_writes(self.value)

    def overlaps(self, offsets: Numbers, sizes: Numbers) -> bool:
        """Whether it has elements of another box of the same tensor."""
        return all(
            max(mine, other) < min(mine + my_size, other + size)
            for mine, my_size, other, size in zip(self.offsets, self.tensor.shape, offsets, sizes, strict=True)
        )


@dataclass(frozen=True)
class Held:
    """What this rank has of a state: boxes with elements, and objects.

    Attributes:
        boxes: The boxes, in the order of the state.
        objects: What is no tensor, by its name in the flat state.
        state: The state, with each ``Stateful`` replaced by what its ``state_dict()`` returned, which is called once.
        tensors: Name, shape and dtype of each tensor, of those, too, of which this rank has no elements.
        paths: For each name in the flat state, its path through nested dicts and lists.
    """

    boxes: tuple[HeldBox, ...]
    objects: dict[str, Any]
    state: dict[str, Any]
    tensors: tuple[tuple[str, Numbers, str], ...]
    paths: Mapping[str, Sequence[str | int]]

    @property
    def layout(self) -> tuple[object, ...]:
        """What must not change between a version and a delta that builds on it."""
        return (*(box.layout for box in self.boxes), *self.tensors, *self.objects)

    @property
    def memory(self) -> tuple[object, ...]:
        """What tells the tensors that were filled from others, and whether they were written to since."""
        return tuple(box.memory for box in self.boxes)

    def put(self, state: Any, fqn: str, value: Any) -> None:
        """Replaces an object in the nested state that this was made of, or fills the tensor that is there."""
        if fqn not in self.objects:
            for box in self.boxes:
                if box.fqn == fqn:
                    box.tensor.copy_(value)
            return
        *parents, last = self.paths[fqn]
        for name in parents:
            state = state[name]
        state[last] = value


def held_in(call: tuple[str, str], state: Mapping[str, Any], *, is_filled: bool = False) -> Held:
    """Returns what this rank has of a state. Local.

    Args:
        call: What is being done, and its path, for errors.
        state: Nested dicts and lists of tensors and objects.
        is_filled: Whether the state is to be filled: then its tensors must be in it, and not be made by a ``Stateful``.

    Raises:
        ConfigError: It is no dict; or has a ``Stateful`` and is to be filled.
        UnsupportedError: A tensor is of a kind that cannot be published. The message names it.
        InvalidPlanError: The boxes of a DTensor are not known.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"{call[0]}({call[1]}): the state must be a dict, got a {type(state).__name__}")
    plain = with_states(state)
    changed = next((key for key, value in plain.items() if value is not state[key]), None)
    if is_filled and changed is not None:
        raise ConfigError(
            f"{call[0]}({call[1]}): '{changed}' is a {type(state[changed]).__name__}: pass the tensors to be filled, "
            "such as those of its state_dict()"
        )
    flat, paths = _C.flatten_state_dict(plain)
    boxes: list[HeldBox] = []
    objects: dict[str, Any] = {}
    for fqn, value in with_pieces(flat).items():
        if isinstance(value, torch.Tensor):
            boxes += _boxes_of(call, fqn, value, flat[fqn])
        else:
            objects[fqn] = value
    tensors = tuple((fqn, tuple(v.shape), str(v.dtype)) for fqn, v in flat.items() if isinstance(v, torch.Tensor))
    return Held(tuple(box for box in boxes if box.tensor.numel() > 0), objects, plain, tensors, paths)


def key_of_box(fqn: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Returns what a key of a delta ends with."""
    return f"{fqn}@{','.join(map(str, offsets))}+{','.join(map(str, sizes))}"


def box_of_key(key: str) -> tuple[str, Numbers, Numbers] | None:
    """Returns name, offsets and sizes of the box whose positions a key of a delta names; None for any other key."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    offsets, sizes = (tuple(int(number) for number in text.split(",") if number) for text in (match[2], match[3]))
    return (match[1], offsets, sizes) if len(offsets) == len(sizes) else None


def _num_writes(tensor: torch.Tensor) -> int:
    """Returns how often torch has written to it. What is written through a DTensor does not count for its local one."""
    return 0 if tensor.is_inference() else tensor._version  # an inference tensor does not count


def _boxes_of(call: tuple[str, str], fqn: str, value: torch.Tensor, whole: torch.Tensor) -> list[HeldBox]:
    shape = tuple(value.shape)
    if type(value) is LocalChunks:
        parts = list(zip(value.offsets, value.tensors, strict=True))
    elif type(value) is DTensor and not any(placement.is_partial() for placement in value.placements):
        with torch.no_grad():
            local = value.to_local()
        offsets = [tuple(chunk.offsets) for chunk in _compat.chunks_of(value)] if local.numel() else []
        parts = [(at, local) for at in offsets]
    elif type(value) in (torch.Tensor, torch.nn.Parameter) and not _C.is_marked_as_parts(value):
        parts = [((0,) * value.ndim, value)]
    else:
        _refuse(call, fqn, value)
    return [HeldBox(fqn, shape, at, _plain(call, fqn, tensor), whole) for at, tensor in parts]


def _plain(call: tuple[str, str], fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        _refuse(call, fqn, tensor)
    if tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
        _refuse(call, fqn, tensor)
    return tensor.detach()


def _refuse(call: tuple[str, str], fqn: str, value: torch.Tensor) -> Any:
    raise UnsupportedError(
        f"{call[0]}({call[1]}): '{fqn}' is a {type(value).__qualname__} of {value.dtype}, {value.layout}, on "
        f"{value.device}: plain tensors with memory, DTensors of them and LocalChunks can be published; leave it out "
        "of the state, or pass its parts"
    )
