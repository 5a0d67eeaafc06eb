# SPDX-License-Identifier: Apache-2.0
"""Every request of a save and of a load fails in every way: what is there is the old checkpoint or the new one."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.campaign import IS_LONG
from support.store_proxy import Fault, Request
from support.store_trials import LARGE, TINY, Kind, Store, Trial, failures_of, load, save, with_timeout

from bytecheckpoint.errors import CorruptCheckpointError, SaveFailedError, StorageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:bytecheckpoint:RuntimeWarning"),  # what the sweep could not remove
]

FOREVER = 1 << 30
KINDS = {
    "503 thrice": Kind(Fault(status=503), 3, succeeds=True),
    "429 twice": Kind(Fault(status=429), 2, succeeds=True),
    "500": Kind(Fault(status=500, code="InternalError"), succeeds=True),
    "dropped request": Kind(Fault(drops_request=True), succeeds=True),
    "dropped reply": Kind(Fault(drops_reply=True), succeeds=True),
    "truncated reply": Kind(Fault(truncates=True)),
    "flipped reply": Kind(Fault(flips=True)),
    "flipped request": Kind(Fault(flips_request=True)),
    "long delay": Kind(Fault(delay_s=2.0), io_timeout_s=5.0, request_timeout="1s"),
    "503 from then on": Kind(Fault(status=503), FOREVER, io_timeout_s=2.0),
    "token expired from then on": Kind(Fault(status=403, code="ExpiredToken"), FOREVER),
    "refused from then on": Kind(Fault(refuses=True), FOREVER, io_timeout_s=2.0),
}
# These differ from "503 thrice" in nothing that depends on the size.
TINY_ALONE = ("429 twice", "500")
# Trials mostly wait, for the store or for the next attempt.
_NUM_AT_ONCE = 16


def moves_data(request: Request) -> bool:
    return ".distcp" in request.target and request.method in ("PUT", "POST", "GET")


@pytest.fixture(scope="module")
def rounds(store: Store) -> dict[str, list[tuple[int, int]]]:
    """For a save and for a load, each size with the number of each request that it makes.

    Of large states, only the requests that move data are tried, unless BCP_LONG=1.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for operation in ("save", "load"):
        for numel in (TINY, LARGE):
            clean = store.trial(operation, numel)
            assert not clean.errors
            assert len(clean.requests) > 4
            tried = [request for request in clean.requests if numel == TINY or IS_LONG or moves_data(request)]
            assert numel == TINY or len([request for request in tried if moves_data(request)]) >= 5
            found.setdefault(operation, []).extend((numel, request.number) for request in tried)
    return found


def trials(
    store: Store, operation: str, name: str, rounds: dict[str, list[tuple[int, int]]]
) -> list[tuple[int, str, Trial]]:
    """Returns each trial, with the number of the request and a text for messages."""
    some = [(numel, at) for numel, at in rounds[operation] if IS_LONG or numel == TINY or name not in TINY_ALONE]

    def run(numel: int, at: int) -> tuple[int, str, Trial]:
        text = f"{operation} of {numel} numbers, request {at}"
        try:
            trial = store.trial(operation, numel, at, KINDS[name])
        except BaseException as error:
            error.add_note(text)
            raise
        text = f"{text}: {trial.hit}: {trial.errors}"
        assert trial.hit is not None, text
        return at, text, trial

    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        return [done.result() for done in [pool.submit(run, *which) for which in some]]


@pytest.mark.parametrize("name", KINDS)
def test_each_request_of_a_save(store: Store, rounds: dict[str, list[tuple[int, int]]], name: str) -> None:
    kind = KINDS[name]
    done = trials(store, "save", name, rounds)
    for at, text, trial in done:
        try:
            trial.check_save(kind)
        except AssertionError as error:
            error.add_note(text)
            raise
        is_note = trial.hit is not None and "/.bcp/" in trial.hit.target  # without it, a save goes on
        if name == "flipped request" and trial.hit is not None and trial.hit.method == "PUT" and not is_note:
            assert trial.errors, text
        if kind.num == FOREVER and at == 0:
            assert trial.errors, text
    num_failed = len([trial for _, _, trial in done if trial.errors])
    assert num_failed < len(done), "after the commit, nothing makes a save fail"
    if name != "flipped reply":  # the bit may be in bytes that a save need not look at
        assert (num_failed > 0) != kind.succeeds


@pytest.mark.parametrize("name", KINDS)
def test_each_request_of_a_load(store: Store, rounds: dict[str, list[tuple[int, int]]], name: str) -> None:
    """That what it loads is right is compared in each trial."""
    kind = KINDS[name]
    num_corrupt = 0
    for _, text, trial in trials(store, "load", name, rounds):
        assert trial.step == 1
        if kind.succeeds:
            assert not trial.errors, text
        if name == "flipped reply":  # the bit may be in bytes that a load need not look at
            assert {type(error) for error in trial.errors} <= {CorruptCheckpointError}, text
            num_corrupt += len(trial.errors)
        if kind.num == FOREVER:
            assert [type(error) for error in trial.errors] == [StorageError], text
    assert name != "flipped reply" or num_corrupt >= 1  # data are read once more, metadata are not


def of_commit(request: Request) -> bool:
    return request.method == "PUT" and request.target.endswith("/.metadata")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_commit_that_arrives_late(store: Store, is_first: bool) -> None:
    """The client has given up, and says that it does not know. So the data files must stay."""
    url = store.url()
    if not is_first:
        save(url, store.config, 1)
    seen: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if not of_commit(request):
            return None
        seen.append(request)
        return Fault(delay_s=2.0)

    with store.proxied(rule) as (_, config):
        errors = failures_of(lambda: save(url, with_timeout(config, "1s"), 2))
        assert [type(error) for error in errors] == [StorageError]
        assert "not known whether the save is committed" in str(errors[0])
    assert seen
    assert load(url, store.config) == 2


def test_a_lost_reply_of_the_commit_and_a_store_that_fails_then(store: Store) -> None:
    """It is committed, but nobody can say so: the error must not call it undone."""
    url = store.url()
    save(url, store.config, 1)
    begun = math.inf

    def rule(request: Request) -> Fault | None:
        nonlocal begun
        if of_commit(request):
            begun = min(begun, request.number)
        if request.number < begun:
            return None
        return Fault(drops_reply=True) if request.number == begun else Fault(status=403, code="ExpiredToken")

    with store.proxied(rule) as (_, config):
        (error,) = failures_of(lambda: save(url, config, 2))
    assert "not known whether the save is committed" in str(error)
    assert load(url, store.config) == 2


def test_the_error_says_why_and_what_to_do(store: Store) -> None:
    """A reply to HEAD has no body, so the reason is asked for; a part that fails has one."""
    for operation in ("save", "load"):
        trial = store.trial(operation, TINY, 0, KINDS["token expired from then on"])
        (error,) = trial.errors
        assert "ExpiredToken: injected; pass valid credentials" in str(error)
    trial = store.trial("save", TINY, 3, KINDS["token expired from then on"])
    (error,) = trial.errors
    assert isinstance(error, SaveFailedError)
    assert "ExpiredToken: injected; pass valid credentials" in str(error)
