"""Which ingresses are there: one that says nothing for too long is gone."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.standstill import ORDINARY_PAUSE_S, Standstill
from specdec.transport.base import PeerId


class IngressLeases:
    """When each was heard last. Nobody is blamed for a time in which nothing was taken in here."""

    def __init__(self, lease_s: float) -> None:
        """An ingress that is silent for `lease_s` is gone."""
        self._lease_s = lease_s
        self._heard_s: dict[PeerId, float] = {}
        self._standstill = Standstill(ordinary_s=ORDINARY_PAUSE_S)

    def __iter__(self) -> Iterator[PeerId]:
        """Those that are there."""
        return iter(self._heard_s)

    def hear(self, ingress: PeerId, now_s: float) -> None:
        """Note that one has said something."""
        self._forgive_standstill(now_s)
        self._heard_s[ingress] = now_s

    def take_silent(self, now_s: float) -> list[PeerId]:
        """Return, once, those that are gone."""
        self._forgive_standstill(now_s)
        silent = [one for one, heard_s in self._heard_s.items() if now_s - heard_s > self._lease_s]
        for ingress in silent:
            del self._heard_s[ingress]
        return silent

    def _forgive_standstill(self, now_s: float) -> None:
        forgiven_s = self._standstill.forgiven_s(now_s, self._lease_s)
        if forgiven_s > 0.0:
            self._heard_s = {
                ingress: min(now_s, heard_s + forgiven_s) for ingress, heard_s in self._heard_s.items()
            }
