"""What was measured is kept by machine and settings, through broken lines and several processes."""

import multiprocessing

import pytest
import torch

from olla_fx import disk_cache
from olla_fx.costs import Measurement, Work, keep_measurements, read_measurements

CPU = torch.device("cpu")
PROCESSES, ROUNDS = 3, 40


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def measurement(seconds=0.25):
    return Measurement("mm", Work(10, torch.bfloat16, 20), seconds)


def test_what_is_kept_is_read_again(folder):
    assert read_measurements(CPU) == {}
    keep_measurements(CPU, {"a": measurement(), "b": measurement(0.5)})
    keep_measurements(CPU, {"b": measurement(0.125)})
    assert read_measurements(CPU) == {"a": measurement(), "b": measurement(0.125)}
    assert len(list((folder / "costs").iterdir())) == 1


def test_other_settings_are_other_files(folder, monkeypatch):
    keep_measurements(CPU, {"a": measurement()})
    torch.set_num_threads(2)
    assert read_measurements(CPU) == {}
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert read_measurements(CPU) == {}


@pytest.mark.parametrize("line", ['["c", "mm", 1', '["c"]', "7", '["c", "mm", 1, "no type", 1, 1]'])
def test_a_broken_line_is_left_out(folder, line):
    keep_measurements(CPU, {"a": measurement()})
    (path,) = (folder / "costs").iterdir()
    with path.open("a") as handle:
        handle.write(line)
    keep_measurements(CPU, {"b": measurement()})
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert read_measurements(CPU) == {"a": measurement(), "b": measurement()}


def keep_often(number):
    torch.set_num_threads(1)
    for index in range(ROUNDS):
        keep_measurements(CPU, {f"{number}.{index}.{part}": measurement() for part in range(20)})


def test_processes_keep_at_once(folder):
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(keep_often, range(PROCESSES))
    assert len(read_measurements(CPU)) == PROCESSES * ROUNDS * 20


def test_no_folder_keeps_nothing():
    keep_measurements(CPU, {"a": measurement()})
    assert read_measurements(CPU) == {}


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        keep_measurements(CPU, {"a": measurement()})
