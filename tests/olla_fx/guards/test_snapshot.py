"""The identities of what is in reach must show every change that a snapshot shows."""

import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_fx.guards.snapshot import Identities, snapshot_of

plain = st.one_of(st.integers(0, 3), st.floats(0, 1), st.text(max_size=2), st.none(), st.booleans())
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda fields: SimpleNamespace(**fields)
        ),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


def places(value):
    """Every list and dictionary in reach, objects' dictionaries included."""
    held = value if isinstance(value, list | dict | tuple) else getattr(value, "__dict__", None)
    if held is None:
        return []
    inner = [place for part in (held.values() if isinstance(held, dict) else held) for place in places(part)]
    return inner if isinstance(held, tuple) else [held, *inner]


@settings(deadline=None, max_examples=300)
@given(values, plain, st.randoms(use_true_random=False))
def test_identities_show_what_a_snapshot_shows(value, new, chance):
    snapshot, identities = snapshot_of(value), Identities(value)
    assert identities.are_unchanged()
    held = places(value)
    if held:
        chosen = chance.choice(held)
        if isinstance(chosen, dict):
            chosen[chance.choice(["a", "b", "new"])] = new
        elif chosen and chance.random() < 0.5:
            chosen[chance.randrange(len(chosen))] = new
        else:
            chosen.append(new)
    assert not identities.are_unchanged() or snapshot_of(value) == snapshot


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3),
        [np.zeros(3)],
        {"generator": random.Random(0)},
        torch.Generator(),
        functools.partial(len, [1]),
        iter([1, 2]),
        {1, 2},
        [[[[np.zeros(1)]]]],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_changes_within_itself_is_left_to_snapshots(value):
    with pytest.raises(LookupError):
        Identities(value)


def test_numbers_that_compare_equal_are_told_apart():
    for before, after in [(0.0, -0.0), (1, True), (1, 1.0)]:
        held = [before]
        identities = Identities(held)
        held[0] = after
        assert not identities.are_unchanged()
