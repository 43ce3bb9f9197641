# 21.1: no rename: what is whole is told by checksums
import json
import zlib


def save(disk, step, files):
    old = disk.list()
    places = {name: f"{step}/{len(old)}/{name}" for name in files}
    number = 0
    while any(name.startswith(f"{step}.{number}.") for name in old):
        number += 1
    places = {name: f"{step}.{number}.file.{name}" for name in files}
    facts = {name: [places[name], len(data), zlib.crc32(data)] for name, data in files.items()}
    note = json.dumps([step, facts]).encode()
    texts = {places[name]: data for name, data in files.items()}
    texts[f"{step}.{number}.note"] = zlib.crc32(note).to_bytes(4, "little") + note
    for name, data in texts.items():
        disk.create(name)
        disk.write(name, data)
    for name in texts:
        disk.fsync(name)
    disk.fsync_folder()
    for name in old:
        disk.remove(name)


def latest(disk):
    found = None
    for name in disk.list():
        if name.endswith(".note"):
            text = disk.read(name)
            if len(text) < 4 or zlib.crc32(text[4:]) != int.from_bytes(text[:4], "little"):
                continue
            step, facts = json.loads(text[4:])
            if found is None or step > found[0]:
                try:
                    files = {one: disk.read(place) for one, (place, _, _) in facts.items()}
                except FileNotFoundError:
                    continue
                if all((len(files[one]), zlib.crc32(files[one])) == (n, crc) for one, (_, n, crc) in facts.items()):
                    found = step, files
    return found
