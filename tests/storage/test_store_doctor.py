# SPDX-License-Identifier: Apache-2.0
"""``bcp doctor URL``: which conditions a store obeys, and whether it notices damaged bodies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.cli_runs import as_json, run
from support.s3_stand_in import LIKE_CEPH_16, LIKE_SWIFT, S3StandIn, Ways

from bytecheckpoint.cli.machine import Condition
from bytecheckpoint.cli.stores import findings_of_store
from bytecheckpoint.storage.object_store.client import StoreClient

pytest.importorskip("boto3", reason="boto3 is not installed: `bcp doctor URL` IS NOT TESTED")

URL = "s3://checkpoints/run"
ACCEPTED = "accepted"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3StandIn]:
    """Returns a server to which the variables lead."""
    with closing(S3StandIn(Ways())) as server:
        for option, variable in (
            ("endpoint", "AWS_ENDPOINT_URL"),
            ("access_key_id", "AWS_ACCESS_KEY_ID"),
            ("secret_access_key", "AWS_SECRET_ACCESS_KEY"),
            ("region", "AWS_REGION"),
        ):
            monkeypatch.setenv(variable, server.options[option])
        yield server


def told(server: S3StandIn, *, broken: int = 0) -> dict[str, list[Condition]]:
    """Returns what is said of the store, by the name of the finding. Nothing may be left there."""
    found: dict[str, list[Condition]] = {}
    for finding in findings_of_store(URL):
        found.setdefault(finding.name, []).append(finding)
    assert sum(each.state == "broken" for of_name in found.values() for each in of_name) == broken
    assert server.objects == {}
    return found


def test_the_command(server: S3StandIn) -> None:
    assert as_json("doctor", URL)["broken"] == 0
    server.change(obeys_match_of_get=False, matches_get=False, checks_sha256=False)
    said = run("doctor", URL)
    assert said.exit_code == 0
    for line in (
        "ok      condition: PUT, If-None-Match: *, an object there: refused",
        "note    condition: GET, If-Match with an older ETag: carried out; it should be refused",
        "note    SHA-256: PUT of a damaged body: accepted",
    ):
        assert line in said.output.splitlines()


def test_where_all_is_right(server: S3StandIn) -> None:
    found = told(server)
    assert found["server"][0].text.startswith("StandIn/1 ")
    assert [item.text for item in found["condition"]] == [
        "PUT, If-None-Match: *, no object there: carried out",
        "PUT, If-None-Match: *, an object there: refused",
        "PUT, If-Match with the current ETag: carried out",
        "PUT, If-Match with an older ETag: refused",
        "GET, If-Match with the current ETag: carried out",
        "GET, If-Match with an older ETag: refused",
    ]
    assert {item.state for item in found["condition"]} == {"ok"}
    assert [item.text for item in found["SHA-256"]] == [
        "PUT of a damaged body: refused (BadDigest)",
        "upload of a damaged part: refused (BadDigest)",
        "PUT with a wrong x-amz-checksum-sha256: accepted; what counts is the SHA-256 in the signature, which is right "
        "in every upload",
    ]
    assert {item.state for item in found["SHA-256"]} == {"ok"}


def test_damage_that_is_not_noticed(server: S3StandIn) -> None:
    server.change(checks_sha256=False)
    found = told(server)
    assert [item.text.rpartition(": ")[2] for item in found["SHA-256"]] == [ACCEPTED] * 3
    assert [item.state for item in found["SHA-256"]] == ["note", "note", "ok"]
    assert "bcp verify" in found["SHA-256"][0].advice


def test_etags_without_quotes(server: S3StandIn) -> None:
    server.ways = LIKE_CEPH_16
    found = told(server)
    assert found["server"][0].text.startswith("StandIn/1 Python")
    assert "; Ceph RGW, by its x-amz-request-id at 127.1." in found["server"][0].text
    of_match = [item.text for item in found["condition"] if item.text.startswith("PUT, If-Match")]
    assert of_match == [
        "PUT, If-Match with the current ETag (ETags go without quotes): carried out",
        "PUT, If-Match with an older ETag (ETags go without quotes): refused",
    ]


def test_a_store_without_conditions(server: S3StandIn) -> None:
    server.ways = LIKE_SWIFT
    conditions = told(server, broken=4)["condition"]
    assert [item.state for item in conditions] == ["broken"] * 4 + ["ok"] * 2
    assert all("501 Not Implemented" in item.text for item in conditions[:4])
    assert "save to a directory" in conditions[0].advice


def test_conditions_of_reads(server: S3StandIn) -> None:
    server.change(obeys_match_of_get=False)
    *_, current, older = told(server)["condition"]
    assert (current.state, older.state) == ("ok", "note")
    assert older.text == "GET, If-Match with an older ETag: carried out; it should be refused"
    server.change(obeys_match_of_get=True, matches_get=False)
    *_, current, older = told(server, broken=1)["condition"]
    assert (current.state, older.state) == ("broken", "ok")
    assert "a load would say that the checkpoint was replaced" in current.advice


def test_credentials_that_may_not_write(server: S3StandIn) -> None:
    server.change(status=403)
    (found,) = told(server, broken=1)["conditions"]
    assert found.text.startswith(f"nothing can be saved below {URL}: ")
    assert "allow these credentials to put" in found.advice


def test_credentials_of_boto3_are_those_of_now(server: S3StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        server.requests.clear()
        told(server)
        used = {
            headers["authorization"].split("Credential=")[1].partition("/")[0]
            for _, _, headers in server.requests
            if "authorization" in headers
        }
        assert used == {name}


def test_without_boto3(server: S3StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    (found,) = told(server)["SHA-256"]
    assert (found.state, found.advice) == ("note", "pip install boto3")


def test_in_memory(root: str, client: StoreClient) -> None:
    found = [*findings_of_store(root)]
    assert [each.name for each in found] == ["store", "server"] + ["condition"] * 6
    assert {each.state for each in found} == {"ok"}
    assert client.names() == []
