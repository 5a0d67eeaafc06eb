# SPDX-License-Identifier: Apache-2.0
"""Takes FSDP1's flat parameters apart: which boxes of which original parameters this rank holds, and where.

Everything is computed from what FSDP keeps on each rank, without communication and without copies. Private names of
FSDP are used only in this file and in ``probes/of_torch.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.native import _core
from bytecheckpoint.probes.of_torch import FSDP1
from bytecheckpoint.probes.probe import require
from bytecheckpoint.tensors.chunks import LocalChunks, Spread
from bytecheckpoint.training_state.names import original_name

__all__ = ["FlatEntry", "FlatUnit", "flat_units", "has_flat_parameters"]


@dataclass(frozen=True)
class _Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int  # index of the box's first element in the flat local part of the parameter


@dataclass(frozen=True)
class FlatEntry:
    """One original parameter within a flat parameter.

    Attributes:
        fqn: Name in the model before it was wrapped.
        shape: Shape of the original parameter.
        first: Index in the local shard at which the parameter's local part begins.
        numel: Number of elements of the local part; 0 if this rank holds nothing of the parameter.
        dims: Dims of the original parameter, outermost in memory first.
        boxes: Boxes of the local part, with their dims in that order.
        parameter: With ``use_orig_params``, the parameter that represents it in the module and in an optimizer; else
            None.
        spread: How it is cut over the ranks, if several ranks hold parts of it and it is row-major; else None.
    """

    fqn: str
    shape: torch.Size
    first: int
    numel: int
    dims: tuple[int, ...]
    boxes: tuple[_Box, ...]
    parameter: nn.Parameter | None
    spread: Spread | None

    def chunks_of(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the parameter's boxes as LocalChunks. A parameter without elements is returned as an empty tensor.

        Args:
            local: The flat local part, of ``numel`` elements: of the parameter, or of what an optimizer keeps for each
                of its elements. The boxes are views of it.
        """
        if self.shape.numel() == 0:
            return local.new_empty(self.shape)
        offsets, tensors = [], []
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        for box in self.boxes:
            count = torch.Size(box.sizes).numel()
            piece = local.narrow(0, box.first, count).view(box.sizes)
            offsets.append(tuple(box.offsets[dim] for dim in back))
            tensors.append(piece.permute(back) if self.dims != tuple(range(len(self.dims))) else piece)
        return LocalChunks(self.shape, offsets, tensors, local.dtype, self.spread)


