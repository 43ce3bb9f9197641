# 21.1: for a while there is no checkpoint at all
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
    disk.create("checkpoint")
    disk.write("checkpoint", packed(step, files))
    disk.fsync("checkpoint")
    disk.fsync_folder()


def latest(disk):
    if "checkpoint" not in disk.list():
        return None
    data = disk.read("checkpoint")
    try:
        return unpacked(data)
    except ValueError:
        return None
