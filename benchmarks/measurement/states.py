# SPDX-License-Identifier: Apache-2.0
"""States to save and load. Their content is reproducible, so that a load can be checked byte by byte."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Tree = dict[str, Any]

# Content is made and compared in pieces of this size, so a tensor of 8 GiB needs no second one in memory.
_PIECE_BYTES = 64 << 20
_LEAST_INT64 = -(1 << 63)


class WrongContentError(Exception):
    """A load returned content that differs from what was saved."""


class State:
    """A tree of dicts and lists whose leaves are tensors of seeded random bits, and plain values.
    Bits are random because a disk or a host may be fast with zeros. They include NaN, so bytes are compared, not
    numbers.

    Args:
        description: The state in a few words, for tables.
        tree: The tree. Its tensors need no content yet. They must be contiguous.
    """

    def __init__(self, description: str, tree: Tree) -> None:
        self.description = description
        self.tree = tree
        self._values = {name: copy.deepcopy(value) for name, _, _, value in _leaves(tree) if not _is_tensor(value)}
        tensors = list(self.named_tensors().values())
        self.num_tensors = len(tensors)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        for seed, tensor in enumerate(tensors):
            for piece, bits in _pieces(tensor, seed):
                piece.copy_(bits)

    @property
    def has_plain_values(self) -> bool:
        return bool(self._values)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by dotted name, in the order of the tree."""
        return {name: value for name, _, _, value in _leaves(self.tree) if _is_tensor(value)}

    def blank(self) -> None:
        """Zeroes every tensor and removes every plain value, so that only a load can bring them back."""
        for _, parent, key, value in list(_leaves(self.tree)):
            if _is_tensor(value):
                value.zero_()
            else:
                parent[key] = None

    def check(self) -> None:
        """Raises WrongContentError, which names the leaf, unless every byte and value has its original content."""
        for seed, (name, tensor) in enumerate(self.named_tensors().items()):
            for piece, bits in _pieces(tensor, seed):
                if not torch.equal(piece, bits.to(piece.device)):
                    raise WrongContentError(f"'{name}' has other bytes than were saved")
        values = {name: value for name, _, _, value in _leaves(self.tree) if not _is_tensor(value)}
        if values != self._values:
            raise WrongContentError(f"plain values: wanted {self._values}, got {values}")


def copy_into(target: Tree, source: Tree) -> None:
    """Copies a loaded tree into existing tensors, as a program must if its loader returns new ones."""
    found = {name: value for name, _, _, value in _leaves(source)}
    for name, parent, key, value in list(_leaves(target)):
        if _is_tensor(value):
            if value is not found[name]:
                value.copy_(found[name])
        else:
            parent[key] = found[name]


@dataclass(frozen=True)
class Kind:
    """A kind of state: how to make it, and its usual size in GB (10^9 bytes)."""

    meaning: str
    gigabytes: float
    make: Callable[[float], State]


def _like_one(shape: tuple[int, ...], dtype: torch.dtype, size: str, flat: bool = False) -> Callable[[float], State]:
    """Returns a maker of tensors of one shape below one key, like a model's.

    ``flat`` puts them at the top, where DCP logs each key separately.
    """

    def make(gigabytes: float) -> State:
        one_bytes = torch.Size(shape).numel() * dtype.itemsize
        count = max(1, round(gigabytes * 1e9 / one_bytes))
        tree: Tree = {f"layers.{i}.weight": torch.empty(shape, dtype=dtype) for i in range(count)}
        total = f"{count * one_bytes / 1e9:.2f} GB"
        return State(f"{total} in {count:,} tensor{'s' * (count > 1)} of {size}", tree if flat else {"model": tree})

    return make


