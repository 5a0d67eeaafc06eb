# SPDX-License-Identifier: Apache-2.0
"""The store of a job, asked in a way that ends if it does not answer.

torch waits in C++ for an answer of a TCPStore for as long as its connection lasts. If the machine of the store has lost
its power, that is until TCP gives up, 15 minutes later; if its process is stopped, it is for ever.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

__all__ = ["AnsweringStore"]

_Question: TypeAlias = "tuple[str, tuple[Any, ...], SimpleQueue[tuple[Any, BaseException | None]]]"


class AnsweringStore:
    """Asks a store of torch in a thread of its own. It is not thread-safe.

    Args:
        store: The store.
        limit_s: Seconds within which it must answer each question.
    """

    def __init__(self, store: Any, limit_s: float) -> None:
        self._limit_s = limit_s
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        threading.Thread(
            target=_answer, args=(store, self._questions), name="bytecheckpoint-store", daemon=True
        ).start()

    def close(self) -> None:
        """Ends the thread, once the store has answered."""
        self._questions.put(None)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns its new value. Raises what ``check`` does."""
        value: int = self._ask("add", key, amount)
        return value

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys exist.

        Raises:
            TimeoutError: The store has not answered in time.
            RuntimeError: The store refused, or its connection has ended.
        """
        value: bool = self._ask("check", keys)
        return value

    def get(self, key: str) -> bytes:
        """Returns a value that exists. Raises what ``check`` does."""
        value: bytes = self._ask("get", key)
        return value

    def set(self, key: str, value: str) -> None:
        """Sets a value. Raises what ``check`` does."""
        self._ask("set", key, value)

    def _ask(self, method: str, *arguments: Any) -> Any:
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._questions.put((method, arguments, answer))
        try:
            value, error = answer.get(timeout=self._limit_s)
        except Empty:
            raise TimeoutError(f"no answer to {method}({arguments[0]}) for {self._limit_s:g} s") from None
        if error is not None:
            raise error
        return value


def _answer(store: Any, questions: SimpleQueue[_Question | None]) -> None:
    while (question := questions.get()) is not None:
        method, arguments, answer = question
        try:
            answer.put((getattr(store, method)(*arguments), None))
        except BaseException as error:
            answer.put((None, error))
        del question, answer
