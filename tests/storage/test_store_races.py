# SPDX-License-Identifier: Apache-2.0
"""Two jobs at one URL, readers of what a job overwrites, and requests that fail on one rank alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import failures, run_ranks
from support.store_proxy import Fault, Request, StoreProxy
from support.store_trials import LARGE, Store, failures_of, load, save, tells

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.errors import CheckpointChangedError, CheckpointSupersededError


def first_commits(fault: Fault, num: int) -> Callable[[Request], Fault | None]:
    """Lets the first requests that commit fail."""
    left = [fault] * num

    def rule(request: Request) -> Fault | None:
        is_commit = request.method == "PUT" and request.target.endswith("/.metadata")
        return left.pop() if is_commit and left else None

    return rule


@pytest.mark.parametrize("is_first", [True, False], ids=["create", "replace"])
@pytest.mark.parametrize(
    ("fault", "num"),
    [(Fault(), 0), (Fault(drops_reply=True), 2), (Fault(drops_request=True), 2), (Fault(status=503), 3)],
    ids=["all is well", "lost replies", "lost requests", "busy"],
)
def test_of_two_jobs_at_once_one_commits(store: Store, fault: Fault, num: int, is_first: bool) -> None:
    url = store.url()
    if not is_first:
        save(url, store.config, 1)
    both_have_begun = threading.Barrier(2, timeout=60)

    class Meeting(BcpSavePlanner):
        def finish_plan(self, *args: Any) -> Any:
            both_have_begun.wait()
            return super().finish_plan(*args)

    with store.proxied(first_commits(fault, num)) as (_, config), ThreadPoolExecutor(2) as pool:
        jobs = {
            step: pool.submit(failures_of, lambda step=step: save(url, config, step, planner=Meeting()))
            for step in (2, 3)
        }
        errors = {step: job.result() for step, job in jobs.items()}
    winner = load(url, store.config)
    assert errors.pop(winner) == []
    ((error,),) = errors.values()
    assert isinstance(error, CheckpointSupersededError)
    client = store.client(url)
    assert len([name for name in client.names() if name.endswith(".distcp")]) == 1


def test_readers_of_what_is_overwritten(store: Store) -> None:
    """Each load gives one whole generation, or says that there is a newer one."""
    url = store.url()
    last = 8
    save(url, store.config, 1, LARGE)
    loaded: list[int] = []
    with ThreadPoolExecutor(1) as pool:

        def overwrite() -> None:
            for step in range(2, last + 1):
                save(url, store.config, step, LARGE)

        writing = pool.submit(overwrite)
        while not writing.done():
            errors = failures_of(lambda: loaded.append(load(url, store.config, LARGE)))
            assert {type(error) for error in errors} <= {CheckpointChangedError}, errors
        writing.result()
    assert load(url, store.config, LARGE) == last
    assert loaded == sorted(loaded)


def state(step: int) -> dict[str, Any]:
    return {f"of rank {dist.get_rank()}": torch.full((LARGE,), float(step)), "step": step}


# On which rank, from which of its requests on, what happens to all of them.
OF_ONE_RANK: dict[str, tuple[int, int, Fault]] = {
    "rank 1 cannot begin its upload": (1, 0, Fault(status=403, code="ExpiredToken")),
    "rank 1 cannot upload a part": (1, 1, Fault(refuses=True)),
    "rank 1 cannot finish its upload": (1, 2, Fault(status=503)),
    "the coordinator cannot begin": (0, 0, Fault(drops_request=True)),
    "the coordinator cannot upload": (0, 5, Fault(status=403, code="ExpiredToken")),
}


def fail_on_one_rank(url: str, options: dict[str, Any]) -> dict[str, set[str]]:
    """Returns the types of what this rank raised in each case."""
    clean = Config(storage_options=options)
    seen: dict[str, set[str]] = {}

    def saved(step: int, config: Config) -> None:
        dcp.save(state(step), storage_writer=BcpWriter(url, config=config))

    def loaded(config: Config) -> int:
        found = state(0)
        dcp.load(found, storage_reader=BcpReader(url, config=config))
        assert torch.equal(found[f"of rank {dist.get_rank()}"], torch.full((LARGE,), float(found["step"])))
        return int(found["step"])

    saved(1, clean)
    for name, (rank, at, fault) in OF_ONE_RANK.items():
        with closing(
            StoreProxy(options["endpoint"], lambda r, at=at, fault=fault: fault if r.number >= at else None)
        ) as p:
            own = Config(storage_options={**options, "endpoint": p.endpoint}, io_timeout_s=1.0)
            config = own if dist.get_rank() == rank else clean
            for call in (lambda config=config: saved(2, config), lambda config=config: loaded(config)):
                seen.setdefault(name, set()).update(type(tells(one)).__name__ for one in failures(call).values())
                dist.barrier()
                assert loaded(clean) == 1
    saved(3, clean)
    assert loaded(clean) == 3
    return seen


def test_requests_of_one_rank_fail(store: Store) -> None:
    """All ranks raise, and the old checkpoint stays."""
    by_rank = run_ranks(2, fail_on_one_rank, store.url(), store.options)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0].keys() == OF_ONE_RANK.keys()
