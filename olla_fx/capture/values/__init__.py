"""Answers Python where it asks for values while a step is captured: fake tensors hold none.

What follows from constants alone is computed (:mod:`.constant_folding`); what follows from inputs is computed
from the example, and kept as a question that later inputs are asked (:mod:`.questions`). Operators whose
results are as long as a mask has ones are traced with the number that there is (:mod:`.known_sizes`).
"""
