"""Charts as inline SVG: lines with a shaded interval and points, one style for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

__all__ = ["Line", "chart", "scatter"]

_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 340, 72, 20, 16, 52


@dataclass(frozen=True)
class Line:
    """``points`` are (x, y); ``band`` the (x, low, high) of its interval; ``style`` a class of the page."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    band: Sequence[tuple[float, float, float]] = ()
    marks_only: bool = False


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    span = max(high - low, 1e-9)
    step = 10 ** floor(log10(span / count))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= count)
    first = ceil(low / step - 1e-9)
    return [step * i for i in range(first, floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def chart(
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    log_x: bool = False,
    x_names: dict[float, str] | None = None,
    zero: bool = True,
) -> str:
    """One SVG. ``x_names`` labels given x values; with ``log_x`` the axis is logarithmic."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [
        v for line in lines for _, a, b in line.band for v in (a, b)
    ]
    low_y, high_y = (0.0 if zero else min(ys)), max(ys) * 1.06
    scale_x: Callable[[float], float] = log10 if log_x else float
    low_x, high_x = scale_x(min(xs)), scale_x(max(xs))
    pad = (high_x - low_x or 1) * 0.05
    low_x, high_x = low_x - pad, high_x + pad

    def px(x: float) -> float:
        return _LEFT + (scale_x(x) - low_x) / (high_x - low_x) * (_W - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return _H - _BOTTOM - (y - low_y) / (high_y - low_y or 1) * (_H - _TOP - _BOTTOM)

    out = [
        f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(y_title)} against {escape(x_title)}">'
    ]
    for tick in _ticks(low_y, high_y):
        y = py(tick)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    named = x_names or {x: _number(x) for x in (sorted(set(xs)) if log_x else _ticks(min(xs), max(xs)))}
    for x, name in named.items():
        out.append(
            f'<text x="{px(x):.1f}" y="{_H - _BOTTOM + 18}" text-anchor="middle">{escape(name)}</text>'
        )
    out.append(
        f'<line class="axis" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{py(low_y):.1f}" y2="{py(low_y):.1f}"/>'
    )
    for line in lines:
        if line.band:
            upper = " ".join(f"{px(x):.1f},{py(high):.1f}" for x, _, high in line.band)
            lower = " ".join(f"{px(x):.1f},{py(low):.1f}" for x, low, _ in reversed(line.band))
            out.append(f'<polygon class="band {line.style}" points="{upper} {lower}"/>')
    for line in lines:
        if not line.marks_only:
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line.points)
            out.append(f'<polyline class="line {line.style}" points="{path}"/>')
        for x, y in line.points:
            out.append(f'<circle class="mark {line.style}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="4"><title>{escape(line.name)}: {_number(x)} → {y:.1f}</title></circle>')  # fmt: skip
    middle = (_LEFT + _W - _RIGHT) / 2
    out.append(
        f'<text class="title" x="{middle}" y="{_H - 10}" text-anchor="middle">{escape(x_title)}</text>'
    )
    out.append(f'<text class="title" transform="translate(14 {(_TOP + _H - _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>')  # fmt: skip
    out.append("</svg>")
    legend = "".join(f'<span><i class="{line.style}"></i>{escape(line.name)}</span>' for line in lines)
    return f"<figure>{''.join(out)}<figcaption>{legend}</figcaption></figure>"


def scatter(
    points: Sequence[tuple[float, float, str]], names: dict[str, str], *, x_title: str, y_title: str
) -> str:
    """(x, y, style) marks; ``names`` says what a style stands for."""
    lines = [
        Line(name, [(x, y) for x, y, s in points if s == style], style, marks_only=True)
        for style, name in names.items()
    ]
    return chart([line for line in lines if line.points], x_title=x_title, y_title=y_title, zero=False)
