# SPDX-License-Identifier: Apache-2.0
"""Which conditions of requests a store obeys. What is asked is asked twice: with one that holds, and one that does not.

A commit and a prune are one request with a condition. A store that ignores it loses checkpoints; one that refuses what
holds keeps what it has for ever, and its refusals read as if somebody else had committed.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "ADVICE",
    "AS_GIVEN",
    "DONE",
    "REFUSED",
    "Answer",
    "Conditions",
    "StoreToTry",
    "as_sent",
    "has_not_changed",
    "refused_in_vain",
    "try_conditions",
    "try_conditions_of_reads",
]

# What a store does with a request; or else it is the text of its error.
DONE, REFUSED = "carried out", "refused"
_REFUSALS = (errno.EEXIST, errno.ESTALE)
# Nothing of the condition: it would be the same without one.
_OTHER_REASONS = (errno.EACCES, errno.ENODEV)
AS_GIVEN, WITHOUT_QUOTES, WITH_QUOTES = "as given", "without quotes", "with quotes"
ADVICE = (
    "save to a directory and copy its files there, .metadata last, or use a store that obeys conditions "
    "(docs/object_stores_s3.md lists them)"
)


class StoreToTry(Protocol):
    """The objects below a URL, as ``StoreClient`` has them."""

    url: str

    def send_put_if(
        self, name: str, data: bytes, replaces: dict[str, Any] | None, etag_form: str, *, once: bool = False
    ) -> None: ...

    def put(self, name: str, data: bytes) -> None: ...

    def head(self, name: str) -> dict[str, Any] | None: ...

    def get(self, name: str) -> bytes: ...

    def get_if(self, name: str, e_tag: str) -> bytes: ...

    def delete(self, names: list[str]) -> None: ...

    def server(self) -> str: ...


@dataclass(frozen=True)
class Answer:
    """What a store has done with a request that had a condition.

    Attributes:
        asked: The request, and whether its condition held.
        wanted: What a store that obeys does: ``DONE`` or ``REFUSED``.
        got: What it did: likewise, or the text of its error.
    """

    asked: str
    wanted: str
    got: str

    @property
    def is_right(self) -> bool:
        return self.got == self.wanted

    @property
    def is_ignored(self) -> bool:
        """Whether the request was carried out although its condition did not hold."""
        return (self.wanted, self.got) == (REFUSED, DONE)


@dataclass(frozen=True)
class Conditions:
    """What a store does with the conditions of writes.

    Attributes:
        answers: To each request that was tried.
        etag_form: How the store wants ETags in ``If-Match`` of a PUT.
        place: URL of the object that was tried.
        server: What is known of the server; "" if all answers are right, and nobody has asked it.
        is_final: Whether asking again would not change it.
    """

    answers: tuple[Answer, ...]
    etag_form: str
    place: str
    server: str
    is_final: bool

    @property
    def fault(self) -> str:
        """Why nothing can be committed there, and what to do; "" if all is right."""
        # A condition that is ignored tells most: the others may have been refused because of it.
        wrong = sorted((each for each in self.answers if not each.is_right), key=lambda each: not each.is_ignored)
        if not wrong:
            return ""
        first = wrong[0]
        if first.is_ignored:
            why = "this store ignores conditional requests: of two saves at once one would replace the other unseen"
        elif first.got == REFUSED:
            why = "this store refuses a condition that holds: no checkpoint could be replaced or pruned there"
        else:
            why = "this store has no conditional requests, without which two saves could replace each other unseen"
        answer = f"wanted: {first.wanted}; got: {first.got}; from {self.server}"
        doctor = "`bcp doctor URL` shows what this one does"
        return f"put({self.place}) with {first.asked}: {answer}; {why}; {ADVICE}; {doctor}"


def as_sent(version: dict[str, Any], etag_form: str) -> dict[str, Any]:
    """Returns a version of an object, as obstore takes it, with its ETag in the form that the store wants."""
    e_tag = version.get("e_tag")
    if not e_tag or etag_form == AS_GIVEN:
        return version
    bare = e_tag.strip('"')
    return {**version, "e_tag": bare if etag_form == WITHOUT_QUOTES else f'"{bare}"'}


def try_conditions(store: StoreToTry) -> Conditions:
    """Tries the conditions of a commit on an object of its own, which is removed.

    Raises:
        OSError: The store refused for a reason that has nothing to do with conditions.
    """
    name = f".conditions.{uuid.uuid4().hex}"
    trial = _Trial(store, name)
    try:
        answers = tuple(trial.answers())
    finally:
        store.delete([name])
    is_right = all(each.is_right for each in answers)
    return Conditions(
        answers, trial.etag_form, f"{store.url}/{name}", "" if is_right else store.server(), trial.is_final
    )


def try_conditions_of_reads(store: StoreToTry) -> list[Answer]:
    """Tries those of the requests of a load, on an object of its own, which is removed; see ``try_conditions``."""
    name = f".conditions.{uuid.uuid4().hex}"

    def got(e_tag: str) -> str:
        try:
            store.get_if(name, e_tag)
        except OSError as error:
            return REFUSED if error.errno in _REFUSALS else _short(error)
        return DONE

    try:
        store.put(name, b"1")
        old = (store.head(name) or {}).get("e_tag") or ""
        current = got(old)
        store.put(name, b"2")
        return [
            Answer("GET, If-Match with the current ETag", DONE, current),
            Answer("GET, If-Match with an older ETag", REFUSED, got(old)),
        ]
    finally:
        store.delete([name])


def has_not_changed(version: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether an object is the version that a refused request was to replace. No two commit marks have the same bytes.

    Args:
        version: See ``replaces`` of ``StoreClient.put_if``.
        now: What ``StoreClient.head`` says; None if there is no object.
    """
    if version is None or now is None:
        return False
    e_tag = version.get("e_tag")
    return bool(e_tag) and e_tag == now.get("e_tag")


