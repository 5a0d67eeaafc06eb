# SPDX-License-Identifier: Apache-2.0
"""Work that runs beside a save and notices it: a Python loop, a thread that ticks, a training loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TICK_S = 0.0005
CROWD = 1000  # iterations for each increment of the loop's count


class Loop:
    """A thread that counts, and never yields voluntarily. A context manager."""

    def __init__(self) -> None:
        self.count = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends:
            for _ in range(CROWD):
                pass
            self.count += 1

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    def look(self) -> tuple[float, int]:
        """Returns the time and the count at one moment."""
        return time.perf_counter(), self.count


class Ticker:
    """A thread that sleeps for a short time, again and again. A context manager.

    Attributes:
        gaps: Seconds from tick to tick, and for how many of them the thread waited for a core (0 where the kernel does
            not count them).
    """

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._ends = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with _core_waits() as waited_s:
            last, last_wait = time.perf_counter(), waited_s()
            while not self._ends:
                time.sleep(TICK_S)
                wait = waited_s()
                now = time.perf_counter()
                self.gaps.append((now - last, wait - last_wait))
                last, last_wait = now, wait

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()


@contextmanager
def _core_waits() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the seconds for which the calling thread was ready to run but had no core."""
    try:
        fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(fd, 100, 0).split()[1]) / 1e9
    finally:
        os.close(fd)


class Training:
    """A model small enough for some hundred steps a second, so that Python and torch alternate often."""

    def __init__(self) -> None:
        width = 192
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, width, generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        self._optimizer.zero_grad()
        (self._model(self._batch) - self._batch).square().mean().backward()
        self._optimizer.step()

    def rate(self, is_over: Callable[[], bool]) -> tuple[int, float]:
        """Trains until ``is_over``, at least one step. Returns the number of steps and their seconds."""
        begin, steps = time.perf_counter(), 0
        while True:
            self.step()
            steps += 1
            if is_over():
                return steps, time.perf_counter() - begin

    def rate_for(self, seconds: float) -> tuple[int, float]:
        end = time.perf_counter() + seconds
        return self.rate(lambda: time.perf_counter() >= end)
