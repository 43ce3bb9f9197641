# 21.1: have the bytes become longer, as text
import json


def save(disk, step, files):
    text = json.dumps([step, {name: data.decode("latin1") for name, data in files.items()}])
    disk.create("new")
    disk.write("new", text.encode())
    disk.fsync("new")
    disk.rename("new", "checkpoint")
    disk.fsync_folder()


def latest(disk):
    if "checkpoint" not in disk.list():
        return None
    step, files = json.loads(disk.read("checkpoint"))
    return step, {name: text.encode("latin1") for name, text in files.items()}
