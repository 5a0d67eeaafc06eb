# SPDX-License-Identifier: Apache-2.0
"""``LoadSpec``: which keys of a checkpoint to load, under which names, in which form and dtype."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.patterns import check_use, compiled, matches
from bytecheckpoint.load_spec.rename import Rename
from bytecheckpoint.load_spec.toml_text import assignment
from bytecheckpoint.load_spec.transform import Transform
from bytecheckpoint.load_spec.transforms import KINDS
from bytecheckpoint.near_names import did_you_mean

__all__ = ["LoadSpec"]

_CASTS = ("same", "widen", "any")
_STRICT = (True, False, "checkpoint", "model")
# In a file, the names of the fields that are not Python's to use, or that read better.
_FIELD_NAMES = {"from": "source"}


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What to load from a checkpoint. Every call and tool that loads takes one; all ranks of a load pass equal ones.

    The steps come in this order: ``include`` and ``exclude`` choose keys of the checkpoint, ``transforms`` put tensors
    together from stored ones, ``rename`` gives new names. What comes out is compared with what is to be loaded:
    ``strict`` says which differences are errors, ``cast`` which dtypes. All faults are found before a byte of a tensor
    is read. Nothing is gathered: each rank reads the boxes that it wants, from where they are.

    A pattern is a name with ``*`` (any text), ``?``, ``[ab]`` or ``{name}`` (one part, without a dot) in it. It also
    matches what is below the names that it describes: ``model`` matches ``model.layers.0.weight``. A pattern that
    begins with ``re:`` is a regular expression for whole names. A pattern that matches no key is an error.

    Args:
        include: Patterns of the keys to load; none: all keys.
        exclude: Patterns of keys that are left out, also if ``include`` matches them.
        rename: Patterns with what is put in their place: ``{"model": "net", "h.{i}.attn": "layers.{i}.attn"}``. The
            first pattern that matches a key counts. ``{"model": ""}`` takes ``model.`` away, ``{"": "model"}`` puts
            it before all names. To a regular expression belongs a replacement as for ``re.Match.expand``.
        cast: Which stored dtypes may differ from those of the state. ``same``: none. ``widen``: those of which the
            state's dtype has every value. ``any``: all. Or patterns with dtypes, such as ``{"*.bias": "float32"}``:
            keys that match may be loaded into this dtype. Patterns are compared with names as the state has them.
        strict: ``True``: all keys that were chosen must be asked for, and all that are asked for must be there. With
            ``"checkpoint"`` only the first, with ``"model"`` only the second. With ``False`` what one side lacks is
            left out, and listed in the report.
        transforms: ``Stack``, ``Unstack``, ``Concat``, ``Split``, ``Slice``, ``Transpose``, ``Permute``, ``Reshape``,
            ``Rename`` of ``bytecheckpoint.transforms``, carried out one after the other; also ``Dequantize`` and
            ``DequantizeMXFP4``, which compute the elements.
        as_stored: Patterns of keys that are loaded as they are stored, whatever the state has there: in the place of a
            tensor of another shape or dtype, or of an object, comes a new tensor; in the place of a tensor an object.
            For values that differ in length from save to save, such as the extra states of TransformerEngine:
            ``"*_extra_state"``. Whoever holds the tensor that was there does not see the new one. Patterns are compared
            with names as the state has them, and may match nothing.
        as_stored_bytes: The most bytes of such a tensor, so that a checkpoint does not decide how much memory is taken.

    Raises:
        ConfigError: The arguments do not fit together, or a pattern is none.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: str | Mapping[str, Any] = "same"
    strict: bool | str = True
    transforms: Sequence[Transform] = ()
    as_stored: Sequence[str] = ()
    as_stored_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("include", "exclude", "as_stored"):
            patterns = getattr(self, name)
            object.__setattr__(self, name, (patterns,) if isinstance(patterns, str) else tuple(patterns))
        transforms = (self.transforms,) if isinstance(self.transforms, Transform) else tuple(self.transforms)
        object.__setattr__(self, "transforms", transforms)
        if isinstance(self.cast, str) and self.cast not in _CASTS:
            raise ConfigError(
                f"LoadSpec(cast={self.cast!r}): must be one of {', '.join(map(repr, _CASTS))}, or a dict"
                f"{did_you_mean(self.cast, _CASTS)}"
            )
        if self.strict not in _STRICT:
            near = did_you_mean(self.strict, ("checkpoint", "model"))
            raise ConfigError(f"LoadSpec(strict={self.strict!r}): must be True, False, 'checkpoint' or 'model'{near}")
        for transform in self.transforms:
            if not isinstance(transform, Transform):
                raise ConfigError(f"LoadSpec(transforms=...): {transform!r} is no transform")
        casts = self.cast if isinstance(self.cast, Mapping) else {}
        Rename(self.rename)
        for pattern in (*self.include, *self.exclude, *casts, *self.as_stored):
            if not isinstance(pattern, str):
                raise ConfigError(f"LoadSpec: {pattern!r} is no pattern: it must be a str")
            compiled(pattern)

    @property
    def changes_nothing(self) -> bool:
        """Whether all keys are loaded under their own names and as they are."""
        return not (self.include or self.exclude or self.rename or self.transforms)

    @property
    def refuses_missing(self) -> bool:
        """Whether a key that is asked for must be in the checkpoint."""
        return self.strict in (True, "model")

    @property
    def refuses_unexpected(self) -> bool:
        """Whether a key that was chosen must be asked for."""
        return self.strict in (True, "checkpoint")

    def is_as_stored(self, name: str) -> bool:
        """Whether a key of the state is loaded as it is stored."""
        return any(matches(pattern, name) for pattern in self.as_stored)

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Returns the names that ``include`` and ``exclude`` choose.

        Raises:
            ConfigError: A pattern matches none of them.
        """
        check_use("include", self.include, names)
        check_use("exclude", self.exclude, names)
        return [
            name
            for name in names
            if (not self.include or any(matches(pattern, name) for pattern in self.include))
            and not any(matches(pattern, name) for pattern in self.exclude)
        ]

    def renamed(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the new name of each name.

        Raises:
            ConfigError: A rule matches none of them, or gives no name.
        """
        return Rename(self.rename).new_names(names)

    def dtype_of(self, name: str) -> Any:
        """Returns the dtype that ``cast`` allows for a key; None if it names none."""
        if isinstance(self.cast, str):
            return None
        return next((dtype for pattern, dtype in self.cast.items() if matches(pattern, name)), None)

    def inverted(self) -> LoadSpec:
        """Returns the spec that undoes renames and transforms, for a checkpoint that was saved under the new names.

        ``include`` and ``exclude`` are left out: they are patterns of the names before. Of a spec with renames and
        transforms, a transform ``Rename`` begins the way back. Inverted twice, a spec loads the same as before.

        Raises:
            ConfigError: The name before is not known, because a rule is a regular expression, has ``*``, or says less
                than its pattern; or a transform cannot be inverted: ``Slice`` and those that dequantize, ``Concat``
                without ``sizes``, ``Reshape`` without ``source_shape``. The message names the rule or the transform.
        """
        transforms = [transform.inverted() for transform in reversed(self.transforms)]
        if self.rename:
            transforms.insert(0, Rename(self.rename).inverted())
        rename: Mapping[str, str] = {}
        if transforms and isinstance(last := transforms[-1], Rename):
            rename = last.rules
            transforms.pop()
        other_side: dict[bool | str, bool | str] = {"checkpoint": "model", "model": "checkpoint"}
        return LoadSpec(
            rename=rename,
            cast=self.cast if isinstance(self.cast, str) else "same",
            strict=other_side.get(self.strict, self.strict),
            transforms=transforms,
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> LoadSpec:
        """Reads a spec from a TOML file.

        The file has the fields as keys; ``rename`` and ``cast`` may be tables. Each transform is a table
        ``[[transforms]]`` with its ``kind`` (``stack``, ``transpose``, ...) and its arguments, where ``from`` may stand
        for ``source``.

        Raises:
            ConfigError: The file cannot be read, or something in it is wrong; the message names the line.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            fields = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"spec {path}: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"spec {path}: {error}") from None
        known = [each.name for each in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ConfigError(
                f"spec {path}{_place(text, unknown[0])}: unknown key '{unknown[0]}'; known: {known}"
                f"{did_you_mean(unknown[0], known)}"
            )
        tables = fields.pop("transforms", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ConfigError(f"spec {path}{_place(text, 'transforms')}: each transform is a table [[transforms]]")
        try:
            return cls(**fields, transforms=[_transform(table) for table in tables])
        except ConfigError as error:
            wrong = next((word for word in re.findall(r"'([^']+)'", str(error)) if word in text), "")
            raise ConfigError(f"spec {path}{_place(text, wrong)}: {error}") from None

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes a TOML file that ``from_file`` reads as an equal spec. A file that is there is replaced.

        Raises:
            ConfigError: The file cannot be written, or there is a transform of another program.
        """
        lines = [assignment(name, _plain(value)) for name, value in _changed_fields(self) if name != "transforms"]
        names = {kind: name for name, kind in KINDS.items()}
        for transform in self.transforms:
            if type(transform) not in names:
                raise ConfigError(f"spec {path}: {transform} is no transform of bytecheckpoint.transforms")
            lines += ["", "[[transforms]]", assignment("kind", names[type(transform)])]
            lines += [assignment(name, _plain(value)) for name, value in _changed_fields(transform)]
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigError(f"spec {path}: {error}") from None


def _changed_fields(value: Any) -> list[tuple[str, Any]]:
    """Returns the fields that have another value than by default, with these values."""
    found = []
    for each in dataclasses.fields(value):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if getattr(value, each.name) != default:
            found.append((each.name, getattr(value, each.name)))
    return found


def _plain(value: Any) -> Any:
    """Returns a value with the names of dtypes in the place of those of torch."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype else value


def _transform(table: Mapping[str, Any]) -> Transform:
    fields = {_FIELD_NAMES.get(name, name): value for name, value in table.items()}
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError(
            f"kind = '{kind}' of a transform: must be one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}"
        )
    known = [each.name for each in dataclasses.fields(KINDS[kind])]  # type: ignore[arg-type]
    unknown = [name for name in fields if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"'{unknown[0]}' is no argument of the transform {kind}; known: {', '.join(known)}{near}")
    try:
        return KINDS[kind](**fields)
    except TypeError as error:
        raise ConfigError(f"the transform '{kind}': {error}") from None


def _place(text: str, word: str) -> str:
    """Returns where a word first stands in a file, for a message; nothing if it does not."""
    at = text.find(word) if word else -1
    if at < 0:
        return ""
    return f", line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"
