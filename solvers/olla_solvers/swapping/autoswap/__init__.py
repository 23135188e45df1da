"""AutoSwap: swaps by priority, as late and as early as the link and a limit of the load allow.

Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems", section IV: candidates
(``candidates``) have scores (``scores``), whose combination is tuned by Bayesian optimisation (``weights``);
the first of them are selected until the load is within its limit (``selection``), and their copies are
scheduled (``schedule``). ``planner`` puts it together.
"""
