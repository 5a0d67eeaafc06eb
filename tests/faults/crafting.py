# SPDX-License-Identifier: Apache-2.0
"""Makes files with false content and right checksums, so that only the checks after the checksums can refuse them."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CHECKPOINT_ID",
    "DATA_TRAILER",
    "ITEMS",
    "META_TRAILER",
    "STRINGS",
    "MetadataFile",
    "resigned_data",
    "resigned_trailer",
]

BLOCK, DATA_TRAILER, META_TRAILER = 256 << 10, 80, 128
# The manifest: bytes before its directory of sections, number of sections, numbers of the sections, bytes of an entry.
HEAD, NUM_SECTIONS = 32, 8
STRINGS, ITEMS, DIMS, CHUNKS, FILES, PLANNER_DATA, USER_METADATA, CHECKPOINT_ID = range(NUM_SECTIONS)
ENTRY = 48


def _with_crc(trailer: bytearray, position: int) -> bytes:
    """Returns ``trailer`` with its own checksum, which is computed with zero in its field."""
    struct.pack_into("<I", trailer, position, 0)
    struct.pack_into("<I", trailer, position, zlib.crc32(trailer))
    return bytes(trailer)


def resigned_trailer(content: bytes) -> bytes:
    """Returns a data file with the right checksum for its trailer."""
    return content[:-DATA_TRAILER] + _with_crc(bytearray(content[-DATA_TRAILER:]), 48)


def resigned_data(content: bytes) -> bytes:
    """Returns a data file of one block with right checksums for its records. The metadata still want the old ones."""
    out = bytearray(content)
    trailer = len(out) - DATA_TRAILER
    (end_of_records,) = struct.unpack_from("<q", out, trailer + 24)
    struct.pack_into("<I", out, end_of_records, zlib.crc32(out[:end_of_records]))
    struct.pack_into("<I", out, trailer + 36, zlib.crc32(out[end_of_records:trailer]))
    return resigned_trailer(bytes(out))


@dataclass
class MetadataFile:
    """The parts of a ``.metadata``, which a test may change.

    Attributes:
        head: The manifest up to its directory of sections.
        sections: The sections of the manifest, in the order of FORMAT.md.
    """

    pickle: bytes
    head: bytes
    sections: list[bytearray]
    trailer: bytes

    @classmethod
    def read(cls, path: Path) -> MetadataFile:
        content = path.read_bytes()
        trailer = content[-META_TRAILER:]
        pickle_bytes, manifest_bytes = struct.unpack_from("<qq", trailer, 16)
        manifest = content[pickle_bytes : pickle_bytes + manifest_bytes]
        places = struct.iter_unpack("<QQ", manifest[HEAD : HEAD + 16 * NUM_SECTIONS])
        sections = [bytearray(manifest[offset : offset + size]) for offset, size in places]
        return cls(content[:pickle_bytes], manifest[:HEAD], sections, trailer)

    def manifest(self) -> bytes:
        directory, body = b"", b""
        begin = HEAD + 16 * NUM_SECTIONS
        for section in self.sections:
            body += bytes(-(begin + len(body)) % 8)
            directory += struct.pack("<QQ", begin + len(body), len(section))
            body += section
        return self.head + directory + body

    def to_bytes(self, manifest: bytes | None = None) -> bytes:
        """Returns the whole file; ``manifest`` replaces the one that is made of the parts."""
        manifest = self.manifest() if manifest is None else manifest
        blocks = [manifest[begin : begin + BLOCK] for begin in range(0, len(manifest), BLOCK)]
        table = b"".join(struct.pack("<I", zlib.crc32(block)) for block in blocks)
        trailer = bytearray(self.trailer)
        struct.pack_into("<qqq", trailer, 16, len(self.pickle), len(manifest), len(blocks))
        crcs = (zlib.crc32(part) for part in (self.pickle, manifest, table))
        struct.pack_into("<III", trailer, 44, *crcs)
        return self.pickle + manifest + table + _with_crc(trailer, 56)

    def file_names(self) -> list[str]:
        """Returns the names of the data files, in the order of their numbers in the manifest."""
        places = struct.iter_unpack("<QI36x", self.sections[FILES])
        return [self.sections[STRINGS][offset : offset + size].decode() for offset, size in places]

    def rename_file(self, number: int, name: str) -> None:
        """Gives a data file the name ``name`` in the manifest; its id stays."""
        text = name.encode()
        struct.pack_into("<QI", self.sections[FILES], ENTRY * number, len(self.sections[STRINGS]), len(text))
        self.sections[STRINGS] += text

    def vouch_for(self, number: int, content: bytes) -> None:
        """Makes the manifest expect ``content`` as a data file: its size, and the checksum in its trailer."""
        (crc,) = struct.unpack_from("<I", content, len(content) - DATA_TRAILER + 48)
        struct.pack_into("<Iq", self.sections[FILES], ENTRY * number + 20, crc, len(content))
