"""Charts as inline SVG, drawn by hand: no script, no font, no request to anywhere.

Colours are CSS classes, so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Level", "Mark", "Series", "bar_of_parts", "line_chart", "stacked_columns", "ticks"]

_MOST_POINTS = 700


@dataclass(frozen=True)
class Series:
    """A line: points in x order; ``style`` is a CSS class; ``dots`` draws the points too."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line at x, with a short label and a longer one for the pointer."""

    x: float
    label: str
    title: str
    style: str = "mark"


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line at y, labelled."""

    y: float
    label: str


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside ``[low, high]``, about ``count`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``_MOST_POINTS`` points: the lowest and highest of each bucket, so that spikes stay visible."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= _MOST_POINTS:
        return finite
    size = math.ceil(len(finite) / (_MOST_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(finite), size):
        bucket = finite[start : start + size]
        pair = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept.extend(sorted(pair))
    return kept


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    levels: Sequence[Level] = (),
    from_zero: bool = False,
    width: int = 1040,
    height: int = 300,
) -> str:
    """Lines over a common x axis. Returns an ``<svg>`` element."""
    lines = [(entry, _thin(entry.points)) for entry in series]
    every = [point for _, points in lines for point in points]
    if not every:
        return f'<p class="empty">{escape(title)}: nothing was recorded.</p>'
    left, right, top, bottom = 58, 16, 22, 38
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    heights = [y for _, y in every] + [level.y for level in levels]
    y_low, y_high = (0.0 if from_zero else min(heights)), max(heights)
    pad = (y_high - y_low or abs(y_high) or 1.0) * 0.06
    y_low, y_high = (0.0 if from_zero else y_low - pad), y_high + pad
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5

    def px(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (width - left - right)

    def py(y: float) -> float:
        return height - bottom - (y - y_low) / (y_high - y_low) * (height - top - bottom)

    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for y in ticks(y_low, y_high):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        )
        parts.append(f'<text class="tick end" x="{left - 8}" y="{py(y) + 4:.1f}">{_number(y)}</text>')
    whole = [x for x in ticks(x_low, x_high, count=8) if x == int(x)]
    parts.extend(
        f'<text class="tick mid" x="{px(x):.1f}" y="{height - bottom + 18}">{_number(x)}</text>'
        for x in whole
    )
    parts.append(
        f'<text class="axis mid" x="{(left + width - right) / 2}" y="{height - 4}">{escape(x_label)}</text>'
    )
    parts.append(f'<text class="axis" x="{left - 50}" y="12">{escape(y_label)}</text>')
    for level in levels:
        y = py(level.y)
        parts.append(f'<line class="level" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="level-label end" x="{width - right}" y="{y - 6:.1f}">{escape(level.label)}</text>'
        )
    taken = -1e9
    for mark in sorted(marks, key=lambda entry: entry.x):
        x = px(min(max(mark.x, x_low), x_high))
        parts.append(
            f'<g class="{mark.style}"><title>{escape(mark.title)}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>'
            f'<rect x="{x - 5:.1f}" y="{top}" width="10" height="{height - bottom - top}" opacity="0"/>'
        )
        if x - taken > 60:
            taken = x
            near_edge = x > width - right - 80
            anchor, shift = ("end", -5) if near_edge else ("start", 5)
            parts.append(
                f'<text text-anchor="{anchor}" x="{x + shift:.1f}" y="{top + 10}">{escape(mark.label)}</text>'
            )
        parts.append("</g>")
    for entry, points in lines:
        if not points:
            continue
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line {entry.style}" points="{path}"/>')
        if entry.dots:
            parts.extend(
                f'<circle class="dot {entry.style}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="4">'
                f"<title>{escape(entry.name)}: {y:.4f} at {x:g}</title></circle>"
                for x, y in points
            )
    parts.append("</svg>")
    legend = "".join(
        f'<span class="key"><i class="swatch {entry.style}"></i>{escape(entry.name)}</span>'
        for entry, points in lines
        if points
    )
    return f'<div class="legend">{legend}</div>' + "".join(parts)


def bar_of_parts(parts: Sequence[tuple[str, float, str, str]], *, title: str, width: int = 1040) -> str:
    """One horizontal bar of (name, value, CSS class, text); parts too small to see are left to the legend."""
    total = sum(value for _, value, _, _ in parts)
    if total <= 0:
        return f'<p class="empty">{escape(title)}: nothing was recorded.</p>'
    height, x = 40, 0.0
    drawn = [
        f'<svg class="chart bar" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    ]
    for name, value, style, text in parts:
        span = value / total * width
        if span <= 0:
            continue
        drawn.append(
            f"<g><title>{escape(name)}: {escape(text)}</title>"
            f'<rect class="part {style}" x="{x:.2f}" y="0" width="{max(span - 1.5, 0.5):.2f}" height="{height}" rx="3"/>'
        )
        label = f"{name} {value / total:.0%}"
        if span > 8.2 * len(label):
            drawn.append(f'<text class="inside on-{style}" x="{x + 10:.1f}" y="25">{escape(label)}</text>')
        drawn.append("</g>")
        x += span
    drawn.append("</svg>")
    return "".join(drawn)


def stacked_columns(
    columns: Sequence[tuple[str, Sequence[float]]],
    *,
    names: Sequence[str],
    styles: Sequence[str],
    title: str,
    y_label: str,
    width: int = 1040,
    height: int = 200,
) -> str:
    """One column a label, stacked of ``names``; at most the newest 120 columns are drawn."""
    columns = columns[-120:]
    top_value = max((sum(values) for _, values in columns), default=0.0)
    if top_value <= 0:
        return f'<p class="empty">{escape(title)}: nothing was recorded.</p>'
    left, right, top, bottom = 58, 16, 22, 30
    slot = (width - left - right) / len(columns)
    breadth = min(46.0, slot * 0.7)
    scale = (height - top - bottom) / (top_value * 1.06)
    drawn = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for y in ticks(0, top_value * 1.06, count=4):
        place = height - bottom - y * scale
        drawn.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{place:.1f}" y2="{place:.1f}"/>'
        )
        drawn.append(f'<text class="tick end" x="{left - 8}" y="{place + 4:.1f}">{_number(y)}</text>')
    drawn.append(f'<text class="axis" x="{left - 50}" y="12">{escape(y_label)}</text>')
    every = max(1, math.ceil(len(columns) * 44 / (width - left - right)))
    for index, (label, values) in enumerate(columns):
        x = left + slot * index + (slot - breadth) / 2
        place = float(height - bottom)
        words = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values, strict=True))
        drawn.append(f"<g><title>{escape(label)}: {escape(words)}</title>")
        for value, style in zip(values, styles, strict=True):
            tall = value * scale
            place -= tall
            if tall > 0.05:
                drawn.append(
                    f'<rect class="part {style}" x="{x:.1f}" y="{place:.2f}" width="{breadth:.1f}" height="{tall:.2f}"/>'
                )
        if index % every == 0:
            drawn.append(
                f'<text class="tick mid" x="{x + breadth / 2:.1f}" y="{height - bottom + 17}">{escape(label)}</text>'
            )
        drawn.append("</g>")
    drawn.append("</svg>")
    legend = "".join(
        f'<span class="key"><i class="swatch {style}"></i>{escape(name)}</span>'
        for name, style in zip(names, styles, strict=True)
    )
    return f'<div class="legend">{legend}</div>' + "".join(drawn)
