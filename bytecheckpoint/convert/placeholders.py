# SPDX-License-Identifier: Apache-2.0
"""Tensors that stand in a file for weights which are elsewhere: what ZeRO-3 leaves of a module on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from bytecheckpoint.convert.outputs import Outputs
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.errors import CheckpointError, UnsupportedError
from bytecheckpoint.listing import listed

__all__ = ["refuse_placeholders"]

# DeepSpeed writes the shapes of all parameters, by name, beside the state dict of its module.
_SHAPES, _MODULE = "param_shapes", "module."
_EMPTY = (0,)


def refuse_placeholders(outputs: Outputs, source: Source, opened: Opened) -> None:
    """Refuses to convert the placeholders of ZeRO-3 instead of weights.

    Each rank of ZeRO-3 has parts of all weights in its optimizer files, and in its module tensors of shape [0]. A
    tensor of this shape is a placeholder if DeepSpeed's ``param_shapes`` say another shape, if its name ends with
    ``.weight``, or if all tensors have this shape. Other empty tensors are data.

    Raises:
        UnsupportedError: There are placeholders.
    """
    empty = {each.name for each in outputs.tensors if each.shape == _EMPTY}
    if not empty:
        return
    declared = {opened.new_names.get(name, name) for name in _declared(source, opened)}
    found = sorted(empty if len(empty) == len(outputs.tensors) else _suspects(empty, declared))
    if found:
        raise UnsupportedError(
            f"convert({source.place}): these tensors have shape [0], as ZeRO-3 leaves them where weights are "
            f"partitioned, and no elements: {listed([*map(repr, found)])}. Pass the folder of "
            "the step, whose ranks have the weights, with include=['module']; or save with "
            "stage3_gather_16bit_weights_on_model_save, and convert what that wrote. If they are meant to be empty, "
            "leave them out with exclude",
            source.place,
        )


def _suspects(empty: set[str], declared: set[str]) -> Iterator[str]:
    return (name for name in empty if name in declared or name.endswith(".weight"))


def _declared(source: Source, opened: Opened) -> Iterator[str]:
    """Yields the names in the file of those parameters that have elements, by DeepSpeed's ``param_shapes``."""
    stored = [name for name in opened.stored.names() if name == _SHAPES or name.startswith(f"{_SHAPES}.")]
    if not stored:
        return
    from bytecheckpoint.convert.torch_target import read_objects  # imports torch

    values: Mapping[str, Any] = {}
    with suppress(CheckpointError):  # it is another one's, and not plain data
        values = read_objects(stored, source, Opened(opened.stored, opened.stored, {}))
    for key, value in values.items():
        _, group, below = [*key.split(".", 2), "", ""][:3]  # of a file of torch.save each shape has a key of its own
        shapes = {below if group.isdecimal() else f"{group}.{below}".rstrip("."): value}
        for each in value if type(value) is list else [value if isinstance(value, Mapping) else shapes]:
            for name, shape in each.items() if isinstance(each, Mapping) else ():
                with suppress(TypeError):
                    if math.prod(shape):
                        yield from (f"{_MODULE}{name}", str(name))