class FlatUnit:
    """A flat parameter of FSDP1, and the shard of it that this rank holds.

    Attributes:
        parameter: The flat parameter. An optimizer holds it, unless ``use_orig_params`` is set.
        entries: Its original parameters, in the order in which they lie in it.
        aliases: For each further name of a tied parameter, its name in ``entries``.
        num_elements: Number of elements of a shard, padding included.
        first: Index in the flat parameter at which this rank's shard begins.
        is_sharded: Whether it is sharded; otherwise each rank holds all of it.
        ranks: Ranks of the default group, in the order of their shards; empty if it is not sharded.
    """

    def __init__(self, handle: Any, prefix: str) -> None:
        flat = handle.flat_param
        if any(extension is not None for extension in flat._param_extensions):
            raise UnsupportedError(
                f"FSDP over tensor parallelism ({prefix.rstrip('.') or 'the root'}): flat parameters of DTensors "
                "cannot be taken apart; use fully_shard (FSDP2), or save and load the model alone, with "
                "save_decomposed_model_optimizer=False and load_decomposed_model_optimizer=False"
            )
        self.parameter: nn.Parameter = flat
        self._handle = handle
        self.num_elements = int(flat._sharded_size.numel())
        self.is_sharded = bool(handle.uses_sharded_strategy)
        self.ranks = tuple(dist.get_process_group_ranks(handle.process_group)) if self.is_sharded else ()
        self.first = handle.rank * self.num_elements if self.is_sharded else 0
        self.entries = tuple(self._entries(flat, prefix))
        pairs = zip(flat._param_infos, self.entries, strict=True)
        names = {(info.module, info.param_name): entry.fqn for info, entry in pairs}
        self.aliases: dict[str, str] = {}
        for shared in flat._shared_param_infos:
            name = f"{shared.module_name}.{shared.param_name}" if shared.module_name else shared.param_name
            self.aliases[original_name(prefix + name)] = names[shared.prim_module, shared.prim_param_name]

    def _entries(self, flat: Any, prefix: str) -> Iterator[FlatEntry]:
        positions, position = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                positions.append(position)
            position += numel
        orders = [_dims_in_memory(size, stride) for size, stride in zip(flat._shapes, flat._strides, strict=True)]
        permuted = [[shape[dim] for dim in dims] for shape, dims in zip(flat._shapes, orders, strict=True)]
        end = self.first + self.num_elements
        of_shard = _core.boxes_of_flat_shard(list(zip(permuted, positions, strict=True)), self.first, end)
        parameters = flat._params or [None] * len(positions)
        for fqn, shape, position, dims, boxes, parameter in zip(
            flat._fqns, flat._shapes, positions, orders, of_shard, parameters, strict=True
        ):
            first = boxes[0][2] if boxes else 0
            own = tuple(_Box(offsets, sizes, at - first) for offsets, sizes, at in boxes)
            numel = sum(torch.Size(box.sizes).numel() for box in own)
            spread = self._spread_of(position, shape) if dims == tuple(range(len(dims))) else None
            yield FlatEntry(original_name(prefix + fqn), shape, first, numel, dims, own, parameter, spread)

    def _spread_of(self, position: int, shape: torch.Size) -> Spread | None:
        """Returns how a parameter that begins at ``position`` of the flat one is cut; None if one rank holds it all."""
        if not self.is_sharded or shape.numel() == 0:
            return None
        begin, end = position // self.num_elements, (position + shape.numel() - 1) // self.num_elements
        if begin == end:
            return None
        cuts = (shard * self.num_elements - position for shard in range(begin + 1, end + 1))
        return Spread((0, *cuts, shape.numel()), self.ranks[begin : end + 1])

    @property
    def shard(self) -> torch.Tensor:
        """The flat shard of this rank, padding included. Its storage is the one that an optimizer updates.

        Raises:
            UnsupportedError: FSDP is using it right now, in forward, backward or ``summon_full_params``.
        """
        if self._handle._training_state is not _compat.HandleTrainingState.IDLE:
            raise UnsupportedError(
                f"FSDP: the unit of '{self.entries[0].fqn}' is in {self._handle._training_state.name}: save and load "
                "outside of forward, backward and summon_full_params"
            )
        shard = getattr(self.parameter, "_local_shard", None)
        if shard is None:  # FSDP has not run yet
            shard = self.parameter.data
        return shard.detach().view(-1)

    def local_part(self, entry: FlatEntry, of_shard: torch.Tensor) -> torch.Tensor:
        """Returns the part of a tensor as long as the shard that belongs to ``entry``."""
        return of_shard.narrow(0, entry.first, entry.numel)

    def let_go_of_gathered(self) -> None:
        """Frees the gathered parameter, which FSDP keeps after some forwards.

        Call it before the shard is changed: the gathered parameter is out of date then.
        """
        if self.is_sharded and hasattr(self.parameter, "_local_shard"):
            self._handle.reshard(True)
            self._handle.post_reshard()
            self._handle._prefetched = False


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP1 wraps any part of ``model``."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def flat_units(model: nn.Module) -> list[FlatUnit]:
    """Returns all flat parameters of ``model`` in the order of its modules, each once for each name of its module.

    FSDP modules without parameters have none.

    Raises:
        UnsupportedError: FSDP is used over tensor parallelism, or FSDP of this torch is not built as we need it.
    """
    units = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FullyShardedDataParallel):
            require(FSDP1)
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            units.append(FlatUnit(handle, f"{name}." if name else ""))
    return units


def _dims_in_memory(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns the dims of a tensor, outermost in memory first: FSDP flattens a tensor in the order of its memory."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
