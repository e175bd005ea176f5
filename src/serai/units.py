"""How serai prints quantities: bytes in GiB/MiB, bandwidth in GB/s (10^9 bytes), time in s or h:mm:ss."""

from __future__ import annotations

__all__ = ["format_bandwidth", "format_bytes", "format_duration", "parse_bytes"]

_BINARY = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def format_bytes(count: float) -> str:
    """``3221225472`` → ``'3.00 GiB'``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_bandwidth(bytes_per_second: float) -> str:
    """``2.5e9`` → ``'2.50 GB/s'`` (10^9 bytes)."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def format_duration(seconds: float) -> str:
    """``0.0042`` → ``'4.2 ms'``; ``75`` → ``'1:15'``; ``7384`` → ``'2:03:04'``."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def parse_bytes(text: str) -> int:
    """``'4 GiB'`` or ``'500MB'`` or ``'4096'`` → bytes. Raises ``ValueError`` with the accepted units."""
    cleaned = text.strip().lower()
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = cleaned[len(cleaned.rstrip("abcdefghijklmnopqrstuvwxyz")) :] or "b"
    scale = _BINARY.get(unit) or _DECIMAL.get(unit)
    if scale is None:
        raise ValueError(f"{text!r} is no size: use a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(float(digits) * scale)
