# SPDX-License-Identifier: Apache-2.0
"""``bcp diff``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from bytecheckpoint.cli.options import SHORT_DTYPES, bar, checkpoint_argument, json_option, progress_option, whole_dtype
from bytecheckpoint.cli.specs import spec_of, spec_options
from bytecheckpoint.cli.text import counted, json_value, one_line, print_json, safe_name
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Contents, Item, Key, open_contents, place_text

if TYPE_CHECKING:
    from bytecheckpoint.cli.comparison import Comparison

__all__ = ["command"]

# What bcp convert converts.
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _Difference:
    """How one key differs.

    Attributes:
        key: The key.
        what: What differs: ``kind``, ``dtype``, ``shape`` or ``values``.
        text: The difference for people.
        details: The difference as it is printed in JSON.
    """

    key: Key
    what: str
    text: str
    details: dict[str, Any]


def _tolerance(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, float] | None:
    """Returns the relative and the absolute tolerance; None if every bit counts."""
    if value is None:
        return None
    relative, _, absolute = value.partition(":")
    try:
        found = float(relative or 0), float(absolute or 0)
    except ValueError:
        found = -1.0, -1.0
    if not all(0 <= each < math.inf for each in found):
        raise click.BadParameter(f"{value}: must be RTOL or RTOL:ATOL, numbers from 0 on, such as 1e-5 or 1e-5:1e-8")
    return found


@click.command("diff")
@checkpoint_argument("a")
@checkpoint_argument("b")
@spec_options
@click.option("--spec-b", "spec_file_b", type=click.Path(dir_okay=False), help="TOML file with a LoadSpec for B.")
@click.option(
    "--dtype",
    type=click.Choice([*_FLOATS, *SHORT_DTYPES]),
    callback=whole_dtype,
    help="Convert floating-point tensors of A to this dtype first, as bcp convert does.",
)
@click.option(
    "--tolerance",
    metavar="RTOL[:ATOL]",
    callback=_tolerance,
    help="Count only floats that differ by more than ATOL + RTOL * |b|, as torch.allclose. Default: every bit.",
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    metavar="N",
    help="Most differences that are listed; 0 lists all. JSON has all of them.",
)
@click.option("--structure-only", is_flag=True, help="Keys, shapes and dtypes; read no values.")
@json_option
@progress_option
@click.pass_context
def command(
    ctx: click.Context,
    a: str,
    b: str,
    spec_file: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    spec_file_b: str | None,
    dtype: str | None,
    tolerance: tuple[float, float] | None,
    limit: int,
    structure_only: bool,
    as_json: bool,
    progress: bool,
) -> None:
    """Compares two checkpoints: keys, shapes, dtypes, and every value bit by bit.

    A and B are checkpoints of bytecheckpoint or of stock DCP, safetensors, or step folders of bytecheckpoint.save, all
    parts of which are compared. How a tensor is cut into shards, and who wrote it, does not matter. --spec, --include,
    --exclude, --rename and --dtype say what to take of A, as for bcp convert A B; --spec-b says it of B. With
    --tolerance, floats that are near count as equal. Memory use is bounded. Ends with 1 if they differ.

    \b
    Example:
      bcp diff run/step_100 run/step_200 --structure-only
      bcp diff ckpt model-hf --include model --rename model= --dtype bfloat16
      bcp diff run/step_100 again/step_100 --tolerance 1e-5:1e-8
    """
    config = Config.from_env()
    specs = spec_of(spec_file, include, exclude, rename), spec_of(spec_file_b)
    differences: list[_Difference] = []
    if structure_only:
        from bytecheckpoint.native import _core

        of_a, of_b = (
            open_contents(path, config=config, kind=_core.Checkpoint, spec=spec)
            for path, spec in zip((a, b), specs, strict=True)
        )
        compared, only_in_a, only_in_b = _structure(of_a, of_b, dtype, differences)
    else:
        from bytecheckpoint.cli.comparison import Comparison, Tolerance

        with bar("comparing", progress) as tell:
            comparison = Comparison(a, b, config, *specs, None if tolerance is None else Tolerance(*tolerance))
            compared, only_in_a, only_in_b = _structure(comparison.a, comparison.b, dtype, differences)
            differences += _values(comparison, compared, dtype, tell)
    is_equal = not (differences or only_in_a or only_in_b)
    if as_json:
        print_json(
            {
                "a": a,
                "b": b,
                "equal": is_equal,
                "compared": len(compared),
                "structure_only": structure_only,
                "only_in_a": [_named(key) for key in only_in_a],
                "only_in_b": [_named(key) for key in only_in_b],
                "differences": [
                    {**_named(difference.key), "what": difference.what, **json_value(difference.details)}
                    for difference in differences
                ],
            }
        )
    else:
        for line in _limited([*_lines([(a, only_in_a), (b, only_in_b)], differences)], limit):
            click.echo(line)
        how = "of the same structure" if structure_only else "equal" if tolerance is None else "equal within tolerance"
        num = len(only_in_a) + len(only_in_b) + len({difference.key for difference in differences})
        alike = len(compared) - len({difference.key for difference in differences if difference.what == "values"})
        click.echo(f"{counted(alike, 'key')} {how}, {num:,} not")
    ctx.exit(0 if is_equal else 1)


def _lines(only_in: Sequence[tuple[str, Sequence[Key]]], differences: Sequence[_Difference]) -> Iterator[str]:
    for path, keys in only_in:
        yield from (f"only in {one_line(path)}: {_shown(key)}" for key in keys)
    yield from (f"{_shown(difference.key)}: {difference.text}" for difference in differences)


def _limited(lines: list[str], limit: int) -> list[str]:
    if not limit or len(lines) <= limit:
        return lines
    return [*lines[:limit], f"and {len(lines) - limit:,} more; --limit 0 lists all"]


def _named(key: Key) -> dict[str, Any]:
    return {"name": key[2], "rank": key[1], "part": key[0] or None}


def _shown(key: Key) -> str:
    return place_text(*key[:2]) + safe_name(key[2])


def _by_key(contents: Contents) -> dict[Key, Item]:
    return {item.key: item for item in contents.items}


def _converted(item: Item, dtype: str | None) -> str | None:
    """Returns the dtype to which ``--dtype`` converts a tensor; None if it stays as it is."""
    return dtype if item.dtype in _FLOATS and item.dtype != dtype else None


def _structure(
    a: Contents, b: Contents, dtype: str | None, differences: list[_Difference]
) -> tuple[list[Key], list[Key], list[Key]]:
    """Returns keys of the same structure in both, keys only in ``a``, and keys only in ``b``.

    Keys that are in both but differ in structure are added to ``differences``.
    """
    of_a, of_b = _by_key(a), _by_key(b)
    of_a = {key: replace(item, dtype=_converted(item, dtype) or item.dtype) for key, item in of_a.items()}
    alike = []
    for key in (key for key in of_a if key in of_b):
        before = len(differences)
        for what in ("kind", "dtype", "shape"):
            in_a, in_b = getattr(of_a[key], what), getattr(of_b[key], what)
            if in_a == in_b or (what != "kind" and len(differences) > before and differences[-1].what == "kind"):
                continue
            in_a, in_b = (list(value) if isinstance(value, tuple) else value for value in (in_a, in_b))
            differences.append(_Difference(key, what, f"{what} {in_a}, and {in_b}", {"a": in_a, "b": in_b}))
        if len(differences) == before:
            alike.append(key)
    return alike, [key for key in of_a if key not in of_b], [key for key in of_b if key not in of_a]


def _values(
    comparison: Comparison, keys: list[Key], dtype: str | None, tell: Callable[[int, int], None]
) -> Iterator[_Difference]:
    a, b = _by_key(comparison.a), _by_key(comparison.b)
    total = sum(a[key].num_bytes + b[key].num_bytes for key in keys)
    for key in keys:
        if a[key].dtype is None:
            details = comparison.objects(a[key], b[key])
            text = "objects differ" + (
                f": {one_line(str(details['reason']))}" if details and "reason" in details else ""
            )
        else:
            to = _converted(a[key], dtype)
            details = comparison.tensors(a[key], b[key], lambda: tell(min(comparison.bytes_read, total), total), to)
            text = _in_words(details) if details else ""
        tell(min(comparison.bytes_read, total), total)
        if details is not None:
            yield _Difference(key, "values", text, details)


def _in_words(details: dict[str, Any]) -> str:
    words = [f"{details['different']:,} of {details['elements']:,} elements differ"] if details["different"] else []
    if details["max_abs_difference"] is not None:
        words.append(f"by {details['max_abs_difference']:.9g} at most")
    if details["nan_in_one"]:
        words.append(f"{details['nan_in_one']:,} NaN in one of the two only")
    if details["only_in_one"]:
        words.append(f"{details['only_in_one']:,} are stored in one of the two only")
    return ", ".join(words)
