# 21.1: step 100 with rank-1, which isn't of this checkpoint
def save(disk, step, files):
    last = newest(disk)
    for name in disk.list():
        if last is None or not name.startswith(str(last)):     # begins with 10, too: what is left of a save of step 100
            disk.remove(name)
    disk.fsync_folder()
    for name, data in files.items():
        write(disk, f"{step}:file:{name}", data)
    disk.fsync_folder()
    write(disk, f"{step}:done", b"")
    disk.fsync_folder()
    for name in disk.list():
        if not name.startswith(f"{step}:"):
            disk.remove(name)


def write(disk, name, data):
    disk.create(name)
    disk.write(name, data)
    disk.fsync(name)


def newest(disk):
    return max((int(name.split(":")[0]) for name in disk.list() if name.endswith(":done")), default=None)


def latest(disk):
    step = newest(disk)
    if step is None:
        return None
    start = f"{step}:file:"
    return step, {name.removeprefix(start): disk.read(name) for name in disk.list() if name.startswith(start)}
