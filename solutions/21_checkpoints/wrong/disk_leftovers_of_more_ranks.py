# 21.1: which isn't of this checkpoint
def save(disk, step, files):
    old = [name for name in disk.list() if not name.startswith(f"{step:08d}-")]
    for name, data in files.items():
        disk.create(f"{step:08d}-{name}")
        disk.write(f"{step:08d}-{name}", data)
        disk.fsync(f"{step:08d}-{name}")
    disk.fsync_folder()
    disk.create(f"done-{step:08d}")
    disk.fsync_folder()
    for name in sorted(old, reverse=True):
        disk.remove(name)
        disk.fsync_folder()


def latest(disk):
    steps = sorted(name[5:] for name in disk.list() if name.startswith("done-"))
    if not steps:
        return None
    start = steps[-1] + "-"
    return int(steps[-1]), {name[len(start):]: disk.read(name) for name in disk.list() if name.startswith(start)}
