"""Plans kept on disk: found again, safe with two writers, and never trusted."""

import json
import multiprocessing
import warnings

import pytest
import torch

from olla_fx import disk_cache
from olla_solvers.planner import make_plan
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import SmallNet, captured_training, front, images, mlp, sgd, vectors

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    chosen = tmp_path / "plans"
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(chosen))
    return chosen


def problem():
    return front(captured_training(mlp(), vectors(1)[0])).problem


def cached_plan(problem, options, device, planner):
    path = disk_cache.plan_path(problem, options, device)
    plan = disk_cache.load_plan(path, problem)
    if plan is None:
        plan = planner()
        disk_cache.save_plan(path, plan)
    return plan


class Planner:
    """Counts how often it is asked."""

    def __init__(self, wanted):
        self.wanted, self.asked = wanted, 0

    def __call__(self):
        self.asked += 1
        return make_plan(self.wanted, solver="none")


def test_a_plan_is_made_once(folder):
    wanted = problem()
    planner = Planner(wanted)
    first, second = (cached_plan(wanted, {"solver": "none"}, CPU, planner) for _ in range(2))
    assert planner.asked == 1
    assert first == second
    assert len(list(folder.iterdir())) == 1


def test_other_options_and_other_graphs_are_other_plans(folder):
    wanted = problem()
    planner = Planner(wanted)
    cached_plan(wanted, {"solver": "none"}, CPU, planner)
    cached_plan(wanted, {"solver": "auto"}, CPU, planner)
    cached_plan(wanted, {"solver": "none"}, torch.device("meta"), planner)
    assert planner.asked == 3
    other = front(captured_training(SmallNet(), images(1)[0])).problem
    assert cached_plan(other, {"solver": "none"}, CPU, Planner(other)).order
    assert len(list(folder.iterdir())) == 4


def test_another_torch_plans_anew(folder, monkeypatch):
    wanted = problem()
    planner = Planner(wanted)
    for version in ("2.98.0", "2.99.0", "2.98.0"):
        monkeypatch.setattr(torch, "__version__", version)
        cached_plan(wanted, {}, CPU, planner)
    assert planner.asked == 2
    assert len(list(folder.iterdir())) == 2


def test_a_second_start_asks_no_planner(folder, monkeypatch):
    # Seconds that the first start has measured may lead to another choice of what is recomputed.
    options = {"solver": "auto", "recompute": 0}
    WholeStep(SmallNet(), sgd, images(1)[0], **options).run(images(3))
    files = set(folder.iterdir())
    assert len(files) == 2  # before and after recording

    def refuse(*_, **__):
        raise AssertionError("planned again")

    monkeypatch.setattr("olla_fx.compile.make_plan", refuse)
    WholeStep(SmallNet(), sgd, images(1)[0], **options).run(images(3))
    assert set(folder.iterdir()) == files


def break_json(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def empty(path):
    path.write_text("")


def binary(path):
    path.write_bytes(bytes(range(256)))


def foreign(path):
    path.write_text(json.dumps({"hello": [1, 2]}))


def not_an_object(path):
    path.write_text("[]")


def overlapping(path):
    plan = json.loads(path.read_text())
    plan["offsets"] = dict.fromkeys(plan["offsets"], 0)
    path.write_text(json.dumps(plan))


def strange_values(path):
    plan = json.loads(path.read_text())
    plan["order"] = {"a": 1}
    path.write_text(json.dumps(plan))


@pytest.mark.parametrize(
    "spoil", [break_json, empty, binary, foreign, not_an_object, overlapping, strange_values]
)
def test_a_file_that_is_no_plan_is_made_again(folder, spoil):
    wanted = problem()
    planner = Planner(wanted)
    first = cached_plan(wanted, {}, CPU, planner)
    (path,) = folder.iterdir()
    spoil(path)
    with pytest.warns(RuntimeWarning, match=f"{path.name} cannot be used and is made again"):
        again = cached_plan(wanted, {}, CPU, planner)
    assert planner.asked == 2
    assert again.offsets == first.offsets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_plan(wanted, {}, CPU, planner)
    assert planner.asked == 2


def test_a_plan_of_another_graph_is_not_used(folder):
    wanted = problem()
    other = front(captured_training(SmallNet(), images(1)[0])).problem
    cached_plan(wanted, {}, CPU, Planner(wanted))
    (path,) = folder.iterdir()
    cached_plan(other, {}, CPU, Planner(other))
    (other_path,) = set(folder.iterdir()) - {path}
    path.write_text(other_path.read_text())
    with pytest.warns(RuntimeWarning, match="made again"):
        cached_plan(wanted, {}, CPU, Planner(wanted))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path / "file" / "plans"))
    wanted = problem()
    with pytest.warns(RuntimeWarning, match="plans cannot be kept|cannot be used"):
        assert cached_plan(wanted, {}, CPU, Planner(wanted)).order


def test_no_folder_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    assert disk_cache.cache_folder() is None
    planner = Planner(problem())
    for _ in range(2):
        cached_plan(planner.wanted, {}, CPU, planner)
    assert planner.asked == 2
    assert not list(tmp_path.iterdir())


def write_often(seed):
    wanted = problem()
    for _ in range(20):
        disk_cache.save_plan(disk_cache.cache_folder() / "shared.json", make_plan(wanted, solver="none"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if disk_cache.load_plan(disk_cache.cache_folder() / "shared.json", wanted) is None:
                raise AssertionError("the file was gone")
    return seed


def test_two_processes_write_at_once(folder):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(write_often, range(2)) == [0, 1]
    assert [path.name for path in folder.iterdir()] == ["shared.json"]


def test_answers_about_kernels_are_asked_once(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path))
    asked = []

    def answer():
        asked.append(1)
        return False

    device = torch.device("cpu")
    assert [disk_cache.remembered(device, {"rows": 16}, answer) for _ in range(3)] == [False] * 3
    assert len(asked) == 1
    assert disk_cache.remembered(device, {"rows": 32}, lambda: True)
    for path in (tmp_path / "kernels").iterdir():
        path.write_text("{")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert not disk_cache.remembered(device, {"rows": 16}, answer)
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, "")
    assert not disk_cache.remembered(device, {"rows": 16}, answer)
    assert len(asked) == 3