def refused_in_vain(store: StoreToTry, version: dict[str, Any] | None) -> str:
    """Returns what to tell if a store has refused to replace a version that is still there."""
    e_tag = (version or {}).get("e_tag")
    return (
        f"wanted: replaced, since it still has the ETag {e_tag} that the request named; got: refused; from "
        f"{store.server()}; try again, and if it stays so, look what `bcp doctor {store.url}` says of conditions"
    )


class _Trial:
    """One object, and what becomes of it. No two requests put the same bytes, so that no two versions have one ETag."""

    def __init__(self, store: StoreToTry, name: str) -> None:
        self._store = store
        self._name = name
        self._num_puts = 0
        self.etag_form = AS_GIVEN
        self.is_final = True

    def answers(self) -> Iterator[Answer]:
        """Asks, until a reply says nothing of conditions: whatever is asked then may take as long."""
        created = self._asked("If-None-Match: *, no object there", DONE, None)
        yield created
        if not self.is_final:
            return
        yield self._asked("If-None-Match: *, an object there", REFUSED, None)
        if not created.is_right:
            self._put_plainly()
        old = self._version()
        matched = self._got_matched(old)
        yield Answer("If-Match with the current ETag", DONE, matched)
        if not self.is_final:
            return
        if matched != DONE:
            self._put_plainly()
        yield self._asked("If-Match with an older ETag", REFUSED, old)

    def _asked(self, asked: str, wanted: str, replaces: dict[str, Any] | None) -> Answer:
        return Answer(asked, wanted, self._got(replaces, wanted))

    def _got_matched(self, version: dict[str, Any]) -> str:
        """Finds the form of ETags that matches, if the store refuses what it has given itself."""
        first = self._got(version, DONE)
        if first != REFUSED:
            return first
        for form in (WITHOUT_QUOTES, WITH_QUOTES):
            if as_sent(version, form) != version:
                self.etag_form = form
                if self._got(version, DONE) == DONE:
                    return DONE
        self.etag_form = AS_GIVEN
        return first

    def _version(self) -> dict[str, Any]:
        found = self._store.head(self._name)
        if found is None:
            raise OSError(errno.EIO, f"an object that was just put, {self._store.url}/{self._name}, is not there")
        return found

    def _next(self) -> bytes:
        self._num_puts += 1
        return f"{self._num_puts}".encode()

    def _put_plainly(self) -> None:
        self._store.put(self._name, self._next())

    def _got(self, replaces: dict[str, Any] | None, wanted: str) -> str:
        """Puts the object on a condition: once, and if the reply does not say, as often as any other request."""
        data = self._next()

        def put(*, once: bool) -> None:
            self._store.send_put_if(self._name, data, replaces, self.etag_form, once=once)

        said = _error_of(lambda: put(once=True))
        if said is not None and said.errno not in (*_REFUSALS, *_OTHER_REASONS, errno.EOPNOTSUPP):
            said = _error_of(lambda: put(once=False))
        if said is None:
            return DONE
        if said.errno in _REFUSALS:
            # A reply that was lost makes us, or obstore, try again what was carried out.
            return DONE if wanted == DONE and _is_there(self._store, self._name, data) else REFUSED
        if said.errno in _OTHER_REASONS:
            raise said
        if said.errno != errno.EOPNOTSUPP:
            self.is_final = False
            self._put_plainly()  # if it is not the condition, this raises
        return _short(said)


def _is_there(store: StoreToTry, name: str, data: bytes) -> bool:
    try:
        return store.get(name) == data
    except FileNotFoundError:
        return False


def _short(error: OSError) -> str:
    """Returns the reply of the store, if there was one, without what obstore says of the request."""
    text = str(error.strerror)
    return (text.partition("status code: ")[2] or text).rstrip(".")


def _error_of(call: Callable[[], None]) -> OSError | None:
    try:
        call()
    except OSError as error:
        return error
    return None
