"""A snapshot must show every change of what is in reach, and none where nothing changed."""

import functools
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from olla_fx.guards.snapshot import snapshot_of

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


def written(value):
    """Return everything in reach as text, types and signs of numbers included."""
    return f"{type(value).__name__} {value!r}"


@settings(deadline=None, max_examples=300)
@given(values, plain, st.randoms(use_true_random=False))
def test_snapshots_show_changes(value, new, chance):
    snapshot, before = snapshot_of(value), written(value)
    assert snapshot_of(value) == snapshot
    held = places(value)
    if held:
        chosen = chance.choice(held)
        if isinstance(chosen, dict):
            chosen[chance.choice(["a", "b", "new"])] = new
        elif chosen and chance.random() < 0.5:
            chosen[chance.randrange(len(chosen))] = new
        else:
            chosen.append(new)
    assert (snapshot_of(value) == snapshot) == (written(value) == before)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.zeros(3), lambda array: array.fill(1)),
        ([np.zeros(3)], lambda values: values[0].fill(1)),
        ({"generator": random.Random(0)}, lambda values: values["generator"].random()),
        (torch.Generator(), lambda generator: generator.manual_seed(5)),
        (functools.partial(len, [1]), lambda call: call.args[0].append(2)),
        (iter([1, 2]), next),
        ({1, 2}, lambda numbers: numbers.add(3)),
        ([[[[np.zeros(1)]]]], lambda values: values[0][0][0][0].fill(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changes_within_themselves_show(value, change):
    snapshot = snapshot_of(value)
    assert snapshot_of(value) == snapshot
    change(value)
    assert snapshot_of(value) != snapshot


def test_a_proxy_stands_for_its_object_by_identity():
    model = nn.Linear(2, 2)
    holder = SimpleNamespace(parent=weakref.proxy(model))
    snapshot = snapshot_of(holder)
    model.counter = 1
    assert snapshot_of(holder) == snapshot


def test_numbers_that_compare_equal_are_told_apart():
    for before, after in [(0.0, -0.0), (1, True), (1, 1.0)]:
        for hold in (lambda number: [number], lambda number: {"a": number}, lambda number: number):
            assert snapshot_of(hold(before)) != snapshot_of(hold(after))
