import pytest

from olla_fx.host_link import link_of
from olla_solvers.errors import OptionError
from olla_solvers.swapping.transfers import Link


@pytest.mark.parametrize(
    ("given", "out", "back"),
    [
        ("16GB/s", 16e9, 16e9),
        (" 1.5 gib / s", 1.5 * 2**30, 1.5 * 2**30),
        (8e9, 8e9, 8e9),
        (("12GB/s", 16e9), 12e9, 16e9),
        (Link(1.0, 2.0), 1.0, 2.0),
    ],
)
def test_what_users_say(given, out, back):
    assert link_of(given) == Link(out, back)


@pytest.mark.parametrize(
    "given",
    ["16GB", "fast", 0, -1.0, True, (1.0,), (1.0, 2.0, 3.0), float("inf"), "GB/s", "16Gb/s", "128Gbit/s"],
)
def test_what_makes_no_sense(given):
    with pytest.raises(OptionError, match="link is bytes in a second"):
        link_of(given)
