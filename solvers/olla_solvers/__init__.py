"""Orders operators for the smallest peak memory and places arrays in one buffer, without torch.

The pipeline is :class:`~olla_solvers.problem.Problem` → order →
:class:`~olla_solvers.plan.Schedule` → place → :class:`~olla_solvers.plan.MemoryPlan` → validate.
"""
