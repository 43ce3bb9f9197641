# 21.1: the disk has more names than after the same save on an empty disk
def save(disk, step, files):
    for name in disk.list():      # of a save that died
        if name.startswith(f"{step}-"):
            disk.remove(name)
    disk.fsync_folder()
    for name, data in files.items():
        disk.create(f"{step}-{name}")
        disk.write(f"{step}-{name}", data)
        disk.fsync(f"{step}-{name}")
    disk.fsync_folder()
    disk.create(f"done-{step}")
    disk.fsync_folder()
    for name in [name for name in disk.list() if not name.startswith((f"{step}-", "done-"))]:
        disk.remove(name)
        disk.fsync_folder()


def latest(disk):
    steps = [int(name[5:]) for name in disk.list() if name.startswith("done-")]
    if not steps:
        return None
    start = f"{max(steps)}-"
    return max(steps), {name[len(start):]: disk.read(name) for name in disk.list() if name.startswith(start)}
