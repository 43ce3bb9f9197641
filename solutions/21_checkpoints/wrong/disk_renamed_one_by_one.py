# 21.1: one after the other becomes the new one
def save(disk, step, files):
    files = {**files, "step": str(step).encode()}
    for name, data in files.items():
        disk.create(name + ".new")
        disk.write(name + ".new", data)
        disk.fsync(name + ".new")
    for name in files:
        disk.rename(name + ".new", name)
    disk.fsync_folder()
    for name in disk.list():
        if name not in files:
            disk.remove(name)


def latest(disk):
    if "step" not in disk.list():
        return None
    names = [name for name in disk.list() if name != "step" and not name.endswith(".new")]
    return int(disk.read("step")), {name: disk.read(name) for name in names}
