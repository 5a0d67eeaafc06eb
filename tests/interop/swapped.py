# SPDX-License-Identifier: Apache-2.0
"""Runs one file of PyTorch's tests: ``python swapped.py MODE WHERE OUTCOMES FILE [TESTS]``.

``MODE`` says which classes the tests get under the names that they import:

- ``stock``: PyTorch's.
- ``classes``: ``BcpWriter`` for ``FileSystemWriter``, ``BcpReader`` for ``FileSystemReader``, ``BcpSavePlanner`` and
  ``BcpLoadPlanner`` for ``DefaultSavePlanner`` and ``DefaultLoadPlanner``, in every module of DCP. Classes that DCP
  derives from its own stay as they are.
- ``register``: PyTorch's, after a call of ``bytecheckpoint.register()``.

``WHERE`` is ``as-is``, or ``cpu`` to run tests on CPU ranks that would otherwise skip because there are no GPUs. The
script writes the outcome of each test as a line of JSON to the file ``OUTCOMES``. ``TESTS`` is a file with the names of
the tests to run, one a line; without it all run. Processes that a test starts import this file as their main module,
and so get the same classes.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from types import TracebackType
from typing import Any

MODES = ("stock", "classes", "register")


def swap(mode: str) -> None:
    """Gives this process the classes of ``mode``."""
    import torch.distributed.checkpoint as dcp

    if mode == "stock":
        return
    for module in pkgutil.walk_packages(dcp.__path__, f"{dcp.__name__}."):
        with suppress(ImportError):  # some modules need packages that are not installed
            importlib.import_module(module.name)  # imported before the swap, so its classes derive from DCP's own
    import bytecheckpoint

    if mode == "register":
        bytecheckpoint.register()
        return
    from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
    from bytecheckpoint.dcp.save_planner import BcpSavePlanner

    ours = {
        dcp.FileSystemWriter: bytecheckpoint.BcpWriter,
        dcp.FileSystemReader: bytecheckpoint.BcpReader,
        dcp.DefaultSavePlanner: BcpSavePlanner,
        dcp.DefaultLoadPlanner: BcpLoadPlanner,
    }
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{dcp.__name__}.")]
    for module in modules:
        for stock, own in ours.items():
            if getattr(module, stock.__name__, None) is stock:
                setattr(module, stock.__name__, own)


def run_on_cpu() -> None:
    """Lets tests run that skip without GPUs. Process groups use gloo, and tensors stay on the CPU.

    FSDP (not ``fully_shard``) refuses to choose the CPU itself, so this function sets its device.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def skip_if_lt_x_gpu(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    common_dtensor.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    if not torch.cuda.is_available():
        init = dist.init_process_group

        def init_on_cpu(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            parts = [
                part for part in str(backend).split(",") if not part.startswith("cuda:")
            ]  # the backend may be `cpu:gloo,cuda:nccl`
            init(",".join(dict.fromkeys(parts)) if backend else None, *args, **kwargs)

        dist.init_process_group = init_on_cpu
        stay: Any = lambda self, *args, **kwargs: self  # noqa: E731
        torch.Tensor.cuda = stay
        torch.nn.Module.cuda = stay
        fsdp: Any = torch.distributed.fsdp.FullyShardedDataParallel
        fsdp.__init__ = partialmethod(fsdp.__init__, device_id=torch.device("cpu"))


class Outcomes(unittest.TestResult):
    """Writes the outcome of each test as soon as it is known.

    A line without ``outcome`` says that a test began.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", buffering=1)
        self._failure: tuple[str, str] | None = None

    def write(self, test: str, outcome: str | None = None, why: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._failure = None
        self.write(_name(test))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.write(_name(test), "passed")

    addExpectedFailure = lambda self, test, error: self.write(_name(test), "passed")  # noqa: E731

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.write(_name(test), "failed", "passes, and was expected to fail")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.write(_name(test), "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.write(_name(test), "failed", _why(error))

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        self.write(_name(test), "error", _why(error))

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:
        if error is not None:
            self.write(_name(test), "failed", _why(error))


def _name(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def _why(error: tuple[type[BaseException], BaseException, TracebackType | None]) -> str:
    return f"{error[0].__name__}: {error[1]}"


class InOrder(unittest.TestLoader):
    """Loads the tests of a class in the order of its source, as pytest does, because some tests rely on it."""

    def getTestCaseNames(self, testCaseClass: type) -> list[str]:
        names = dict.fromkeys(name for of in reversed(testCaseClass.__mro__) for name in vars(of))
        found = set(super().getTestCaseNames(testCaseClass))
        return [name for name in names if name in found]


def run(path: Path, outcomes: Outcomes, wanted: frozenset[str] | None) -> None:
    """Imports a file of tests and runs them one after another."""
    sys.path.insert(0, str(path.parent))
    try:
        module = importlib.import_module(path.stem)
    except unittest.SkipTest as skip:
        outcomes.write("(import)", "skipped", str(skip))
        return
    except ImportError as error:  # this version of torch lacks something
        outcomes.write("(import)", "error", f"{type(error).__name__}: {error}")
        return
    # One suite for each class, because the suite sets the class up and tears it down.
    suites = [unittest.TestSuite(_chosen(suite, wanted)) for suite in InOrder().loadTestsFromModule(module)]
    unittest.TestSuite(suites).run(outcomes)


def _chosen(suite: Any, wanted: frozenset[str] | None) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _chosen(test, wanted)
        elif wanted is None or _name(test) in wanted:
            yield test


if __name__ in {"__main__", "__mp_main__"}:
    _mode, _where, _outcomes, _path = sys.argv[1:5]
    swap(_mode)
    if _where == "cpu":
        run_on_cpu()
    if __name__ == "__main__":
        _wanted = frozenset(Path(sys.argv[5]).read_text().splitlines()) if sys.argv[5:] else None
        run(Path(_path), Outcomes(Path(_outcomes)), _wanted)
