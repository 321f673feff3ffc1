"""What a run tells its listeners, and the two listeners that come with it: a progress bar on a terminal, lines in the log."""

from quark.events.run_events import SILENT, RunEvents, running

__all__ = ["SILENT", "RunEvents", "running"]
