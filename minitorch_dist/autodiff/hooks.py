"""What the registration of a hook returns."""


class RemovableHandle:
    """A registered hook. remove() takes it away, as the end of a `with` block does; a second time does nothing.

        with layer.register_forward_hook(look):
            model(x)
    """

    __slots__ = ("_take_away",)

    def __init__(self, take_away):
        self._take_away = take_away

    def remove(self):
        """The hook isn't called any more."""
        if self._take_away is not None:
            self._take_away()
            self._take_away = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.remove()


def without(hooks, hook):
    """A tuple of hooks less this one; less its last one where it has been registered several times."""
    last = max((i for i, h in enumerate(hooks) if h is hook), default=len(hooks))
    return hooks[:last] + hooks[last + 1:]
