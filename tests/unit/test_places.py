# SPDX-License-Identifier: Apache-2.0
"""When ranks with different paths save to one place, also if they are ranks of other hosts."""

from __future__ import annotations

from errno import EIO, ENOENT
from pathlib import Path

import pytest

from bytecheckpoint.dcp._places import refuse_other_places
from bytecheckpoint.dcp._save_session import RankResult
from bytecheckpoint.errors import ConfigError, StorageError


def refuse(path: Path | str, *others: RankResult) -> None:
    refuse_other_places(str(path), [RankResult(0, str(path), host="a"), *others], 0)


def test_ranks_of_other_hosts(tmp_path: Path) -> None:
    """What the coordinator sees decides: hosts may mount one storage at different paths."""
    (tmp_path / "__1_0.distcp").touch()
    there = "/mnt/of/another/host"
    refuse(tmp_path, RankResult(1, there, file_names=("__1_0.distcp",), host="b"))
    refuse(tmp_path, RankResult(1, there, host="b"))  # it wrote nothing, so nothing can be lost
    refuse(tmp_path, RankResult(1, there, error=StorageError("", there, EIO), host="b"))
    for result in (
        RankResult(1, there, file_names=("__1_1.distcp",), host="b"),
        RankResult(1, there, error=StorageError("", there, ENOENT), host="b"),
        RankResult(1, there, host="a"),
        RankResult(1, "s3://bucket/run", host="b"),
    ):
        with pytest.raises(ConfigError, match=f"the path is '{tmp_path}' on rank 0, and '{result.path}' on rank 1"):
            refuse(tmp_path, result)


def test_folders_of_a_store() -> None:
    refuse("s3://bucket/run/7", RankResult(1, "s3://bucket/run/7", host="b"))
    with pytest.raises(ConfigError, match="'s3://bucket/run/7' on rank 0, and 's3://bucket/run/8' on rank 1"):
        refuse("s3://bucket/run/7", RankResult(1, "s3://bucket/run/8", host="b"))


def test_very_many_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on rank 8 and 92 more, and these are different places"):
        refuse(tmp_path, *(RankResult(rank, f"/other/{rank}", host="a") for rank in range(1, 101)))
