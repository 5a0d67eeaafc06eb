# SPDX-License-Identifier: Apache-2.0
"""Probes and features. A probe checks one thing in another package that a feature of ours relies on.

It looks at the thing itself; no version number is taken as a sign for it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import CodeType
from typing import Any

from bytecheckpoint.errors import UnsupportedError

__all__ = [
    "TESTED",
    "Feature",
    "Probe",
    "find",
    "holds",
    "installed",
    "is_newer_than_tested",
    "release",
    "require",
    "warn_of_fallbacks",
]

# Maps the name under which a package is imported to its name in the package index, and to the oldest and the newest
# version with which the tests were run.
TESTED = {
    "torch": ("torch", "2.10", "2.15"),
    "torchtitan": ("torchtitan", "0.3.0", "0.3.0"),
    "olmo_core": ("ai2-olmo-core", "3.0", "3.0"),
    "transformers": ("transformers", "5.0", "5.24"),
    "accelerate": ("accelerate", "1.15", "1.15"),
    "lightning": ("lightning", "2.6", "2.6"),
    "torch_checkpointing": ("torch_checkpointing", "0.1.1", "0.1.1"),
    "megatron": ("megatron-core", "0.16", "0.19"),
}


@dataclass(frozen=True, eq=False)
class Probe:
    """One thing that must hold in another package. The package is imported only when the probe is checked.

    Attributes:
        path: Module, then a colon and the name in the module. Without a colon it is the module.
        purpose: What we use the thing for, as a sentence.
        takes: Parameters that it must have.
        takes_no_more: True if it must have exactly the parameters ``takes``, in this order.
        uses: Names that its code must look up when it runs, so that it uses what we put there.
        variables: Variables that its code, or a function inside it, must have. We read them from its frame.
        calls: Names that its code, or a function inside it, must look up in this order.
        has: Attributes that it or its instances must have.
        text: Text that it must be equal to.
        fallback: What happens if the probe does not hold. If it is empty, the feature is refused.
        is_lazy: True if the probe is checked only where somebody has already imported the module, because the import
            takes long.
    """

    path: str
    purpose: str
    takes: tuple[str, ...] = ()
    takes_no_more: bool = False
    uses: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    text: str = ""
    fallback: str = ""
    is_lazy: bool = False

    @property
    def package(self) -> str:
        """Name under which the package is imported."""
        return self.path.partition(":")[0].partition(".")[0]

    def private_names(self) -> set[str]:
        """Returns the names in this probe that begin with exactly one underscore."""
        parts = self.path.replace(":", ".").split(".")
        names = {*parts, *self.uses, *self.variables, *self.calls, *self.has, self.text}
        return {name for name in names if name.startswith("_") and not name.startswith("__")}

    def fault(self) -> str:
        """Returns what is not as it must be; an empty text if the probe holds."""
        module, _, names = self.path.partition(":")
        try:
            target: Any = import_module(module)
        except Exception as error:  # a package may raise any error if it does not suit its environment
            return f"it cannot be imported: {type(error).__name__}: {error}"
        for name in filter(None, names.split(".")):
            if not hasattr(target, name):
                return f"there is no {name}"
            target = getattr(target, name)
        if self.text and target != self.text:
            return f"it is {target!r} instead of {self.text!r}"
        missing = [name for name in self.has if not _has(target, name)]
        if missing:
            return f"it has no {', '.join(missing)}"
        return self._fault_of_parameters(target) or self._fault_of_code(target)

    def _fault_of_parameters(self, target: Any) -> str:
        if not self.takes:
            return ""
        parameters = [*inspect.signature(target).parameters]
        if self.takes_no_more and parameters != [*self.takes]:
            return f"it takes {', '.join(parameters)} instead of {', '.join(self.takes)}"
        missing = [name for name in self.takes if name not in parameters]
        return f"it does not take {', '.join(missing)}" if missing else ""

    def _fault_of_code(self, target: Any) -> str:
        if not (self.uses or self.variables or self.calls):
            return ""
        codes = [*_codes_of(target)]
        for wanted, what, known in (
            (self.uses, "use", {name for code in codes for name in code.co_names}),
            (self.variables, "have the variable", {name for code in codes for name in _variables_of(code)}),
        ):
            missing = [name for name in wanted if name not in known]
            if missing:
                return f"its code does not {what} {', '.join(missing)}"
        if self.calls and not any(_is_in_order(self.calls, code.co_names) for code in codes):
            return f"its code does not call {', then '.join(self.calls)}"
        return ""


@dataclass(frozen=True, eq=False)  # hashed by identity, which is fast: every call looks a feature up in a cache
class Feature:
    """A feature that users ask for, and the probes that it relies on.

    Attributes:
        name: Name of the feature, as users know it.
        advice: What users can do if the feature cannot work.
        probes: Probes that must hold.
    """

    name: str
    advice: str = ""
    probes: tuple[Probe, ...] = field(default=(), repr=False)

    def faults(self) -> list[tuple[Probe, str]]:
        """Checks all probes. Returns those that do not hold, each with the reason."""
        found = [(probe, probe.fault()) for probe in self.probes if not probe.is_lazy or _is_loaded(probe)]
        return [(probe, fault) for probe, fault in found if fault]

    def packages(self) -> list[str]:
        """Returns the packages that the feature relies on, by the names under which they are imported."""
        return sorted({probe.package for probe in self.probes})


@cache
def _known_faults(feature: Feature) -> list[tuple[Probe, str]]:
    return feature.faults()


def _is_loaded(probe: Probe) -> bool:
    return probe.path.partition(":")[0] in sys.modules


def holds(feature: Feature) -> bool:
    """Returns whether all probes of ``feature`` hold, also those with a fallback. Checked once per process."""
    return not _known_faults(feature)


def require(feature: Feature, *, anew: bool = False) -> None:
    """Raises if the feature cannot work. Warns once per process of a package that is newer than the tested versions.

    Args:
        feature: Feature to check.
        anew: Check the probes again, instead of once per process. For features that change modules of others.

    Raises:
        UnsupportedError: Probes without a fallback do not hold. The message names them.
    """
    faults = feature.faults() if anew else _known_faults(feature)
    reasons = [
        f"probe {probe.path}: {fault} ({probe.purpose.rstrip('.')})" for probe, fault in faults if not probe.fallback
    ]
    if not reasons:
        for package in feature.packages():
            _warn_if_newer(package)
        return
    advice = f" {feature.advice}" if feature.advice else ""
    absent = [TESTED[package][0] for package in feature.packages() if find_spec(package) is None]
    if absent:
        raise UnsupportedError(f"{feature.name}: {' and '.join(absent)} is not installed.{advice}")
    versions = " and ".join(
        f"{TESTED[package][0]} {installed(package) or 'of an unknown version'}"
        for package in sorted({probe.package for probe, _ in faults})
    )
    raise UnsupportedError(
        f"{feature.name} cannot work with {versions}: {'; '.join(reasons)}.{advice} bcp doctor lists all probes"
    )


@cache
def warn_of_fallbacks(feature: Feature) -> None:
    """Warns, once per process, of each probe that does not hold and has a fallback.

    For features whose users must know of the fallback.
    """
    for probe, fault in _known_faults(feature):
        if probe.fallback:
            warnings.warn(
                f"bytecheckpoint: probe {probe.path}: {fault} ({probe.purpose.rstrip('.')}): {probe.fallback}",
                RuntimeWarning,
                stacklevel=3,
            )


@cache
def _warn_if_newer(package: str) -> None:
    name, _, newest = TESTED[package]
    if is_newer_than_tested(package):
        warnings.warn(
            f"bytecheckpoint: {name} {installed(package)} is newer than {newest}, the newest that it was tested with; "
            "everything that it relies on was found there",
            RuntimeWarning,
            stacklevel=4,
        )


def is_newer_than_tested(package: str) -> bool:
    """Returns whether the installed version of ``package`` is newer than the newest tested one."""
    newest = release(TESTED[package][2])
    return release(installed(package))[: len(newest)] > newest


def installed(package: str) -> str:
    """Returns the version of the package that is imported as ``package``; empty if it is not installed."""
    try:
        return version(TESTED[package][0])
    except PackageNotFoundError:
        return ""


def release(text: str) -> tuple[int, ...]:
    """Returns the numbers with which a version begins: (2, 13, 0) for ``2.13.0+cpu``."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def find(path: str, default: Any = None) -> Any:
    """Returns what is at ``path``, written as in a probe, or ``default`` if there is nothing.

    A feature that needs it must call ``require`` first.
    """
    module, _, names = path.partition(":")
    try:
        target: Any = import_module(module)
        for name in filter(None, names.split(".")):
            target = getattr(target, name)
    except (ImportError, AttributeError):
        return default
    return target


def _has(target: Any, name: str) -> bool:
    """Returns whether ``target`` or an instance of it has an attribute.

    The class has it, its annotations declare it, or the code of a method names it.
    """
    if hasattr(target, name):
        return True
    classes = inspect.getmro(target) if isinstance(target, type) else ()
    return any(
        name in getattr(kind, "__annotations__", ())
        or any(name in code.co_names for method in vars(kind).values() for code in _codes_of(method))
        for kind in classes
    )


def _codes_of(target: Any) -> Iterator[CodeType]:
    """Yields the code of a function, which may be wrapped, and of the functions inside it."""
    code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    waiting = [] if code is None else [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


def _variables_of(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames + code.co_cellvars + code.co_freevars


def _is_in_order(names: tuple[str, ...], found: tuple[str, ...]) -> bool:
    rest = iter(found)
    return all(name in rest for name in names)
