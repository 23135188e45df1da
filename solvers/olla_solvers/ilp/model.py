"""States an integer linear program in plain numbers, which any solver's process can be given.

Kept apart from the solvers so that stating a program loads none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Column: TypeAlias = int
Sense: TypeAlias = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Row:
    """The sum of coefficient times column, compared with a right-hand side."""

    terms: tuple[tuple[Column, float], ...]
    sense: Sense
    right: float


@dataclass
class LinearModel:
    """Columns and rows; minimises one column.

    Attributes:
        lower: for each column its lower bound.
        upper: for each column its upper bound.
        integer: for each column True if it must be whole.
        start: for each column its value in a known solution, or None.
        rows: the constraints.
        objective: the column to minimise.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    start: list[float | None] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    objective: Column = 0

    def column(self, lower: float, upper: float, *, integer: bool = False) -> Column:
        """Add a column and return its index.

        Args:
            lower: its least value.
            upper: its largest value.
            integer: True if it must be whole. Its bounds then become whole, too: HiGHS has proven wrong
                optima under fractional ones.

        Returns:
            The index.
        """
        if integer:
            lower, upper = math.ceil(lower), math.floor(upper)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.start.append(None)
        return len(self.lower) - 1

    def binary(self) -> Column:
        """Add a column that is 0 or 1."""
        return self.column(0, 1, integer=True)

    def require(self, expression: Expression, sense: Sense, right: float = 0) -> None:
        """Add a row, unless it holds no column and is true."""
        terms = tuple((column, factor) for column, factor in expression.factors.items() if factor)
        constant = right - expression.constant
        holds = {"<=": constant >= 0, ">=": constant <= 0, "==": constant == 0}[sense]
        if terms or not holds:
            self.rows.append(Row(terms, sense, constant))


class Expression:
    """A sum of columns times factors, and a constant."""

    def __init__(self, terms: Iterable[tuple[Column, float]] = (), constant: float = 0) -> None:
        """Start from terms and a constant."""
        self.factors: dict[Column, float] = {}
        self.constant = constant
        for column, factor in terms:
            self.add(column, factor)

    def add(self, column: Column | None, factor: float) -> None:
        """Add a column times a factor; None stands for a column fixed at 1."""
        if column is None:
            self.constant += factor
        else:
            self.factors[column] = self.factors.get(column, 0) + factor
