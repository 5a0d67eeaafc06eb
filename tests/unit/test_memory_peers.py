# SPDX-License-Identifier: Apache-2.0
"""Which machines take copies, and what goes to the holder of another machine and comes from there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.peer_runs import TOKEN, ListeningHolder, listening_holder
from support.ports import new_address

from bytecheckpoint import MemoryTier, Tiers, async_save_state_dict, save_state_dict
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.storage.memory.peers import Machine, Peers, is_data_file

__all__ = ["listening_holder"]

LIMIT_S = 10.0


def peers_of(domains: Sequence[str], own: int) -> Peers:
    machines = [Machine(f"host{at}", ("127.0.0.1", 9), domain, (at,)) for at, domain in enumerate(domains)]
    return Peers(machines, own, TOKEN, LIMIT_S)


@pytest.mark.parametrize(
    ("domains", "own", "replicas", "targets"),
    [
        (["", "", ""], 0, 0, []),
        (["", "", ""], 0, 1, [1]),
        (["", "", ""], 2, 2, [0, 1]),
        (["a", "a", "b", "b"], 0, 1, [2]),
        (["a", "a", "b", "b"], 1, 1, [2]),
        (["a", "a", "b", "b"], 3, 1, [0]),
        (["a", "", "b", "b"], 2, 2, [0, 1]),
        (["a", "b", "b", "c"], 0, 2, [1, 3]),
    ],
)
def test_copies_go_to_the_next_machines_of_other_domains(
    domains: list[str], own: int, replicas: int, targets: list[int]
) -> None:
    assert peers_of(domains, own).targets(replicas) == targets
    assert peers_of(domains, 0).targets(replicas, own) == targets


def test_what_is_known_of_files_is_bounded() -> None:
    peers = peers_of(["", ""], 0)
    for step in (1, 2, 3, 2):
        peers.note({f"step-{step}/__{at}_0.0123456789abcdef.distcp": at for at in range(2)}, 2)
    assert peers.names_in("step-2") == [f"__{at}_0.0123456789abcdef.distcp" for at in range(2)]
    assert len(peers.names_in("step-3")) == 2
    assert peers.names_in("step-1") == []


def test_too_few_domains() -> None:
    with pytest.raises(
        ValueError, match=re.escape("host1 (127.0.0.1:9) has 1 machines of other failure domains for 2")
    ):
        peers_of(["a", "b", "b"], 1).targets(2)


def test_names_of_data_files() -> None:
    assert is_data_file("step-1/model/__12_0.0123456789abcdef.distcp")
    for name in ("step-1/.metadata", "__0_0.distcp", "__0_0.0123456789abcdef.distcp.tmp", "step-1"):
        assert not is_data_file(name)


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    save_state_dict(tmp_path / "saved", {"w": torch.arange(200_000)}, no_dist=True)
    return next((tmp_path / "saved").glob("*.distcp"))


def with_(holder: ListeningHolder) -> Peers:
    machines = [Machine("own", ("127.0.0.1", 9), "", (0,)), Machine("other", (holder.address, holder.port), "", (1,))]
    return Peers(machines, 0, TOKEN, LIMIT_S)


def test_a_copy_is_found_and_read_and_goes_without_a_mark(listening_holder: ListeningHolder, data_file: Path) -> None:
    peers, name = with_(listening_holder), f"step-1/{data_file.name}"
    copies = peers.copies()
    content = data_file.read_bytes()
    fd = os.open(data_file, os.O_RDONLY)
    copies.put(1, name, fd)
    assert peers.names(1, "step-1/") == [name]
    found = peers.find(name)
    assert found is not None
    machine, meta = found
    assert (machine, meta["size"]) == (1, len(content))
    assert peers.read(1, name, meta["e_tag"], 5, 70_000) == content[5:70_005]
    assert peers.get(1, name) == content
    with pytest.raises(OSError, match=r"the holder on other .*: there is another version"):
        peers.read(1, name, "another", 0, 1)
    assert peers.find("step-1/__1_0.ffffffffffffffff.distcp") is None
    other = peers.copies()  # of another save at the same time
    other.end()
    assert peers.names(1, "") == [name]
    copies.end()
    until = time.monotonic() + LIMIT_S
    while peers.names(1, ""):
        assert time.monotonic() < until
    copies.put(1, name, fd)
    listening_holder.client.put("step-1/.metadata", b"mark")
    copies.end()
    peers.close()
    assert {each.name for each in listening_holder.client.everything("")} == {name, "step-1/.metadata"}
    os.close(fd)


@pytest.mark.parametrize("at", [0, 5000, -1])
def test_a_copy_that_is_damaged_is_not_taken(listening_holder: ListeningHolder, data_file: Path, at: int) -> None:
    content = bytearray(data_file.read_bytes())
    content[at] ^= 1
    data_file.write_bytes(content)
    peers = with_(listening_holder)
    with data_file.open("rb") as file, pytest.raises(OSError, match=r"the holder on other .*is damaged"):
        peers.copies().put(1, f"step-1/{data_file.name}", file.fileno())
    assert peers.names(1, "") == []
    peers.close()


def test_a_machine_that_is_not_there_and_one_of_another_job(listening_holder: ListeningHolder) -> None:
    gone = Machine("gone", (new_address(), 9), "", (1,))
    peers = Peers([gone, gone], 0, TOKEN, LIMIT_S)
    for ask in (lambda: peers.find("step-1/__1_0.0123456789abcdef.distcp"), lambda: peers.names(1, "")):
        with pytest.raises(OSError, match=r"the holder on gone \(127.*:9\) cannot be reached: Connection refused"):
            ask()
    there = Machine("there", (listening_holder.address, listening_holder.port), "", (1,))
    stranger = Peers([gone, there], 0, b"another token, of 32 bytes or so", LIMIT_S)
    with pytest.raises(PermissionError, match="token"):
        stranger.names(1, "")


def test_an_interrupted_request_gives_its_answer_to_nobody(
    listening_holder: ListeningHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = with_(listening_holder)
    for name in ("a", "b"):
        listening_holder.client.put(f"step-{name}/.metadata", name.encode())
    assert peers.get(1, "step-a/.metadata") == b"a"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bytecheckpoint.storage.memory.peers.receive_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            peers.get(1, "step-a/.metadata")
        patch.setattr("bytecheckpoint.storage.memory.connection.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            listening_holder.client.get("step-a/.metadata")
    assert peers.get(1, "step-b/.metadata") == b"b"
    assert listening_holder.client.get("step-b/.metadata") == b"b"
    peers.close()


def test_a_connection_that_has_ended_is_made_anew(listening_holder: ListeningHolder) -> None:
    peers = with_(listening_holder)
    listening_holder.client.put("step-1/.metadata", b"mark")
    assert peers.get(1, "step-1/.metadata") == b"mark"
    listening_holder.listen(new_address())  # ends the connections
    peers.machines[1] = Machine("other", (listening_holder.address, listening_holder.port), "", (1,))  # type: ignore[index]
    until = time.monotonic() + LIMIT_S
    while not all(each.has_ended() for each in peers._idle[1]):
        assert time.monotonic() < until
    assert peers.get(1, "step-1/.metadata") == b"mark"
    peers.close()


def test_one_machine_takes_no_copies(tmp_path: Path) -> None:
    tiers = Tiers(memory=MemoryTier(replicas=1), near=tmp_path / "near")
    state = {"w": torch.zeros(3)}
    text = r"MemoryTier\(replicas=1\): the ranks that are known are on one machine"
    with pytest.raises(ConfigError, match=text):
        save_state_dict(tiers / "step-1", state, no_dist=True)
    handle = async_save_state_dict(tiers / "step-1", state, no_dist=True)
    with pytest.raises(ConfigError, match=text):
        handle.committed.result(LIMIT_S)
    assert not (tmp_path / "near").exists() or not any((tmp_path / "near").glob("step-*"))
