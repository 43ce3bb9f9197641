"""The symbols of an ELF file (System V ABI, chapter 4)."""

import struct
from pathlib import Path


def symbols(path, kind):
    """{name: offset in memory} of an ELF file's functions. kind: 2, the static symbols, or 11, the dynamic ones."""
    data = Path(path).read_bytes()
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3a)
    sections = [struct.unpack_from("<IIQQQQII", data, table + i * size) for i in range(count)]
    found = {}
    for section in sections:
        if section[1] == kind:
            names = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                name, _, _, _, value = struct.unpack_from("<IBBHQ", data, at)
                found[data[names + name:data.index(b"\0", names + name)].decode()] = value
    return found
