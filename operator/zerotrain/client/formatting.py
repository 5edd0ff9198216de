"""Readable forms of numbers: time spans, sizes, percentages."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def span(seconds: float) -> str:
    """Return a time span as text: `45s`, `3m20s`, `2h05m`, `3d4h`; two parts at most, as kubectl prints
    ages."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes, left = divmod(whole, 60)
    if minutes < 10:
        return f"{minutes}m{left:02d}s" if left else f"{minutes}m"
    if minutes < 120:
        return f"{minutes}m"
    hours, left = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{left:02d}m" if left else f"{hours}h"
    days, left = divmod(hours, 24)
    return f"{days}d{left}h" if left and days < 10 else f"{days}d"


def since(moment: datetime | None, now: datetime | None = None) -> str:
    """Return the time since `moment` as text; `-` where it is unknown."""
    if moment is None:
        return "-"
    return span(((now or datetime.now(UTC)) - moment).total_seconds())


def size(num_bytes: float) -> str:
    """Return a size as text, such as `12.3 GiB`."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def compute_text(step_flops: float | None, mfu: float | None) -> str:
    """Return the operations of a step and the utilisation as text, such as `3.2 TFLOP a step, MFU 41.3%`;
    empty where neither is known."""
    parts = (f"{step_flops / 1e12:.3g} TFLOP a step" if step_flops else "", f"MFU {mfu:.1%}" if mfu else "")
    return ", ".join(part for part in parts if part)


def counted(number: int, noun: str) -> str:
    """Return number and noun, such as `1 worker`, `2 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
