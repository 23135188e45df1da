"""Captures a step with symbols in the places of sizes and numbers that change from call to call.

While the step is traced, a symbol stands for each size of the inputs that varies (:mod:`.sizes`), for each
number of the user's that changes (:mod:`.late_numbers`), and for whole numbers that Python asks of the inputs
(:mod:`.sizes`, :mod:`.integers`). Afterwards what the graph computes of sizes becomes formulas
(:mod:`.formulas`), and the step is compared with one that was captured with numbers (:mod:`.comparison`).
"""
