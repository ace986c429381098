"""Bar charts as SVG, in plain Python."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

# Colours that stay apart for the colour-blind (Okabe and Ito, 2008).
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")

_BAR, _GAP, _TOP, _WIDTH = 13, 9, 62, 900


def bar_chart(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
    marks: Sequence[float] = (),
    digits: int = 2,
) -> str:
    """Horizontal bars, grouped by label.

    Args:
        title: above the chart.
        labels: one for each group of bars.
        series: values of each series, one for each label; None leaves the bar out.
        unit: what the axis shows.
        marks: values at which to draw a dashed line, for example a target.
        digits: after the decimal point, beside each bar.

    Returns:
        An SVG document of its own.

    Raises:
        ValueError: a series has not as many values as there are labels.
    """
    if any(len(values) != len(labels) for values in series.values()):
        raise ValueError("each series needs one value for each label")
    left = 20 + 7 * max((len(label) for label in labels), default=0)
    largest = max([v for values in series.values() for v in values if v is not None] + list(marks), default=1.0)
    step = _step(largest)
    axis = step * math.ceil(largest / step)
    per_unit = (_WIDTH - left - 60) / axis
    group = _BAR * len(series) + _GAP
    bottom = _TOP + group * len(labels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 44}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{bottom + 44}" fill="#ffffff"/>',
        _text(16, 22, title, size=15),
    ]
    start = 16.0
    for number, name in enumerate(series):
        parts.append(f'<rect x="{start:.0f}" y="34" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(_text(start + 17, 45, name))
        start += 40 + 7 * len(name)
    for number in range(round(axis / step) + 1):
        x = left + number * step * per_unit
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(_text(x, bottom + 16, f"{number * step:g}", anchor="middle"))
    parts.append(_text(left + axis * per_unit / 2, bottom + 34, unit, anchor="middle"))
    for row, label in enumerate(labels):
        y = _TOP + _GAP / 2 + row * group
        parts.append(_text(left - 8, y + _BAR * len(series) / 2 + 4, label, anchor="end"))
        for number, values in enumerate(series.values()):
            value = values[row]
            if value is None:
                continue
            top = y + number * _BAR
            parts.append(
                f'<rect x="{left}" y="{top:.1f}" width="{value * per_unit:.1f}" height="{_BAR - 2}" '
                f'fill="{COLOURS[number % len(COLOURS)]}"/>'
            )
            parts.append(_text(left + value * per_unit + 4, top + _BAR - 3, f"{value:.{digits}f}", size=10))
    for mark in marks:
        x = left + mark * per_unit
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#333333" stroke-dasharray="5 3"/>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="#222222">{escape(text)}</text>'


def _step(largest: float) -> float:
    """A round distance between the axis' lines: 1, 2 or 5 times a power of ten, for at most ten of them."""
    power = 10.0 ** math.floor(math.log10(largest / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= 10)
