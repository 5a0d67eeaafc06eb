# SPDX-License-Identifier: Apache-2.0
"""Stores with ways of their own: where checkpoints would be lost, or stay for ever, saves and prunes are refused."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from support.s3_stand_in import LIKE_CEPH_16, LIKE_SWIFT, S3StandIn, Ways
from support.store_proxy import Fault, Request, StoreProxy
from support.store_trials import TINY, Store, load, save

import bytecheckpoint
from bytecheckpoint import BcpSavePlanner, Config, save_state_dict
from bytecheckpoint.errors import CheckpointSupersededError, StorageError, UnsupportedError
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.conditions import AS_GIVEN, DONE
from bytecheckpoint.storage.object_store.servers import name_in
from bytecheckpoint.storage.object_store.stores import use_store
from bytecheckpoint.storage.object_store.tombstones import bury

URL = "s3://checkpoints/run/step-1"
# Each way in which a store can be no place for checkpoints, and what the error says of it.
NO_CONDITIONS, IGNORES = "no conditional requests", "ignores conditional requests"
REFUSED = {
    "as Swift": (
        LIKE_SWIFT,
        [
            "If-None-Match: *, no object there: wanted: carried out; got: 501 Not Implemented: ",
            "OpenStack Swift, by its X-Openstack-Request-Id at 127.1.",
            NO_CONDITIONS,
        ],
    ),
    "400 to all": (Ways(status=400), ["got: 400 Bad Request: InvalidArgument", NO_CONDITIONS]),
    "500 to all": (Ways(status=500), ["got: 500 Internal Server Error", NO_CONDITIONS]),
    "ignores If-None-Match": (
        Ways(obeys_none_match=False),
        ["If-None-Match: *, an object there: wanted: refused; got: carried out", IGNORES],
    ),
    "ignores If-Match": (
        Ways(obeys_match=False),
        ["If-Match with an older ETag: wanted: refused; got: carried out", IGNORES],
    ),
    "ignores all": (Ways(obeys_none_match=False, obeys_match=False), [IGNORES]),
    "no ETag matches": (
        Ways(form=None),
        ["If-Match with the current ETag: wanted: carried out; got: refused", "refuses a condition that holds"],
    ),
}


@contextmanager
def running(ways: Ways) -> Iterator[tuple[S3StandIn, Config]]:
    with closing(S3StandIn(ways)) as server:
        yield server, Config(storage_options=server.options, io_timeout_s=1.0)


def test_a_store_that_wants_etags_without_quotes() -> None:
    """As Ceph RGW 16: checkpoints are replaced and pruned there, and of two saves at once one is refused."""
    with running(LIKE_CEPH_16) as (server, config):
        for step in (1, 2):
            save(URL, config, step)
            assert load(URL, config) == step
        save(URL.replace("step-1", "step-2"), config, 2)
        report = bytecheckpoint.Retention("s3://checkpoints/run", keep_latest=1, config=config).prune()
        assert report.removed == [URL]
        save(URL, config, 3)  # over the tombstone
        assert load(URL, config) == 3

        class Late(BcpSavePlanner):
            def resolve_data(self, item: Any) -> Any:
                save(URL, config, 5)
                return super().resolve_data(item)

        with pytest.raises(CheckpointSupersededError):
            save_state_dict(URL, {"w": torch.zeros(1)}, config=config, planner=Late(), no_dist=True)
        assert load(URL, config) == 5
        assert not any("/.conditions." in key for key in server.objects)


def test_an_older_etag_without_quotes_is_refused() -> None:
    with running(LIKE_CEPH_16) as (_, config):
        client = use_store(URL, config)
        client.put_if("x", b"1", None)
        old = client.head("x")
        client.put_if("x", b"2", old)
        with pytest.raises(OSError, match="412") as caught:
            client.put_if("x", b"3", old)
        assert caught.value.errno == errno.ESTALE
        assert client.get("x") == b"2"


@pytest.mark.parametrize("name", REFUSED)
def test_a_store_that_does_not_obey_is_refused_at_once(name: str) -> None:
    ways, texts = REFUSED[name]
    with running(ways) as (server, config):
        for _ in range(2):
            with pytest.raises(UnsupportedError) as caught:
                save_state_dict(URL, {"w": torch.zeros(1)}, config=config)
            said = str(caught.value)
            assert said.startswith(f"save({URL}): put({URL}/.conditions."), said
            for text in (*texts, "at 127.1.", "save to a directory and copy", "bcp doctor"):
                assert text in said, said
        assert server.objects == {}, "something was written, or is left"
        with pytest.raises(OSError, match=r"conditional requests|a condition that holds") as refused:
            bury(use_store(URL, config), ".metadata", None)
        assert refused.value.errno == errno.EOPNOTSUPP
        assert server.objects == {}


@pytest.mark.parametrize("name", REFUSED)
def test_a_prune_asks_too_and_removes_nothing(name: str) -> None:
    ways, texts = REFUSED[name]
    with running(Ways()) as (good, config), running(ways) as (bad, bad_config):
        for step in (1, 2):
            save(f"s3://checkpoints/run/step-{step}", config, step)
        # In a process, a URL has one server at a time.
        there = {key.replace("run/", "copy/"): data for key, data in good.objects.items()}
        bad.objects.update(there)
        report = bytecheckpoint.Retention("s3://checkpoints/copy", keep_latest=1, config=bad_config).prune()
        assert report.removed == []
        (why,) = report.warnings
        assert all(text in why for text in texts), why
        assert bad.objects == there


def test_501_is_not_asked_again() -> None:
    with running(LIKE_SWIFT) as (server, config):
        begun = time.monotonic()
        with pytest.raises(UnsupportedError):
            save_state_dict(URL, {"w": torch.zeros(1)}, config=config)
        assert time.monotonic() - begun < 5.0  # ten retries take longer
        assert server.conditional_puts() == 4  # each condition once
        with pytest.raises(UnsupportedError):
            save_state_dict(URL, {"w": torch.zeros(1)}, config=config)
        assert server.conditional_puts() == 4  # once in a process


def test_each_store_has_a_verdict_of_its_own() -> None:
    """Buckets of one name on two servers are two stores."""
    with running(Ways()) as (_, good), running(Ways(obeys_match=False)) as (_, bad), running(LIKE_CEPH_16) as (_, ceph):
        for config, fault, form in ((good, "", AS_GIVEN), (bad, "ignores", AS_GIVEN), (ceph, "", "without quotes")):
            found = use_store(URL, config).conditions()
            assert fault in found.fault
            assert bool(fault) == bool(found.fault)
            assert found.etag_form == form
            assert found.is_final


def test_the_verdict_costs_6_requests_and_is_made_once() -> None:
    with running(Ways()) as (server, config):
        client = use_store(URL, config)
        assert client.conditions() is client.conditions()
        assert client.num_requests == len(server.requests) == 6
        use_store("s3://checkpoints/other", config).conditions()
        assert len(server.requests) == 6


def test_what_is_no_verdict_is_not_kept() -> None:
    """Credentials that may not write, or a server that fails for a while, say nothing of conditions."""
    with running(Ways(status=403)) as (server, config):
        with pytest.raises(StorageError, match="403 Forbidden"):
            save_state_dict(URL, {"w": torch.zeros(1)}, config=config)
        server.change(status=500)
        with pytest.raises(UnsupportedError, match="500"):
            save_state_dict(URL, {"w": torch.zeros(1)}, config=config)
        server.change(status=0)
        save(URL, config, 1)
        assert load(URL, config) == 1


KINDS: dict[str, Callable[[], Fault]] = {
    "503": lambda: Fault(status=503),
    "dropped request": lambda: Fault(drops_request=True),
    "dropped reply": lambda: Fault(drops_reply=True),
}


@pytest.mark.parametrize("form", ["as given", "without quotes"])
@pytest.mark.parametrize("name", KINDS)
def test_a_request_of_the_trial_that_fails(name: str, form: str) -> None:
    """The verdict is the same whichever request fails twice, and also if its reply alone is lost."""
    with running(LIKE_CEPH_16 if form == "without quotes" else Ways()) as (server, _):
        for at in itertools.count():
            hit: list[Request] = []

            def rule(request: Request, at: int = at, hit: list[Request] = hit) -> Fault | None:
                if request.number < at or len(hit) == 2:
                    return None
                hit.append(request)
                return KINDS[name]()

            with closing(StoreProxy(server.options["endpoint"], rule)) as proxy:
                config = Config(storage_options={**server.options, "endpoint": proxy.endpoint})
                found = use_store(URL, config).conditions()
            assert (found.fault, found.etag_form, found.is_final) == ("", form, True), (at, hit)
            assert server.objects == {}
            if not hit:
                break
        assert at >= 6


@pytest.mark.parametrize("ways", [Ways(obeys_none_match=False), Ways(obeys_match=False)])
def test_a_lost_reply_does_not_hide_that_a_condition_is_ignored(ways: Ways) -> None:
    with running(ways) as (server, _):
        for at in range(6):

            def rule(request: Request, at: int = at) -> Fault | None:
                return Fault(drops_reply=True) if request.number == at else None

            with closing(StoreProxy(server.options["endpoint"], rule)) as proxy:
                config = Config(storage_options={**server.options, "endpoint": proxy.endpoint})
                assert "ignores conditional requests" in use_store(URL, config).conditions().fault, at


def test_a_refusal_of_what_holds_is_not_called_another_save() -> None:
    with running(Ways()) as (server, config):
        save(URL, config, 1)
        before = dict(server.objects)
        server.change(form=None)
        with pytest.raises(StorageError, match="still has the ETag") as caught:
            save_state_dict(URL, {"w": torch.zeros(TINY)}, config=config)
        said = str(caught.value)
        assert said.startswith(f"put({URL}/.metadata): wanted: replaced, since it still has the ETag")
        assert "got: refused; from StandIn/1 " in said
        assert f"bcp doctor {URL}" in said
        # The old checkpoint, no data file of the new one, and what is said of that.
        assert {key: each for key, each in server.objects.items() if "/.bcp/" not in key} == before
        assert load(URL, config) == 1
        client = use_store(URL, config)
        with pytest.raises(OSError, match="still has the ETag"):
            bury(client, ".metadata", client.head(".metadata"))
        assert load(URL, config) == 1


def test_a_real_store(store: Store) -> None:
    client = store.client(store.url())
    found = client.conditions()
    assert [each.got for each in found.answers if each.wanted == DONE] == [DONE, DONE]
    assert (found.fault, found.etag_form) == ("", AS_GIVEN)
    assert client.server().startswith("SeaweedFS ")
    assert not any(name.startswith(".conditions") for name in client.names())


def test_in_memory(client: StoreClient) -> None:
    assert client.conditions().fault == ""
    assert client.names() == []


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, ""),
        ({"server": "MinIO"}, "MinIO"),
        (LIKE_SWIFT.headers, "OpenStack Swift, by its X-Openstack-Request-Id"),
        (LIKE_CEPH_16.headers, "Ceph RGW, by its x-amz-request-id"),
        ({"Server": "nginx", **LIKE_CEPH_16.headers}, "nginx; Ceph RGW, by its x-amz-request-id"),
        ({"Server": "Ceph Object Gateway (squid)", **LIKE_CEPH_16.headers}, "Ceph Object Gateway (squid)"),
        ({"Server": "SeaweedFS", "x-amz-request-id": "18EC159A5F8008D7C7200908"}, "SeaweedFS"),
    ],
)
def test_the_name_of_a_server(headers: dict[str, str], name: str) -> None:
    assert name_in(headers) == name


def test_a_server_that_is_not_there() -> None:
    options = {
        "endpoint": "http://127.0.0.1:1",
        "access_key_id": "key",
        "secret_access_key": "none",
        "region": "us-east-1",
    }
    server = use_store(URL, Config(storage_options=options)).server()
    assert server == "a server that does not say its name at 127.0.0.1:1"
