"""Whether what drafts is of any use: how its drafts have fared in all texts.

Some published heads are dead: their tensors are there, have the right shapes, and were never
trained, or were trained for another trunk. Every draft is then rejected, the text is as exact as
ever, and only slower; nothing but a count shows it.
"""

from __future__ import annotations

from collections.abc import Callable

ENOUGH = 200
"""Drafts that are looked at before one is given up."""

HOPELESS = 0.01
"""A share of drafts whose first token is kept that makes no difference. Of 200 drafts of a head
that is right once in twenty times, so few are kept in three of a thousand trials."""


class Record:
    """Counts drafts, and gives up what they come from once it is hopeless."""

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        """
        Args:
            report: told once, in one line, when it has been given up.
        """
        self.drafts = self.kept = 0
        self.given_up = False
        self._report = report

    def count(self, kept: bool) -> None:
        """Take in one draft, and whether its first token was kept."""
        self.drafts += 1
        self.kept += kept
        if self.drafts >= ENOUGH and self.kept <= HOPELESS * self.drafts:
            self.given_up = True

    def tell(self) -> None:
        """Say so, if there is something to say: where whoever is told may stop what is going on."""
        report, self._report = self._report, None if self.given_up else self._report
        if self.given_up and report:
            report(
                f"nothing is drafted any more: of {self.drafts} drafts, {self.kept} had a token "
                "kept, so what drafts was not made for this model or is damaged"
            )
