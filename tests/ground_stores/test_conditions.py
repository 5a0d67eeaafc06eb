# SPDX-License-Identifier: Apache-2.0
"""What each real store does with conditions and damaged bodies, as the table in docs/internals/evidence.md says."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import start
from support.store_proxy import Fault, Request, StoreProxy
from support.store_trials import failures_of, load, save

import bytecheckpoint
from bytecheckpoint import Config, save_state_dict, verify
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.storage.object_store.body_checks import try_body_checks
from bytecheckpoint.storage.object_store.conditions import (
    AS_GIVEN,
    DONE,
    REFUSED,
    WITHOUT_QUOTES,
    try_conditions_of_reads,
)
from bytecheckpoint.storage.object_store.stores import use_store

_numbers = itertools.count()


@dataclass(frozen=True)
class Expected:
    """One row of the table.

    Attributes:
        server: What it says of itself.
        answers: To each condition of a PUT, in the order of the table.
        etag_form: How it wants ETags.
        body_checks: Whether it refuses a damaged body, a damaged part, and a wrong header alone.
    """

    server: str
    answers: tuple[str, ...] = (DONE, REFUSED, DONE, REFUSED)
    etag_form: str = AS_GIVEN
    body_checks: tuple[bool, ...] = (True, True, True)


EXPECTED = {
    "Ceph RGW": Expected("Ceph RGW, by its", etag_form=WITHOUT_QUOTES, body_checks=(True, True, False)),
    "Swift": Expected("OpenStack Swift, by its", ("501",) * 4, body_checks=(True, True, False)),
    "moto": Expected("Werkzeug/", body_checks=(False, False, False)),
    "SeaweedFS": Expected("SeaweedFS "),
}


@pytest.fixture
def config(server: Any) -> Config:
    return Config(storage_options=server.options)


@pytest.fixture
def url() -> str:
    return f"s3://checkpoints/run-{next(_numbers)}"


@pytest.fixture
def expected(server: Any) -> Expected:
    return EXPECTED[server.kind]


def test_the_table(url: str, config: Config, expected: Expected) -> None:
    client = use_store(url, config)
    found = client.conditions()
    got = [each.got for each in found.answers]
    assert [text.partition(" Not Implemented")[0] for text in got] == [*expected.answers]
    assert found.etag_form == expected.etag_form
    assert bool(found.fault) == ("501" in expected.answers)
    assert [each.got for each in try_conditions_of_reads(client)] == [DONE, REFUSED]
    checks = try_body_checks(url, config.storage_options or {})
    assert [bool(each.refusal) for each in checks] == [*expected.body_checks], checks
    assert client.server().startswith(expected.server)
    assert client.everything("") == []


def copied_there(url: str, config: Config, folder: Path) -> None:
    """Does what the error says: saves to a directory, and copies its files. It loads from there."""
    save(str(folder), Config(), 1)
    client = use_store(url, config)
    for path in [*sorted(folder.glob("*.distcp")), folder / ".metadata"]:
        client.put(path.name, path.read_bytes())
    assert load(url, config) == 1
    assert verify(url, config=config).is_whole


def test_saves_and_prunes(url: str, config: Config, expected: Expected, tmp_path: Path) -> None:
    step = f"{url}/step-1"
    if "501" in expected.answers:
        begun = time.monotonic()
        with pytest.raises(UnsupportedError, match=r"got: 501 Not Implemented: .*OpenStack Swift.*save to a directory"):
            save_state_dict(step, {"w": torch.zeros(4)}, config=config)
        assert time.monotonic() - begun < 5.0  # ten retries take longer
        assert use_store(url, config).everything("") == []
        copied_there(step, config, tmp_path)
        return
    for value, numel in ((1, 100), (2, 5_000_000)):  # one request, and three parts
        save(step, config, value, numel)
        assert load(step, config, numel) == value
    save(f"{url}/step-2", config, 2)
    report = bytecheckpoint.Retention(url, keep_latest=1, config=config).prune()
    assert report.removed == [step]
    save(step, config, 3)  # over the tombstone
    assert load(step, config) == 3
    assert verify(step, config=config).is_whole


def test_of_many_that_replace_one_version_one_wins(url: str, config: Config, expected: Expected) -> None:
    if "501" in expected.answers:
        pytest.skip("Swift has no conditional PUT")
    client = use_store(url, config)
    client.put_if("mark", b"0", None)

    def try_it(replaces: Any, data: bytes) -> bool:
        try:
            client.put_if("mark", data, replaces)
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for number in range(4):
            version = client.head("mark")
            bodies = [f"{number}-{each}".encode() for each in range(8)]
            won = [*pool.map(try_it, [version] * 8, bodies)]
            assert sum(won) == 1
            assert client.get("mark") == bodies[won.index(True)]


def test_a_body_that_is_damaged_on_its_way(server: Any, url: str, config: Config, expected: Expected) -> None:
    """Through the client of saves: as an object, and as a part. What a store takes in spite of it, verify finds."""
    if "501" in expected.answers:
        pytest.skip("nothing is saved on Swift")
    for numel in (100, 5_000_000):
        step = f"{url}/{numel}"
        damaged: list[Request] = []

        def rule(request: Request, damaged: list[Request] = damaged) -> Fault | None:
            if request.method != "PUT" or ".distcp" not in request.target or damaged:
                return None
            damaged.append(request)
            return Fault(flips_request=True)

        with closing(StoreProxy(server.options["endpoint"], rule)) as proxy:
            through = Config(storage_options={**server.options, "endpoint": proxy.endpoint})
            errors = failures_of(lambda: save(step, through, 1, numel))  # noqa: B023
            proxy.wait_until_idle()
        assert damaged
        if expected.body_checks[0]:
            assert errors, "the store has taken a damaged body"
            assert use_store(step, config).head(".metadata") is None
        else:
            assert errors == []
            assert not verify(step, config=config).is_whole


def test_without_a_signed_sha256_the_header_alone_counts(server: Any, url: str, expected: Expected) -> None:
    """Where the header is ignored, ``unsigned_payload`` leaves nothing that notices damage on the way."""
    if "501" in expected.answers:
        pytest.skip("nothing is saved on Swift")
    damaged: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if request.method != "PUT" or ".distcp" not in request.target or damaged:
            return None
        damaged.append(request)
        return Fault(flips_request=True)

    with closing(StoreProxy(server.options["endpoint"], rule)) as proxy:
        options = {**server.options, "endpoint": proxy.endpoint, "unsigned_payload": "true"}
        errors = failures_of(lambda: save(url, Config(storage_options=options), 1))
        proxy.wait_until_idle()
    assert damaged[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert bool(errors) == expected.body_checks[2]


def test_doctor(server: Any, url: str, expected: Expected) -> None:
    variables = {
        "AWS_ENDPOINT_URL": server.options["endpoint"],
        "AWS_ACCESS_KEY_ID": server.options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": server.options["secret_access_key"],
        "AWS_REGION": server.options["region"],
    }
    with start("doctor", url, "--json", environment=variables) as doctor:
        out, error = doctor.communicate(timeout=60)
    assert doctor.returncode == int("501" in expected.answers), error
    said = json.loads(out)["machine"]
    states = [item["state"] for item in said if item["name"] == "condition"]
    assert states == (["broken"] * 4 if "501" in expected.answers else ["ok"] * 4) + ["ok"] * 2
    of_bodies = [item for item in said if item["name"] == "SHA-256"]
    states = [item["state"] for item in of_bodies]
    assert states == ["ok" if expected.body_checks[0] else "note"] * 2 + ["ok"], of_bodies
