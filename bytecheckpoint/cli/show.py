# SPDX-License-Identifier: Apache-2.0
"""``bcp show``."""

from __future__ import annotations

import math
import pprint
from typing import TYPE_CHECKING, Any

import click

from bytecheckpoint.cli.options import Failure, bar, checkpoint_argument, json_option, progress_option
from bytecheckpoint.cli.text import counted, json_value, print_json, safe_lines, safe_name
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Item, place_text
from bytecheckpoint.near_names import did_you_mean

if TYPE_CHECKING:
    import torch

    from bytecheckpoint.contents.values import Values

__all__ = ["command"]

# A slice of more elements is refused.
_MOST_ELEMENTS = 1 << 20


def _parsed(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[slice | int, ...] | None:
    """Parses a text like ``0:2,:,3`` into slices and numbers."""
    try:
        return None if value is None else tuple(_index(part.strip()) for part in value.split(",") if value.strip())
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a slice such as '0:2,:,3'") from None


def _index(part: str) -> slice | int:
    if ":" not in part:
        return int(part)
    bounds = [int(bound) if bound.strip() else None for bound in part.split(":")]
    if len(bounds) > 3 or (len(bounds) == 3 and (bounds[2] or 1) < 1) or bounds[2:] == [0]:
        raise ValueError(part)
    return slice(*bounds)


@click.command("show")
@checkpoint_argument("path")
@click.argument("name", metavar="FQN")
@click.option(
    "--slice", "wanted", callback=_parsed, help="Also print these elements, such as '0:2,:,3', written as in Python."
)
@click.option("--rank", type=click.IntRange(0), help="The rank whose part to show, if ranks saved on their own.")
@json_option
@progress_option
def command(
    path: str, name: str, wanted: tuple[slice | int, ...] | None, rank: int | None, as_json: bool, progress: bool
) -> None:
    """Shows one object, or one tensor: shape, dtype, shards and statistics.

    PATH is a checkpoint, or a step folder of bytecheckpoint.save. FQN is a name as bcp ls shows it, with or without the
    part in front. Statistics are those of the finite elements, computed in float64. Memory use is bounded, however
    large the tensor is. Objects load under torch's weights_only rules, as in a load.

    \b
    Example:
      bcp show ckpt model.embed.weight --slice ':2,:4'
    """
    from bytecheckpoint.contents.values import open_values

    _, parts = open_values(path, Config.from_env())
    of_rank = [values for values in parts if rank in (None, values.part.rank)]
    having = [values for values in of_rank if name in values.part.items]
    if not having:  # `part: name`, as bcp ls shows the names of a step folder
        component, _, within = name.partition(": ")
        having = [values for values in of_rank if values.part.component == component and within in values.part.items]
        name = within if having else name
    if not having:
        names = (key for values in of_rank for key in values.part.items)
        raise Failure(f"'{name}' is not in {path}{did_you_mean(name, names) or '; bcp ls lists the names'}")
    components = {values.part.component: None for values in having}
    if len(components) > 1:
        first = next(iter(components))
        raise click.UsageError(
            f"'{safe_name(name)}' is in the parts {', '.join(components)}; name one of them, as in "
            f"'{first}: {safe_name(name)}'"
        )
    if len(having) > 1:
        ranks = ", ".join(str(values.part.rank) for values in having)
        raise click.UsageError(f"'{safe_name(name)}' is in the parts of ranks {ranks}; choose one with --rank")
    item = having[0].part.items[name]
    if item.dtype is None:
        if wanted is not None:
            raise click.UsageError("--slice is for tensors, and this is an object")
        _show_object(having[0], item, as_json)
        return
    box = None if wanted is None else _bounds(item, wanted)
    facts: dict[str, Any] = {
        "name": item.name,
        "part": item.component or None,
        "rank": item.rank,
        "kind": "tensor",
        "dtype": item.dtype,
        "shape": list(item.shape),
        "bytes": item.num_bytes,
        "shards": item.num_chunks,
        **_statistics(having[0], item, progress),
    }
    elements = None if box is None or wanted is None else _elements(having[0], item, box, wanted)
    if as_json:
        if elements is not None:
            facts["slice"] = json_value(_listed(elements))
        print_json(json_value(facts))
        return
    _print_tensor(item, facts)
    if elements is not None:
        click.echo(safe_lines(str(elements)))


def _shown(item: Item) -> str:
    return place_text(item.component, item.rank) + safe_name(item.name)


def _show_object(values: Values, item: Item, as_json: bool) -> None:
    value = values.object(item, values.record(item))
    shown = pprint.pformat(value, width=100, sort_dicts=False)
    if not as_json:
        size = counted(item.num_bytes, "byte")
        click.echo(f"{_shown(item)}  {type(value).__name__}, a record of {size}")
        click.echo(safe_lines(shown))
        return
    try:
        plain = json_value(value)
    except TypeError:
        plain = None
    print_json(
        {
            "name": item.name,
            "part": item.component or None,
            "rank": item.rank,
            "kind": "object",
            "bytes": item.num_bytes,
            "type": type(value).__name__,
            "value": plain,
            "repr": shown,
        }
    )


def _statistics(values: Values, item: Item, progress: bool) -> dict[str, Any]:
    from bytecheckpoint.cli.statistics import Statistics
    from bytecheckpoint.contents.values import Box, pieces

    statistics = Statistics()
    with bar("reading", progress) as tell:
        for chunk in item.chunks or ():
            for box in pieces(Box(chunk.offsets, chunk.sizes)):
                statistics.add(values.read(item, chunk, box))
                tell(values.bytes_read, max(item.num_bytes, values.bytes_read))
    return {"elements": statistics.num_elements, **statistics.as_dict()}


def _print_tensor(item: Item, facts: dict[str, Any]) -> None:
    of_shape = math.prod(item.shape)
    click.echo(
        f"{_shown(item)}  {item.dtype} {list(item.shape)}, {item.num_bytes:,} bytes in "
        f"{counted(item.num_chunks, 'shard')}"
    )
    if facts["elements"] != of_shape:
        why = ", on purpose" if item.is_partial else ""
        click.echo(f"{facts['elements']:,} of {of_shape:,} elements are stored{why}")
    if facts["nan"] is None:
        click.echo("no statistics: torch cannot compute with this dtype")
        return
    of_what = "|x| " if facts["dtype"].startswith("complex") else ""
    figures = ", ".join(f"{of_what}{name} {_figure(facts[name])}" for name in ("min", "max", "mean", "std"))
    click.echo(f"{figures}; NaN {facts['nan']:,}, infinite {facts['inf']:,}, zero {facts['zeros']:,}")


def _figure(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _bounds(item: Item, wanted: tuple[slice | int, ...]) -> list[range]:
    """Returns the indices in each dim. Raises a UsageError for indices that the tensor does not have."""
    if len(wanted) > len(item.shape):
        raise click.UsageError(
            f"--slice has {len(wanted)} dims, but the tensor has {len(item.shape)}: {list(item.shape)}"
        )
    out: list[range] = []
    for dim, size in enumerate(item.shape):
        index = wanted[dim] if dim < len(wanted) else slice(None)
        if isinstance(index, slice):
            out.append(range(*index.indices(size)))
        elif -size <= index < size:
            out.append(range(index % size, index % size + 1))
        else:
            raise click.UsageError(f"--slice asks for index {index} in dim {dim}, which has size {size}")
    span = math.prod(abs(indices[-1] - indices[0]) + 1 if indices else 0 for indices in out)
    if span > _MOST_ELEMENTS:
        raise click.UsageError(f"--slice spans {span:,} elements; {_MOST_ELEMENTS:,} at most are shown")
    return out


def _elements(values: Values, item: Item, ranges: list[range], wanted: tuple[slice | int, ...]) -> torch.Tensor:
    from bytecheckpoint.contents.values import Box

    box = Box(
        tuple(indices[0] if indices else 0 for indices in ranges),
        tuple(indices[-1] - indices[0] + 1 if indices else 0 for indices in ranges),
    )
    tensor, num_stored = values.read_across(item, box)
    if num_stored < box.numel:
        raise Failure(f"the checkpoint has {num_stored:,} of the {box.numel:,} elements that the slice spans")
    steps = tuple(
        0 if dim < len(wanted) and isinstance(wanted[dim], int) else slice(None, None, indices.step)
        for dim, indices in enumerate(ranges)
    )
    return tensor[steps]


def _listed(elements: torch.Tensor) -> Any:
    from bytecheckpoint.cli.statistics import in_float64

    if elements.is_quantized or (elements.dtype.itemsize == 1 and elements.is_floating_point()):
        values = in_float64(elements)
        return None if values is None else values.tolist()
    return elements.tolist()
