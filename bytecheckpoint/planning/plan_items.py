# SPDX-License-Identifier: Apache-2.0
"""Items of a plan that C++ holds, built in Python only when somebody looks at them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.planning.handles import Handle, handle_of, object_of

__all__ = ["LoadKeys", "LoadTargets", "PickledSource", "PlanItems", "source_of"]

_Item = TypeVar("_Item")


class ItemsSource(Protocol):
    """A plan in C++ from which items can be built."""

    @property
    def num_items(self) -> int: ...
    def items(self) -> list[Any]: ...


class LoadTargets(NamedTuple):
    """The values that a load fills. They never leave their process.

    Attributes:
        flat: Values by key.
        tops: Keys at the top level of the state dict.
        paths: Path of each key through the containers of the state dict; empty if it has none.
    """

    flat: Mapping[str, Any]
    tops: Collection[Any]
    paths: Mapping[str, tuple[Any, ...]]


class LoadKeys(NamedTuple):
    """What a planner knows of the keys of a load. It never leaves its process.

    Attributes:
        spec: What to load.
        renamed: Keys of the checkpoint that are loaded under another name, with that name.
        casts: Keys whose dtype is not the stored one: key, stored dtype, dtype of the state.
    """

    spec: LoadSpec
    renamed: Mapping[str, str]
    casts: Sequence[tuple[str, str, Any]]


class PickledSource:
    """Base class of sources that are pickled in place of their items.

    Attributes:
        is_away: Whether this process lacks what the items are built from.
    """

    @property
    def is_away(self) -> bool:
        return False

    def send_whole(self) -> None:
        """Makes pickling send all that the items are built from."""


class PlanItems(MutableSequence[_Item]):
    """A list of ``WriteItem`` or ``ReadItem`` that is built from its source when somebody first looks at an item.

    ``len`` builds nothing. Any access to an item builds all of them. From then on only the list counts, because users
    change items, move them and leave some out.
    """

    def __init__(self, source: ItemsSource) -> None:
        self._source: ItemsSource | None = source
        self._list: list[_Item] = []
        self._handle: Handle | None = None
        self.may_send_handle = False  # True: no hook of the planner looks at the items of other ranks
        self.fills: LoadTargets | None = None
        self.loads: LoadKeys | None = None

    def send_handle(self) -> None:
        """Makes pickling send only a handle. No effect once the items are built.

        For plans that DCP sends to the coordinator, which does not look at them, and back.
        """
        if self._source is not None:
            self._handle = handle_of(self)

    def send_whole(self) -> None:
        """Makes pickling send all that the items are built from, whatever was asked before."""
        self._handle = None
        if isinstance(self._source, PickledSource):
            self._source.send_whole()
        else:
            self._built()  # what cannot be built is to fail here, where an exception can be sent

    @property
    def is_away(self) -> bool:
        """Whether the items cannot be built in this process."""
        return isinstance(self._source, PickledSource) and self._source.is_away

    def _built(self) -> list[_Item]:
        if self._source is not None:
            self._list, self._source = self._source.items(), None
        return self._list

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        return self._built()[index]

    @overload
    def __setitem__(self, index: int, value: _Item) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[_Item]) -> None: ...
    def __setitem__(self, index: Any, value: Any) -> None:
        self._built()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._built()[index]

    def __len__(self) -> int:
        return len(self._list) if self._source is None else self._source.num_items

    def insert(self, index: int, value: _Item) -> None:
        self._built().insert(index, value)

    def __add__(self, other: Iterable[_Item]) -> list[_Item]:
        return [*self._built(), *other]

    def __radd__(self, other: Iterable[_Item]) -> list[_Item]:
        return [*other, *self._built()]

    def __eq__(self, other: object) -> bool:
        return self is other or self._built() == (other._built() if isinstance(other, PlanItems) else other)

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a list

    def __repr__(self) -> str:
        return repr(self._built())

    def __reduce__(self) -> tuple[Any, ...]:
        if self._source is not None and self._handle is not None:
            return _at, (self._handle, len(self))
        if isinstance(self._source, PickledSource):
            return type(self), (self._source,)
        return list, (self._built(),)


class _RemoteItems:
    """Stands for items that stayed in another process."""

    is_away = True

    def __init__(self, handle: Handle, num_items: int) -> None:
        self._arguments = (handle, num_items)

    def __len__(self) -> int:
        return self._arguments[1]

    def __iter__(self) -> Any:
        raise CheckpointError(
            "these plan items stayed on the rank that made them, because no hook was known to read them here"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _at, self._arguments


def _at(handle: Handle, num_items: int) -> object:
    """Unpickles items that stayed: in their own process as the same object, elsewhere as a stand-in."""
    items = object_of(handle)
    return _RemoteItems(handle, num_items) if items is None else items


def source_of(items: object) -> Any:
    """Returns the C++ source of ``items``; None if they are a plain list, or if somebody has looked at them."""
    return items._source if isinstance(items, PlanItems) else None
