"""Curves over optimizer steps, as SVG for a page and as one PNG."""

from __future__ import annotations

import colorsys
import dataclasses
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_POINTS = 300
"""Points of a curve; neighbours are averaged where there are more."""
_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 26
_PNG_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points in the order of the steps, perhaps with a band around them."""

    name: str
    points: list[tuple[float, float]]
    hue: float = 220.0
    band: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    """`(x, low, high)`."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps that share a scale."""

    title: str
    lines: list[Line]
    from_zero: bool = True

    @property
    def x_range(self) -> tuple[float, float]:
        return _range([x for line in self.lines for x, _ in line.points])

    @property
    def y_range(self) -> tuple[float, float]:
        values = [y for line in self.lines for _, y in line.points]
        values += [y for line in self.lines for _, low, high in line.band for y in (low, high)]
        low, high = _range(values)
        edge = (high - low) * 0.05
        return (min(0.0, low) if self.from_zero else low - edge), high + edge


def figure(chart: Chart) -> str:
    legend = "".join(
        f'<span><i style="background:hsl({line.hue:.0f} 70% var(--light))"></i>{text(line.name)}: '
        f"{short(line.points[-1][1])}</span>"
        for line in chart.lines
    )
    return f'<figure><h3>{text(chart.title)}</h3><div class="legend">{legend}</div>{svg(chart)}</figure>\n'


def svg(chart: Chart) -> str:
    """The chart as an SVG element that takes its colours from the page."""
    (x_low, x_high), (y_low, y_high) = chart.x_range, chart.y_range

    def at(x: float, y: float) -> str:
        px = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        py = _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{px:.1f},{py:.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(chart.title)}">']
    for y in _ticks(y_low, y_high):
        px, py = at(x_low, y).split(",")
        parts.append(f'<line class="grid" x1="{px}" x2="{_WIDTH - _RIGHT}" y1="{py}" y2="{py}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{py}" dy="4" text-anchor="end">{short(y)}</text>')
    for x in _ticks(x_low, x_high):
        px = at(x, y_low).split(",")[0]
        anchor = "end" if float(px) > _WIDTH - 30 else "middle"
        parts.append(f'<text x="{px}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{short(x)}</text>')
    for line in chart.lines:
        colour = f"hsl({line.hue:.0f} 70% var(--light))"
        if line.band:
            edge = [at(x, low) for x, low, _ in line.band] + [at(x, high) for x, _, high in reversed(line.band)]
            parts.append(f'<polygon class="band" style="fill:{colour}" points="{" ".join(edge)}"/>')
        points = [at(x, y) for x, y in line.points]
        if len(points) == 1:
            cx, cy = points[0].split(",")
            parts.append(f'<circle style="fill:{colour}" cx="{cx}" cy="{cy}" r="3"/>')
        else:
            kind = "line dashed" if line.dashed else "line"
            parts.append(f'<polyline class="{kind}" style="stroke:{colour}" points="{" ".join(points)}"/>')
    return "".join([*parts, "</svg>"])


def draw(charts: Sequence[Chart], path: Path) -> None:
    """The charts as one PNG, by matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(charts) / _PNG_COLUMNS)
    figure = Figure(figsize=(5 * _PNG_COLUMNS, 3.2 * rows))
    FigureCanvasAgg(figure)
    for i, chart in enumerate(charts):
        axes = figure.add_subplot(rows, _PNG_COLUMNS, i + 1)
        for line in chart.lines:
            colour = colorsys.hls_to_rgb(line.hue % 360 / 360, 0.42, 0.7)
            style = "--" if line.dashed else "-"
            marker = "o" if len(line.points) == 1 else None
            axes.plot(
                *zip(*line.points, strict=True), style, color=colour, label=line.name, linewidth=1.4, marker=marker
            )
            if line.band:
                x, low, high = zip(*line.band, strict=True)
                axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set_xlim(*chart.x_range)
        axes.set_ylim(*chart.y_range)
        axes.set_title(chart.title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        if len(chart.lines) > 1:
            axes.legend(fontsize=7)
    figure.subplots_adjust(0.04, 0.3 / (3.2 * rows), 0.99, 1 - 0.3 / (3.2 * rows), wspace=0.16, hspace=0.25)
    figure.savefig(path, dpi=110, format="png")


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS`, each the mean of its neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def short(value: float) -> str:
    """1234567 as 1.23M; small numbers with three digits."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def text(value: object) -> str:
    """Text and nothing else; what cannot be seen, or turns the writing round, becomes a space."""
    return html.escape("".join(c if c.isprintable() or c == "\n" else " " for c in str(value)))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From lowest to highest, never empty."""
    low, high = min(values), max(values)
    if low < high:
        return low, high
    return low - abs(low) / 2, high + (abs(high) / 2 or 1.0)


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers between the two."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(size * power for size in (5, 2, 1) if (high - low) / (size * power) >= 4)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
