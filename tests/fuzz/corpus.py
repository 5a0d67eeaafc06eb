# SPDX-License-Identifier: Apache-2.0
"""Packs and unpacks the fuzzing corpora: one committed file for each target, a folder of inputs while fuzzing.

    python3 tests/fuzz/corpus.py unpack build/fuzz/corpus manifest tree
    python3 tests/fuzz/corpus.py pack build/fuzz/merged manifest tree

Nobody reads the hundreds of inputs one by one, and as files they would fill every listing and every diff. A packed
corpus holds for each input its length (u32, little-endian) and its bytes, the shortest input first.
``tests/cpp/test_fuzz_replay.cpp`` reads it directly. People do look at findings, so each of those is a file in
``findings/``.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
# All corpora together stay below 1 MB. Large inputs reach little that small inputs do not reach.
MOST_BYTES = 80_000


def inputs_of(packed: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(packed):
        (size,) = struct.unpack_from("<I", packed, at)
        yield packed[at + 4 : at + 4 + size]
        at += 4 + size


def unpack(target: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packed = CORPUS / f"{target}.corpus"
    for content in inputs_of(packed.read_bytes() if packed.exists() else b""):
        (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)


def pack(target: str, folder: Path) -> None:
    contents = sorted({file.read_bytes() for file in folder.iterdir()}, key=lambda content: (len(content), content))
    packed = b""
    for content in contents:
        if len(packed) + 4 + len(content) <= MOST_BYTES:
            packed += struct.pack("<I", len(content)) + content
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.corpus").write_bytes(packed)
    print(f"{target}: {len([*inputs_of(packed)])} of {len(contents)} inputs, {len(packed)} bytes")


def main() -> None:
    verb, folder, *targets = sys.argv[1:]
    for target in targets:
        {"unpack": unpack, "pack": pack}[verb](target, Path(folder) / target)


if __name__ == "__main__":
    main()
