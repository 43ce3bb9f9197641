# 21.1: has its name before its bytes
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
    disk.create(f"step-{step:08d}.partial")
    disk.write(f"step-{step:08d}.partial", packed(step, files))
    disk.fsync(f"step-{step:08d}.partial")
    disk.fsync_folder()
    disk.rename(f"step-{step:08d}.partial", f"step-{step:08d}")
    disk.fsync_folder()
    for name in old:
        if name in disk.list():
            disk.remove(name)


def latest(disk):
    names = [name for name in disk.list() if disk.read(name)]
    return unpacked(disk.read(names[-1])) if names else None
