"""Knows of the plans that run on a device what each needs, and which of them need memory at the same time.

Three relations between plans follow from what was seen of their runs. Two that ran at the same time, or
waited for each other crosswise, are kept *apart*. One that ran while another waited for its backward is
*beside* it, and needs room behind what that one holds meanwhile. All others run in turn. Plans that are not
kept apart share a segment; which do is a colouring of the graph of plans kept apart, where a colour costs
what its largest plan needs (max-coloring, Pemmaraju et al., "Buffer minimization using max-coloring"): first
fit, the largest plan first.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any


class Sharing:
    """Plans, by their owners, as long as these live.

    Attributes:
        wanted: the bytes of each plan's buffer.
    """

    def __init__(self) -> None:
        """Start without plans."""
        self.wanted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._apart: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        self._beside: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, int]]
        self._beside = weakref.WeakKeyDictionary()
        self._hosts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._colours: weakref.WeakKeyDictionary[Any, int] | None = None

    def want(self, owner: object, buffer_bytes: int) -> bool:
        """Note the bytes that an owner's plan needs; return True if the owner is new."""
        is_new = owner not in self.wanted
        if is_new:
            self._apart[owner] = weakref.WeakSet()
            self._beside[owner] = weakref.WeakKeyDictionary()
        else:
            # What it holds while it waits may be another part now.
            self._beside[owner].clear()
            for held in self._beside.values():
                held.pop(owner, None)
        self.wanted[owner] = buffer_bytes
        return is_new

    def colour_again(self) -> None:
        """Let the colours follow from the present plans when they are next asked for."""
        self._colours = None

    def keep_apart(self, owner: object, other: object) -> bool:
        """Note that two plans need memory at the same time; return False if that was known."""
        if other is None or other is owner or other in self._apart[owner]:
            return False
        for one, two in ((owner, other), (other, owner)):
            self._apart[one].add(two)
            self._beside[one].pop(two, None)
        self._colours = None
        return True

    def note_beside(self, owner: object, host: object, held_bytes: int) -> None:
        """Note that a plan runs while another one waits, and needs room behind what that one holds.

        Args:
            owner: of the plan that runs.
            host: owner of the one that waits.
            held_bytes: from where that one begins to the end of what it holds.
        """
        if host is None or host is owner:
            return
        self._hosts.add(host)
        held = self._beside[owner]
        held[host] = max(held_bytes, held.get(host, 0))

    def note_host(self, host: object) -> None:
        """Note that others were to run beside what a plan has left, if there is still such a plan."""
        if host is not None:
            self._hosts.add(host)

    def is_host(self, owner: object) -> bool:
        """Return True if other plans were to run beside what this one's run holds or has left."""
        return owner in self._hosts

    @property
    def colours(self) -> Mapping[Any, int]:
        """A number for each owner; those whose plans share a segment have the same."""
        if self._colours is None:
            colours: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
            for owner in sorted(self.wanted, key=self.wanted.__getitem__, reverse=True):
                taken = {colours.get(other) for other in self._apart[owner]}
                colours[owner] = next(colour for colour in itertools.count() if colour not in taken)
            self._colours = colours
        return self._colours

    def bytes_beside(self) -> dict[int, int]:
        """Return for each colour what its plans need while others of them wait, as far as any did."""
        needed: dict[int, int] = {}
        for owner, held in self._beside.items():
            if held:
                colour = self.colours[owner]
                needed[colour] = max(needed.get(colour, 0), self.wanted[owner] + sum(held.values()))
        return needed
