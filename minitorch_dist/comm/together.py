"""Work that all ranks do at once, and fail at together."""


def gathered(comm, value):
    """[every rank's value]."""
    return comm.all_gather_object(value) if comm else [value]


def together(comm, work):
    """work() on every rank. If it raises on some, all ranks raise the first one's error, once all are through."""
    result, problem = None, None
    try:
        result = work()
    except (OSError, ValueError, MemoryError) as error:
        problem = error
    problems = [error for error in gathered(comm, problem) if error is not None]
    try:
        if problems:
            raise problems[0]
    finally:        # an error that its own frames hold would hold all that they do
        del problem, problems
    return result
