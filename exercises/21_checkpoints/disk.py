"""21.1 A save that survives a kill.

The disk is a folder of files, and what a program tells it isn't on it at once. Its methods:

    create(name)        an empty file; one that is there is emptied
    write(name, data)   bytes behind those that it has
    fsync(name)         returns when the file's bytes are safe
    rename(old, new)    a file gets another name, at one stroke; one that had that name is gone
    remove(name)        no file any more
    fsync_folder()      returns when the names are safe: what was created, renamed and removed until now
    list()              all names, in order
    read(name)          the bytes of a file

Of what isn't safe when the power fails anything may be lost, and the rest be there: the file system writes when it
likes, in the order that it likes. exercises/21_checkpoints/simulated.py is this disk, and you may play with it.
"""

import json


def save(disk, step, files):
    """Write a checkpoint, and delete the one before it. Whenever the program dies, latest finds that one or this one,
    whole; once save has returned, this one, whatever happens.

    step   a number ≥ 0, greater than that which latest finds
    files  {name: bytes}, one or several, which may be empty; other checkpoints may have other names

    Under which names it lies on the disk is yours to decide. A save that died may have left things, also of this very
    step; when save returns, they are gone as well. The disk has no files but yours.
    """
    raise NotImplementedError("begin with the files, under names that no checkpoint has yet, and make them safe: "
                              "bytes and names. Which one call makes all of them count at the same moment?")


def latest(disk):
    """(step, {name: bytes}) of the newest checkpoint that is whole; None if there is none."""
    raise NotImplementedError("begin with the one thing on the disk that says what counts. Is it there?")