def _huge(gigabytes: float) -> State:
    side = max(64, int((gigabytes * 1e9 / 2) ** 0.5) // 64 * 64)
    tensor = torch.empty(side, side, dtype=torch.bfloat16)
    return State(f"one tensor of {tensor.nbytes / 1e9:.2f} GB", {"weight": tensor})


def _adamw(gigabytes: float) -> State:
    """Makes parameters of 16 KiB with AdamW's moments and steps, four tensors each, nested as torch nests them."""
    names = [f"layers.{i}.weight" for i in range(max(1, round(gigabytes * 1e9 / (3 * 16384))))]
    tree: Tree = {
        "model": {name: torch.empty(4096) for name in names},
        "optimizer": {
            "state": {
                name: {"step": torch.empty(()), "exp_avg": torch.empty(4096), "exp_avg_sq": torch.empty(4096)}
                for name in names
            },
            "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "fused": None, "params": names}],
        },
    }
    state = State("", tree)
    state.description = f"{state.num_bytes / 1e9:.2f} GB of small model and AdamW in {state.num_tensors:,} tensors"
    return state


def _optimizer(gigabytes: float) -> State:
    """Makes a transformer's bf16 parameters and AdamW's float32 moments: matrices, norms, biases, scalars, values."""
    width = 1024 if gigabytes >= 0.25 else 128
    shapes: dict[str, tuple[int, ...]] = {
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "mlp.up.weight": (4 * width, width),
        "mlp.up.bias": (4 * width,),
        "mlp.down.weight": (width, 4 * width),
        "mlp.down.bias": (width,),
        "norm1.weight": (width,),
        "norm2.weight": (width,),
    }
    layer_bytes = 10 * sum(torch.Size(shape).numel() for shape in shapes.values())
    layers = max(1, round(gigabytes * 1e9 / layer_bytes))
    named = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}
    state = State(
        "",
        {
            "model": {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in named.items()},
            "optimizer": {
                "state": {
                    name: {"step": torch.empty(()), "exp_avg": torch.empty(shape), "exp_avg_sq": torch.empty(shape)}
                    for name, shape in named.items()
                },
                "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "fused": None, "params": list(named)}],
            },
            "progress": {"step": 1000, "epoch": 2, "loss": 1.25},
        },
    )
    state.description = f"{state.num_bytes / 1e9:.2f} GB of model and AdamW in {state.num_tensors:,} tensors"
    return state


KINDS = {
    "large": Kind("bf16 tensors of 11 MiB", 1.0, _like_one((2048, 2752), torch.bfloat16, "11 MiB")),
    "small": Kind("float32 tensors of 16 KiB", 20_000 * 16384 / 1e9, _like_one((4096,), torch.float32, "16 KiB")),
    "flat": Kind(
        "the same, each a key of the top dict",
        20_000 * 16384 / 1e9,
        _like_one((4096,), torch.float32, "16 KiB", flat=True),
    ),
    "adamw": Kind("model and AdamW, nested, float32 of 16 KiB", 5_000 * 3 * 16384 / 1e9, _adamw),
    "many": Kind("float32 tensors of 1 KiB", 100_000 * 1024 / 1e9, _like_one((256,), torch.float32, "1 KiB")),
    "million": Kind(
        "float32 tensors of 256 bytes", 1_000_000 * 256 / 1e9, _like_one((64,), torch.float32, "256 bytes")
    ),
    "huge": Kind("one bf16 tensor", (8 << 30) / 1e9, _huge),
    "optimizer": Kind("nested dicts: bf16 model, float32 moments, scalars, plain values", 1.0, _optimizer),
}


def make_state(kind: str, gigabytes: float | None = None, device: str = "cpu") -> State:
    """Makes a state of one of the ``KINDS`` on a device, of its usual size unless ``gigabytes`` is given."""
    with torch.device(device):
        return KINDS[kind].make(KINDS[kind].gigabytes if gigabytes is None else gigabytes)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields (dotted name, container, key in it, value) of every leaf.

    A list is a leaf unless it holds dicts, as in DCP.
    """
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(entry, dict) for entry in value)):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", node, key, value


def _pieces(tensor: torch.Tensor, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the bytes of ``tensor`` piece by piece, each with the random bytes that it should contain."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for piece in torch.split(tensor.reshape(-1).view(torch.uint8), _PIECE_BYTES):
        words = torch.empty(-(-piece.numel() // 8), dtype=torch.int64, device="cpu")
        words.random_(_LEAST_INT64, None, generator=generator)
        yield piece, words.view(torch.uint8)[: piece.numel()]
