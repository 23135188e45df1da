"""Loops of which some calls run in eager."""

from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, SmallNet, images

ONE_PLAN_A_SIZE = {"fallback": "eager", "dynamic": False}


class FallingStep(WholeStep):
    """A whole step of which some calls run in eager: there is nothing to say of their arrays."""

    def _check_service(self, batch):
        pass


def own_loop(model=None, **options):
    return OwnLoop(model or SmallNet(), images(1)[0][0], ADAMW, **{**ONE_PLAN_A_SIZE, **options})


def whole_step(model=None, **options):
    return FallingStep(model or SmallNet(), ADAMW, images(1)[0], **{**ONE_PLAN_A_SIZE, **options})


def sizes_in_turn(count, *sizes):
    return [images(1, batch=sizes[index % len(sizes)])[0] for index in range(count)]
