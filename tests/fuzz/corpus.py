# SPDX-License-Identifier: Apache-2.0
"""The corpora: one committed file a target, a folder of inputs while fuzzing.

    python3 tests/fuzz/corpus.py unpack build/fuzz/corpus manifest tree
    python3 tests/fuzz/corpus.py pack build/fuzz/merged manifest tree

Hundreds of inputs that nobody reads one by one would be hundreds of files in every listing and every diff. A packed
corpus is for each input its length (u32, little-endian) and its bytes, the shortest first, which
``tests/cpp/test_fuzz_replay.cpp`` reads without help. What a finding was, somebody does want to look at: those are
files of their own, ``findings/``.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
# All of them together stay below a megabyte. What is large reaches little that is not also reached by something small.
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
