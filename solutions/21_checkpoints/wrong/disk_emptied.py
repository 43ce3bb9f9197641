# 21.1: the disk has more names than after the same save on an empty disk
import json


def save(disk, step, files):
    index = {"step": step, "files": {name: f"{step}-{name}" for name in files}}
    for name, data in files.items():
        write(disk, index["files"][name], data)
    write(disk, "index.partial", json.dumps(index).encode())
    disk.fsync_folder()
    disk.rename("index.partial", "index")
    disk.fsync_folder()
    for name in disk.list():
        if name != "index" and name not in index["files"].values():
            disk.create(name)


def write(disk, name, data):
    disk.create(name)
    disk.write(name, data)
    disk.fsync(name)


def latest(disk):
    if "index" not in disk.list():
        return None
    index = json.loads(disk.read("index"))
    return index["step"], {name: disk.read(place) for name, place in index["files"].items()}
