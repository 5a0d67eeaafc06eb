# SPDX-License-Identifier: Apache-2.0
"""Runs many rounds of a trial. A seed draws them, a run can begin at any round, and a last line says what happened."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

__all__ = ["IS_LONG", "Campaign"]

IS_LONG = os.environ.get("BCP_LONG") == "1"
_DEFAULT_SEED = 7


class Campaign:
    """The rounds of one test: a few or, with BCP_LONG=1, many.

    Another BCP_SEED draws other rounds, and BCP_ROUND is the number of the first one. A round depends only on the seed
    and on its number.

    Attributes:
        covered: Counts of what happened, for the line at the end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seed = int(os.environ.get("BCP_SEED", _DEFAULT_SEED))
        self._first = int(os.environ.get("BCP_ROUND", 0))
        self.covered: Counter[str] = Counter()

    def run(self, trial: Callable[[int, random.Random], None], *, short: int, long: int) -> None:
        """Calls ``trial`` with the number of each round and the random generator of that round."""
        for number in range(self._first, long if IS_LONG else short):
            try:
                trial(number, random.Random(f"{self._seed} {number}"))
            except BaseException as error:
                again = f"BCP_SEED={self._seed} BCP_ROUND={number}" + " BCP_LONG=1" * IS_LONG
                error.add_note(f"round {number} of {self._name}; {again} begins with it")
                raise
            self.covered["rounds"] += 1

    def __str__(self) -> str:
        begins = f" from round {self._first}" * bool(self._first)
        counts = ", ".join(f"{count} {what}" for what, count in self.covered.items())
        return f"{self._name} (seed {self._seed}{begins}): {counts}"
