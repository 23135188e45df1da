"""When a kind of call without a plan is worth one."""

from hypothesis import given
from hypothesis import strategies as st

from olla_fx.run.new_kinds import CALLS_BEFORE_WARNING, MOST_KINDS, MOST_STATES, USES_THAT_PAY, NewKinds


def test_a_kind_is_planned_when_it_comes_again():
    kinds = NewKinds()
    assert not kinds.is_worth_a_plan("a", ())
    assert not kinds.is_worth_a_plan("b", ())
    assert kinds.is_worth_a_plan("a", ())


def test_states_of_the_model_are_told_apart():
    kinds = NewKinds()
    assert not kinds.is_worth_a_plan("a", (("weight changed", 0.1),))
    assert not kinds.is_worth_a_plan("a", (("weight changed", 0.2),))
    assert kinds.is_worth_a_plan("a", (("weight changed", 0.1),))


def test_what_cannot_be_planned_is_not_tried_again():
    kinds = NewKinds()
    kinds.is_worth_a_plan("a", ())
    assert kinds.is_worth_a_plan("a", ())
    kinds.refuse("a", ())
    assert not any(kinds.is_worth_a_plan("a", ()) for _ in range(50))
    assert not kinds.is_worth_a_plan("a", (("a hook", None),))
    assert kinds.is_worth_a_plan("a", (("a hook", None),))


def test_a_plan_that_did_not_pay_makes_the_next_one_dearer():
    kinds = NewKinds()
    kinds.note_plan("a")
    assert [kinds.is_worth_a_plan("b", ()) for _ in range(4)] == [False, False, False, True]
    for uses in range(1, USES_THAT_PAY + 1):
        kinds.note_use(uses)
    assert [kinds.is_worth_a_plan("c", ()) for _ in range(2)] == [False, True]


def test_the_first_plan_pays_for_nothing_yet():
    kinds = NewKinds()
    kinds.note_use(USES_THAT_PAY)
    assert [kinds.is_worth_a_plan("a", ()) for _ in range(2)] == [False, True]


def test_plan_at_once():
    kinds = NewKinds()
    kinds.forget()
    assert kinds.is_worth_a_plan("a", ())
    assert not kinds.is_worth_a_plan("b", ())


@given(st.lists(st.integers(0, 30), min_size=1, max_size=400))
def test_plans_are_few_however_kinds_come(calls):
    """With none of them ever used, each costs twice as many calls as the one before."""
    kinds = NewKinds()
    plans = 0
    for kind in calls:
        if kinds.is_worth_a_plan(kind, ()):
            kinds.note_plan(kind)
            plans += 1
    assert 2 ** (plans + 1) - 2 <= len(calls)


def test_memory_is_bounded():
    kinds = NewKinds()
    for index in range(3 * MOST_KINDS):
        kinds.is_worth_a_plan(index, ())
    for index in range(3 * MOST_STATES):
        kinds.is_worth_a_plan("a", ((str(index), index),))
    assert len(kinds._states) == MOST_KINDS
    assert len(kinds._states["a"]) == MOST_STATES


def test_it_says_once_that_most_calls_run_in_eager():
    kinds = NewKinds()
    told = [kinds.note_eager_call() for _ in range(3 * CALLS_BEFORE_WARNING)]
    assert told.index(True) == CALLS_BEFORE_WARNING - 1
    assert sum(told) == 1


def test_it_says_nothing_while_most_calls_are_planned():
    kinds = NewKinds()
    for _ in range(5 * CALLS_BEFORE_WARNING):
        assert not kinds.note_eager_call()
        kinds.note_use(1)
        kinds.note_use(1)
