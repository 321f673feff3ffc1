"""Functions that return the numbers of a report as text: bytes, seconds, ratios in dB, and counts."""

from __future__ import annotations

__all__ = ["amount", "decibel_text", "figure_text", "plural", "seconds_text", "share", "size_text"]


def size_text(size: float) -> str:
    """Return a number of bytes as text with a decimal unit.

    >>> size_text(1_234), size_text(98_700_000)
    ('1.2 kB', '98.7 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """Return a duration as text.

    >>> seconds_text(0.0123), seconds_text(75), seconds_text(425.3), seconds_text(7300)
    ('12 ms', '75.0 s', '425 s', '2 h 2 min')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0095 else f"{1000 * seconds:.1f} ms"
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 120 else f"{minutes} min"


def decibel_text(ratio: float | None) -> str:
    """Return a signal-to-noise ratio in dB as text, or a dash for None.

    None means that the ratio is unknown, or that there is no error.
    """
    return "–" if ratio is None else f"{ratio:.1f} dB"


def figure_text(value: float | None, form: str) -> str:
    """Return a number as text in a format, or a dash for None.

    >>> figure_text(2.345, ".1f"), figure_text(1234, ",d"), figure_text(None, ".1f")
    ('2.3', '1,234', '–')
    """
    return "–" if value is None else format(value, form)


def share(value: float | None) -> str:
    """Return a share as text in percent, or a dash for None."""
    return "–" if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def amount(value: float) -> str:
    """Return a number as text. A large number is written with a word such as ``million``.

    >>> amount(134_515_008), amount(12)
    ('134.5 million', '12')
    """
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.1f} {word}"
    return f"{value:,.0f}"


def plural(count: int, thing: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "layer"), plural(3, "layer")
    ('1 layer', '3 layers')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
