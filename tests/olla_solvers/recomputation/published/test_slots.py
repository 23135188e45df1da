import itertools
import random

import pytest

from olla_solvers.recomputation.published.slots import TooManySlotsError, slots_for


def made(wanted, reads, there):
    """The sequence of a depth-first walk that makes what is missing."""
    done, sequence = set(there), []

    def make(unit):
        if unit not in done:
            for read in reads[unit]:
                make(read)
            done.add(unit)
            sequence.append(unit)

    for unit in wanted:
        make(unit)
    return sequence


def is_part(sequence, slots):
    rest = iter(slots)
    return all(unit in rest for unit in sequence)


def test_every_sequence_is_a_part_of_the_slots():
    saved = 0
    for seed in range(1500):
        draw = random.Random(seed)
        count = draw.randint(2, 8)
        reads = [
            draw.sample(range(unit), min(unit, draw.choice((0, 1, 1, 2, 2, 3)))) for unit in range(count)
        ]
        wanted = draw.sample(range(count), draw.randint(1, min(3, count)))
        never = {unit for unit in range(count) if draw.random() < 0.1}
        slots = slots_for(wanted, reads, lambda unit: unit not in never)  # noqa: B023
        assert not never.intersection(slots)
        for size in range(count + 1):
            for there in itertools.combinations(range(count), size):
                sequence = made(wanted, reads, never.union(there))
                assert is_part(sequence, slots), (seed, there)
        saved += len(slots) == len(set(slots))
    assert saved > 500


def test_residual_blocks_and_attention_have_one_slot_each():
    reads = [[]]
    for _ in range(6):
        stream = len(reads) - 1
        # Normalised, three projections of it, the attention, and the sum with the stream.
        reads += [[stream], *([stream + 1] for _ in range(3)), [stream + 2, stream + 3, stream + 4]]
        reads += [[stream, stream + 5]]
    slots = slots_for([len(reads) - 1], reads, lambda unit: True)
    assert sorted(slots) == list(range(len(reads)))


def test_too_many_paths_are_refused(monkeypatch):
    monkeypatch.setattr("olla_solvers.recomputation.published.slots.MOST_VISITS", 100)
    # Each unit reads all before it, the nearest one first: twice as many paths a unit.
    reads = [list(range(unit - 1, -1, -1)) for unit in range(20)]
    assert len(slots_for([4], reads, lambda unit: True)) >= 5
    with pytest.raises(TooManySlotsError):
        slots_for([19], reads, lambda unit: True)
    with pytest.raises(TooManySlotsError):
        slots_for([1999], [list(range(unit))[-1:] for unit in range(2000)], lambda unit: True)
