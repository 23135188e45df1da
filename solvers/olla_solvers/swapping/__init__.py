"""Lets arrays wait in host memory between two accesses, while a link copies them out and in beside computing.

A transfer (:class:`~olla_solvers.swapping.transfers.Transfer`) says of one array between which timesteps it
is copied out, away, and copied in. :func:`~olla_solvers.swapping.simulate.simulate` says what that takes, and
:func:`~olla_solvers.swapping.least_time.least_time_with_swaps` plans what is kept, made again and swapped.
"""
