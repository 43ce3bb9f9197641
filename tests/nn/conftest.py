"""What tests of attention by states share."""

import pytest

from minitorch_dist.nn import states


@pytest.fixture(params=[1, 3, 4, 64])
def stretch(request, monkeypatch):
    """So many positions are multiplied with each other; the sizes here are smaller."""
    monkeypatch.setattr(states, "SHORTEST", request.param)
