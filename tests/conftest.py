import pytest
import torch


@pytest.fixture(autouse=True)
def _one_seed_and_two_threads():
    """Every test starts from the same random state, and leaves the number of threads as it was."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(min(2, threads))
    yield
    torch.set_num_threads(threads)
