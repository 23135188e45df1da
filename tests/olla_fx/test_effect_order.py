"""The order of effects and of what may raise, on operators that are only positions."""

from __future__ import annotations

from olla_fx.effect_order import edges_between_effects

LOSS = 4


def test_a_check_waits_for_the_effects_before_it_and_later_ones_wait_for_the_check() -> None:
    edges = edges_between_effects([set()] * (LOSS + 1), {1, 3}, {0, 2}, {LOSS})
    assert edges == [(0, 1), (1, 2), (1, 3), (2, 3)]


def test_effects_of_the_update_wait_for_the_loss_and_the_last_check() -> None:
    edges = edges_between_effects([set()] * (LOSS + 2), {1}, {LOSS + 1}, {LOSS})
    assert edges == [(LOSS, LOSS + 1), (1, LOSS + 1)]


def test_an_edge_that_others_imply_is_left_out() -> None:
    sources = [set(), {0}, set(), {1}, {3}, {LOSS}]
    assert edges_between_effects(sources, {3}, {0, LOSS + 1}, {LOSS}) == []


def test_effects_without_checks_keep_no_order_before_the_loss() -> None:
    assert edges_between_effects([set()] * (LOSS + 1), set(), {0, 2}, {LOSS}) == []
