import pytest

from tests.olla_fx.run.fallback.falling import own_loop, whole_step


@pytest.fixture(params=[own_loop, whole_step])
def make(request):
    return request.param
