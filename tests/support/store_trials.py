# SPDX-License-Identifier: Apache-2.0
"""Saves and loads through a proxy that lets requests fail, and what must hold afterwards."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.object_store import client as store_client
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.stores import use_store
from support.campaign import IS_LONG
from support.store_proxy import Fault, Request, StoreProxy

__all__ = ["LARGE", "TINY", "Kind", "Store", "Trial", "failures_of", "load", "save", "tells", "with_timeout"]

TINY, LARGE = 100, 5_000_000 if IS_LONG else 2_200_000  # of float32; they take three parts or two
_IN_DOUBT = "not known whether the save is committed"
_OPERATION = re.compile(r"[a-z]+\(s3://")
_SECRET = re.compile(r"not-to-be-told|X-Amz-\w+=|uploadId=|Credential=")
_BUCKET = "s3://checkpoints/any"
_numbers = itertools.count()


def _values(numel: int, step: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + step


def save(url: str, config: Config, step: int, numel: int = TINY, planner: BcpSavePlanner | None = None) -> None:
    state = {"w": _values(numel, step), "step": step}
    writer = BcpWriter(url, config=config)
    dcp.save(state, storage_writer=writer, planner=planner or BcpSavePlanner(), no_dist=True)


def load(url: str, config: Config, numel: int = TINY) -> int:
    """Returns the step of the checkpoint there, after all of it was compared."""
    state = {"w": torch.zeros(numel), "step": 0}
    dcp.load(state, storage_reader=BcpReader(url, config=config), planner=BcpLoadPlanner(), no_dist=True)
    step = state["step"]
    assert isinstance(step, int)
    assert torch.equal(state["w"], _values(numel, step)), "wrong values were loaded"
    return step


def failures_of(call: Callable[[], object]) -> list[CheckpointError]:
    """Returns what ``call`` raised, none if it returned. Fails if it raised something else than errors of ours."""
    try:
        call()
    except CheckpointException as error:
        failed = [wrapped[0] for wrapped in error.failures.values()]
        return [tells(one) for one in failed]
    return []


def tells(error: BaseException) -> CheckpointError:
    """Returns ``error``, after it was checked that it is ours, and says what was done where, and no secret."""
    assert isinstance(error, CheckpointError), repr(error)
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert _OPERATION.search(text), text
    assert not _SECRET.search(text), text
    return error


def with_timeout(config: Config, timeout: str) -> Config:
    """Returns ``config`` with a timeout of each request, as obstore takes it; "" changes nothing."""
    options = dict(config.storage_options or {})
    if timeout:
        options["client_options"] = {**options["client_options"], "timeout": timeout}
    return replace(config, storage_options=options)


@dataclass(frozen=True)
class Kind:
    """A kind of failure.

    Attributes:
        fault: What happens to requests.
        num: To so many of them, from the one that is chosen on.
        succeeds: Whether it must be overcome.
        io_timeout_s: Of the save or load.
        request_timeout: Of each request, as obstore takes it; "" for its own.
    """

    fault: Fault
    num: int = 1
    succeeds: bool = False
    io_timeout_s: float = 30.0
    request_timeout: str = ""


@dataclass(frozen=True)
class Trial:
    """One save over a checkpoint, or one load of it.

    Attributes:
        hit: The first request to which the failure happened; None if there was none.
        errors: What was raised.
        step: Of the checkpoint that a clean connection loads afterwards: 1 is the old one, 2 the new one.
        requests: All that were made.
    """

    hit: Request | None
    errors: list[CheckpointError]
    step: int
    requests: list[Request]

    def check_save(self, kind: Kind) -> None:
        """Checks that a save did what it said. That what is there is whole was checked when it was loaded."""
        texts = [str(error) for error in self.errors]
        assert not (kind.succeeds and texts), texts
        if not texts:
            assert self.step == 2, "the save returned, and the old checkpoint is there"
        elif self.step == 2:
            assert any(_IN_DOUBT in text for text in texts), texts
        else:
            assert self.step == 1


class Store:
    """A server, and what was saved there for trials."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.config = Config(storage_options=dict(options))
        self._lock = threading.Lock()
        self._to_load: dict[int, list[str]] = {TINY: [], LARGE: []}

    def url(self) -> str:
        return f"s3://checkpoints/trial-{next(_numbers)}"

    def client(self, url: str) -> StoreClient:
        return use_store(url, self.config)

    @contextmanager
    def saved(self, numel: int) -> Iterator[str]:
        """Yields where there is a checkpoint that nobody else uses: in a process, a URL has one client at a time."""
        with self._lock:
            url = self._to_load[numel].pop() if self._to_load[numel] else ""
        if not url:
            url = self.url()
            save(url, self.config, 1, numel)
        yield url
        with self._lock:
            self._to_load[numel].append(url)

    @contextmanager
    def proxied(self, rule: Callable[[Request], Fault | None] | None = None) -> Iterator[tuple[StoreProxy, Config]]:
        """Yields a proxy with its settings, and waits at the end for what is still on its way.

        Which conditions the store obeys is known: no request asks for it.
        """
        with closing(StoreProxy(self.options["endpoint"], rule)) as proxy:
            config = Config(storage_options={**self.options, "endpoint": proxy.endpoint})
            known = store_client._conditions.get()
            known[use_store(_BUCKET, config)._bucket] = self.client(_BUCKET).conditions()
            yield proxy, config
            proxy.wait_until_idle()

    def trial(self, operation: str, numel: int, at: int | None = None, kind: Kind | None = None) -> Trial:
        """Saves over a checkpoint, or loads it, while requests fail, from number ``at`` on. Then loads."""
        if operation == "load":
            with self.saved(numel) as url:
                return self._trial(lambda config: load(url, config, numel), url, numel, at, kind)
        url = self.url()
        save(url, self.config, 1, numel)
        return self._trial(lambda config: save(url, config, 2, numel), url, numel, at, kind)

    def _trial(
        self, call: Callable[[Config], object], url: str, numel: int, at: int | None, kind: Kind | None
    ) -> Trial:
        hit: list[Request] = []

        def rule(request: Request) -> Fault | None:
            if at is None or kind is None or request.number < at or len(hit) == kind.num:
                return None
            hit.append(request)
            return kind.fault

        with self.proxied(rule) as (proxy, config):
            if kind is not None:
                config = replace(with_timeout(config, kind.request_timeout), io_timeout_s=kind.io_timeout_s)
            errors = failures_of(lambda: call(config))
        return Trial(hit[0] if hit else None, errors, load(url, self.config, numel), proxy.requests)
