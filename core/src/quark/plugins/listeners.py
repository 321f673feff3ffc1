"""Listeners: functions that hear events, none of which can stop a run or keep another from hearing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from quark.base.log import get_logger

if TYPE_CHECKING:
    from quark.plugins.events import Event

__all__ = ["Listener", "Listeners"]

Listener = Callable[["Event"], object]
"""Hears one event; what it returns is not looked at."""


class Listeners:
    """Some listeners, in order.

    Args:
        listeners: Whose each is, for messages, and the listener.
    """

    def __init__(self, listeners: Iterable[tuple[object, Listener]] = ()) -> None:
        self._listeners = list(listeners)
        self._failed: set[int] = set()

    def __iter__(self) -> Iterator[tuple[object, Listener]]:
        return iter(tuple(self._listeners))

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, whose: object, listener: Listener) -> None:
        """Add a listener."""
        self._listeners.append((whose, listener))

    def remove(self, listener: Listener) -> None:
        """Take away a listener that was added last under this identity; nothing where there is none."""
        for number in range(len(self._listeners) - 1, -1, -1):
            if self._listeners[number][1] is listener:
                del self._listeners[number]
                self._failed.discard(id(listener))
                return

    def of(self, whose: object) -> int:
        """Return how many listeners are somebody's."""
        return sum(owner == whose for owner, _ in self)

    def emit(self, event: Event) -> None:
        """Pass an event to every listener; the first error of each is logged, later ones are ignored."""
        for whose, listener in self:
            try:
                listener(event)
            except (Exception, SystemExit):
                if id(listener) not in self._failed:
                    self._failed.add(id(listener))
                    message = "%s raised in quark_on_event for '%s'; this is ignored, and so is what it raises from now on"
                    get_logger(__name__).warning(message, whose, event.name, exc_info=True)
