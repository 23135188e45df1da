"""Learns to swap and recompute: the deep Q-network of S. Chen, sections 4.4, 4.9 and 4.10.

"GPU Memory Management for Neural Networks using Deep Q-Network". The environment is
:mod:`olla_solvers.swapping.environment`. :func:`plan_by_learning` learns and plans, :func:`learn` learns
alone, on one step or several, and :func:`save_network` keeps what was learned for other steps.
"""

from olla_fx.deep_q.checkpoint import load_network, save_network
from olla_fx.deep_q.learning import Learned, Settings, learn
from olla_fx.deep_q.network import QNetwork
from olla_fx.deep_q.planner import LearnedPlan, plan_by_learning

__all__ = [
    "Learned",
    "LearnedPlan",
    "QNetwork",
    "Settings",
    "learn",
    "load_network",
    "plan_by_learning",
    "save_network",
]
