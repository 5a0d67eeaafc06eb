# SPDX-License-Identifier: Apache-2.0
"""Files that say what they should not, with every checksum right: only what is behind the checksums can refuse them."""

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
# Of the manifest: bytes before its directory of sections, number of sections, numbers of some, bytes of an entry.
HEAD, NUM_SECTIONS = 32, 8
STRINGS, ITEMS, DIMS, CHUNKS, FILES, PLANNER_DATA, USER_METADATA, CHECKPOINT_ID = range(NUM_SECTIONS)
ENTRY = 48


def _with_crc(trailer: bytearray, position: int) -> bytes:
    """``trailer`` with its own checksum, which takes the field for zero."""
    struct.pack_into("<I", trailer, position, 0)
    struct.pack_into("<I", trailer, position, zlib.crc32(trailer))
    return bytes(trailer)


def resigned_trailer(content: bytes) -> bytes:
    """A data file with the checksum of what its trailer is now."""
    return content[:-DATA_TRAILER] + _with_crc(bytearray(content[-DATA_TRAILER:]), 48)


def resigned_data(content: bytes) -> bytes:
    """A data file of one block with the checksums of what its records are now. What the metadata want is as before."""
    out = bytearray(content)
    trailer = len(out) - DATA_TRAILER
    (end_of_records,) = struct.unpack_from("<q", out, trailer + 24)
    struct.pack_into("<I", out, end_of_records, zlib.crc32(out[:end_of_records]))
    struct.pack_into("<I", out, trailer + 36, zlib.crc32(out[end_of_records:trailer]))
    return resigned_trailer(bytes(out))


@dataclass
class MetadataFile:
    """A ``.metadata``, in parts that may be changed.

    Attributes:
        head: Of the manifest, up to its directory of sections.
        sections: Of the manifest, in the order of FORMAT.md.
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
        """The whole file; ``manifest`` takes the place of what the parts make."""
        manifest = self.manifest() if manifest is None else manifest
        blocks = [manifest[begin : begin + BLOCK] for begin in range(0, len(manifest), BLOCK)]
        table = b"".join(struct.pack("<I", zlib.crc32(block)) for block in blocks)
        trailer = bytearray(self.trailer)
        struct.pack_into("<qqq", trailer, 16, len(self.pickle), len(manifest), len(blocks))
        crcs = (zlib.crc32(part) for part in (self.pickle, manifest, table))
        struct.pack_into("<III", trailer, 44, *crcs)
        return self.pickle + manifest + table + _with_crc(trailer, 56)

    def file_names(self) -> list[str]:
        """Of the data files, in the order of their numbers in the manifest."""
        places = struct.iter_unpack("<QI36x", self.sections[FILES])
        return [self.sections[STRINGS][offset : offset + size].decode() for offset, size in places]

    def rename_file(self, number: int, name: str) -> None:
        """Lets the manifest call a data file ``name``; its id stays."""
        text = name.encode()
        struct.pack_into("<QI", self.sections[FILES], ENTRY * number, len(self.sections[STRINGS]), len(text))
        self.sections[STRINGS] += text

    def vouch_for(self, number: int, content: bytes) -> None:
        """Lets the manifest want ``content`` as a data file: its size, and the checksum that its trailer has."""
        (crc,) = struct.unpack_from("<I", content, len(content) - DATA_TRAILER + 48)
        struct.pack_into("<Iq", self.sections[FILES], ENTRY * number + 20, crc, len(content))
