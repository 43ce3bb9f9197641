# 21.1: as text 9 is greater than 10
import json


def packed(step, files):
    head = json.dumps({"step": step, "sizes": {name: len(data) for name, data in files.items()}}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(files.values())


def unpacked(data):
    end = 8 + int.from_bytes(data[:8], "little")
    head, files = json.loads(data[8:end]), {}
    for name, size in head["sizes"].items():
        files[name], end = data[end:end + size], end + size
    return head["step"], files



def save(disk, step, files):
    old = disk.list()
    disk.create("partial")
    disk.write("partial", packed(step, files))
    disk.fsync("partial")
    disk.fsync_folder()
    disk.rename("partial", f"step-{step}")
    disk.fsync_folder()
    for name in old:
        if name != "partial":
            disk.remove(name)


def latest(disk):
    names = sorted(name for name in disk.list() if name != "partial")
    return unpacked(disk.read(names[-1])) if names else None
