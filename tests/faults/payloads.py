# SPDX-License-Identifier: Apache-2.0
"""Malicious pickles, of every family of opcodes and every protocol.

``HARMFUL`` pickles make a directory when Python unpickles them. ``EXHAUSTING`` ones would take all memory, time or
stack. ``MALFORMED`` ones are what no pickler writes, or what a reader could understand differently than Python does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

__all__ = ["EXHAUSTING", "EXTENSIONS", "HARMFUL", "MALFORMED", "all_payloads"]

MKDIR = b"cos\nmkdir\n"
# For `copyreg.add_extension`: codes of one, two and four bytes. A function can have only one code.
EXTENSIONS = {0x7F: ("os", "mkdir"), 0x1234: ("posix", "mkdir"), 0x123456: ("os", "makedirs")}


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def text8(value: str) -> bytes:
    return b"\x8d" + struct.pack("<Q", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


def whole(body: bytes, protocol: int = 2) -> bytes:
    return (b"" if protocol < 2 else bytes([0x80, protocol])) + body + b"."


def framed(body: bytes) -> bytes:
    return b"\x80\x04\x95" + struct.pack("<Q", len(body) + 1) + body + b"."


def escaped(value: str) -> bytes:
    """Returns text in protocol 0, with every character as an escape."""
    return b"V" + "".join(f"\\u{ord(character):04x}" for character in value).encode() + b"\n"


def partial(path: str, kind: bytes, state: bytes = b"") -> bytes:
    """Returns opcodes that make an instance of ``functools.partial`` and call it."""
    return b"cfunctools\npartial\n" + kind + state + b")R"


HARMFUL: dict[str, Callable[[str], bytes]] = {
    "GLOBAL, REDUCE, protocol 0": lambda p: whole(MKDIR + b"(V" + p.encode() + b"\ntR", 0),
    "GLOBAL, REDUCE, protocol 1": lambda p: whole(MKDIR + b"(" + text(p) + b"tR", 1),
    "GLOBAL, REDUCE, protocol 2": lambda p: whole(MKDIR + text(p) + b"\x85R"),
    "GLOBAL, REDUCE, protocol 3": lambda p: whole(MKDIR + text(p) + b"\x85R", 3),
    "STACK_GLOBAL, REDUCE, in a frame": lambda p: framed(named("os", "mkdir") + short(p) + b"\x85R"),
    "STACK_GLOBAL, protocol 5": lambda p: whole(named("os", "mkdir") + short(p) + b"\x85R", 5),
    "STACK_GLOBAL by BINUNICODE8": lambda p: whole(text8("os") + text8("mkdir") + b"\x93" + text8(p) + b"\x85R", 4),
    "STACK_GLOBAL by the memo": lambda p: whole(
        short("mkdir") + b"\x94" + short("os") + b"\x94" + b"h\1h\0\x93" + short(p) + b"\x85R\x87", 4
    ),
    "STACK_GLOBAL, unicode escapes": lambda p: whole(
        escaped("os") + escaped("mkdir") + b"\x93" + escaped(p) + b"\x85R", 4
    ),
    "STACK_GLOBAL, dotted": lambda p: whole(named("shutil", "os.mkdir") + short(p) + b"\x85R", 4),
    "STACK_GLOBAL, dotted, behind a module that DCP names": lambda p: whole(
        named("torch.distributed.checkpoint.metadata", "os.mkdir") + short(p) + b"\x85R", 4
    ),
    "GLOBAL of a name of Python 2": lambda p: whole(
        b"c__builtin__\neval\n" + text(f"__import__('os').mkdir({p!r})") + b"\x85R"
    ),
    "INST": lambda p: whole(b"(V" + p.encode() + b"\nios\nmkdir\n", 0),
    "OBJ": lambda p: whole(b"(" + MKDIR + text(p) + b"o", 1),
    "NEWOBJ": lambda p: whole(partial(p, MKDIR + text(p) + b"\x86\x81")),
    "NEWOBJ_EX": lambda p: whole(partial(p, MKDIR + text(p) + b"\x86}\x92"), 4),
    "BUILD by __setstate__": lambda p: whole(
        partial(p, b"cbuiltins\nprint\n\x85\x81", b"(" + MKDIR + text(p) + b"\x85}Ntb")
    ),
    "EXT1": lambda p: whole(b"\x82" + b"\x7f" + text(p) + b"\x85R"),
    "EXT2": lambda p: whole(b"\x83" + struct.pack("<H", 0x1234) + text(p) + b"\x85R"),
    "EXT4": lambda p: whole(b"\x84" + struct.pack("<i", 0x123456) + text(p) + b"\x85R"),
    "eval": lambda p: whole(b"cbuiltins\neval\n" + text(f"__import__('os').mkdir({p!r})") + b"\x85R"),
    "exec": lambda p: whole(b"cbuiltins\nexec\n" + text(f"import os; os.mkdir({p!r})") + b"\x85R"),
    "getattr": lambda p: whole(
        b"cbuiltins\ngetattr\ncimportlib\nimport_module\n"
        + text("os")
        + b"\x85R"
        + text("mkdir")
        + b"\x86R"
        + text(p)
        + b"\x85R"
    ),
    "methodcaller": lambda p: whole(
        b"coperator\nmethodcaller\n"
        + text("mkdir")
        + text(p)
        + b"\x86Rcimportlib\nimport_module\n"
        + text("os")
        + b"\x85R\x85R"
    ),
    "a lazy map": lambda p: whole(b"cbuiltins\nlist\ncbuiltins\nmap\n" + MKDIR + text(p) + b"\x85\x86R\x85R"),
    "called and dropped": lambda p: whole(MKDIR + text(p) + b"\x85R0N"),
    "called behind a mark, dropped": lambda p: whole(b"(" + MKDIR + text(p) + b"\x85R1N"),
    "called, doubled, dropped": lambda p: whole(MKDIR + text(p) + b"\x85R20"),
    "a key of a dict": lambda p: whole(b"}" + MKDIR + text(p) + b"\x85RNs"),
    "within a list, by APPENDS": lambda p: whole(b"](" + MKDIR + text(p) + b"\x85Re"),
    "within a set, by ADDITEMS": lambda p: whole(b"\x8f(" + MKDIR + text(p) + b"\x85R\x90", 4),
    "within a frozenset": lambda p: whole(b"(" + MKDIR + text(p) + b"\x85R\x91", 4),
    "arguments by PUT and GET": lambda p: whole(b"(V" + p.encode() + b"\ntp7\n0" + MKDIR + b"g7\nR", 0),
    "arguments by BINPUT and LONG_BINGET": lambda p: whole(text(p) + b"\x85q\x070" + MKDIR + b"j\7\0\0\0R"),
    "before the value, of protocol 0": lambda p: whole(MKDIR + b"(V" + p.encode() + b"\ntR0(lp0\n", 0),
    "behind a frame": lambda p: b"\x80\x04\x95\x02" + bytes(7) + b"N0" + MKDIR + text(p) + b"\x85R.",
    "state of an object that is let in": lambda p: whole(
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
        + text("planner_data")
        + MKDIR
        + text(p)
        + b"\x85Rsb"
    ),
    "argument of a call that is let in": lambda p: whole(
        b"cpathlib\nPosixPath\n(" + text(p) + MKDIR + text(p) + b"\x85R0tR"
    ),
}

MANY = 1_000_000
BILLION = 2**62


def laughs(opening: bytes, end: bytes, drop: bytes) -> bytes:
    """Returns a collection that holds ten times a collection that holds ten times ..., for thirty levels.

    ``drop`` removes each level from the stack, so that only the memo keeps it.
    """
    body = opening + end + b"q\0"
    for level in range(1, 30):
        body += drop + opening + bytes([0x68, level - 1]) * 10 + end + bytes([0x71, level])
    return whole(body)


EXHAUSTING: dict[str, bytes] = {
    "LONG4 of two gigabytes": whole(b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\1"),
    "LONG4 of a negative length": whole(b"\x8b" + struct.pack("<i", -1)),
    "LONG of a million digits": whole(b"L" + b"9" * MANY + b"L\n", 0),
    "LONG1 of 255 bytes": whole(b"\x8a\xff" + b"\x7f" * 255),
    "BINBYTES8 that claims": whole(b"\x8e" + struct.pack("<Q", BILLION) + b"x", 4),
    "BINUNICODE8 that claims": whole(b"\x8d" + struct.pack("<Q", BILLION) + b"x", 4),
    "BYTEARRAY8 that claims": whole(b"\x96" + struct.pack("<Q", 2**40) + b"x", 5),
    "BINBYTES that claims": whole(b"B" + struct.pack("<I", 2**32 - 1) + b"x", 3),
    "BINUNICODE that claims": whole(b"X" + struct.pack("<I", 2**32 - 1) + b"x"),
    "BINSTRING that claims": whole(b"T" + struct.pack("<i", 2**31 - 1) + b"x", 1),
    "LONG_BINPUT far away": whole(b"Nr" + struct.pack("<I", 2**32 - 1)),
    "PUT far away": whole(b"Np4294967295\n", 0),
    "a frame that claims": b"\x80\x04\x95" + struct.pack("<Q", BILLION) + b"N.",
    "tuples, a million deep": whole(b"N" + b"\x85" * MANY),
    "lists, a million deep": whole(b"]" * MANY + b"a" * (MANY - 1)),
    "marks, a million": whole(b"(" * MANY + b"N"),
    "a million memo entries": whole(b"N" + b"\x94" * MANY, 4),
    "a call, a million deep": whole(b"cpathlib\nPosixPath\n)R" + b"\x85" * MANY),
    "laughs of tuples": laughs(b"(", b"t", b"0"),
    "laughs of lists": laughs(b"](", b"e", b"0"),
    "laughs of tuples, all kept": whole(b"(" + laughs(b"(", b"t", b"")[2:-1] + b"t"),
    "a long text, a hundred thousand times": whole(b"](" + text("x" * MANY) + b"q\0" + b"h\0" * 100_000 + b"e"),
    "a list that holds itself": whole(b"]q\0h\0a"),
    "a dict that holds itself": whole(b"}q\0Nh\0s"),
    "an object that is its own state": whole(b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81q\0h\0b"),
}

METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"

MALFORMED: dict[str, bytes] = {
    "PERSID": whole(b"Pan id\n", 0),
    "BINPERSID": whole(text("an id") + b"Q"),
    "NEXT_BUFFER": whole(b"\x97", 5),
    "READONLY_BUFFER": whole(b"N\x98", 5),
    "EMPTY_SET": whole(b"\x8f", 4),
    "BYTEARRAY8": whole(b"\x96" + struct.pack("<Q", 1) + b"x", 5),
    "STRING": whole(b"S'text'\n", 0),
    "SHORT_BINSTRING": whole(b"U\1x", 1),
    "INT that is a bool": whole(b"I01\n", 0),
    "FLOAT": whole(b"F1.5\n", 0),
    "LIST and DICT of protocol 0": whole(b"(l(d\x86", 0),
    "UNICODE with a lone surrogate": whole(b"V\\ud800\n", 0),
    "BINUNICODE with a lone surrogate": whole(b"X\3\0\0\0\xed\xa0\x80"),
    "a name that is not UTF-8": whole(b"c\xff\xfe\nname\n"),
    "a name without an end": b"\x80\x02cos",
    "a NUL in a name": whole(b"cos\0\nmkdir\n"),
    "a name of other letters": whole("c\u043es\nmkdir\n".encode()),
    "STACK_GLOBAL of ints": whole(b"K\1K\2\x93", 4),
    "_StorageInfo of an evil module, called": whole(b"cevil_module\n_StorageInfo\n" + text("x") + b"\x85R"),
    "protocol 6": whole(b"N", 6),
    "protocol 255": whole(b"N", 255),
    "a frame within a frame": b"\x80\x04\x95\x0b" + bytes(7) + b"\x95\x02" + bytes(7) + b"N.",
    "an opcode across the end of a frame": b"\x80\x04\x95\x02" + bytes(7) + b"\x8c\x04text.",
    "no STOP": b"\x80\x02N",
    "nothing": b"",
    "STOP alone": b".",
    "two values": whole(b"NN"),
    "a mark that is left": whole(b"(N"),
    "no such opcode": whole(b"\xff"),
    "GET of nothing": whole(b"h\x07"),
    "APPENDS without a mark": whole(b"]e"),
    "SETITEMS of one": whole(b"}(Nu"),
    "an unhashable key": whole(b"}]Ns"),
    "BUILD of a list": whole(b"]}b"),
    "REDUCE of no callable": whole(b"N)R"),
    "NEWOBJ of what a call gave": whole(b"cpathlib\nPosixPath\n)R)\x81"),
    "attributes twice": whole(
        METADATA + b"}(" + text("state_dict_metadata") + b"}" + text("state_dict_metadata") + b"]" + b"ub"
    ),
    "names of the state dict twice": whole(
        METADATA
        + b"}"
        + text("state_dict_metadata")
        + b"}("
        + 2 * (text("a") + b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n)\x81")
        + b"usb"
    ),
    "something behind STOP": whole(METADATA) + b"N.",
}


def all_payloads(mark: Path) -> dict[str, bytes]:
    """Returns all payloads by name; the harmful ones make ``mark``."""
    harmful = {name: payload(str(mark)) for name, payload in HARMFUL.items()}
    assert len(harmful) + len(EXHAUSTING) + len(MALFORMED) == len({*harmful, *EXHAUSTING, *MALFORMED})
    return {**harmful, **EXHAUSTING, **MALFORMED}
