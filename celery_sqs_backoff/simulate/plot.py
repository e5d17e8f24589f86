"""Calls a second over time, one panel per strategy: as SVG by itself, as PNG through matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from ..units import spell_duration
from .results import Result

__all__ = ["plot"]

_COLOURS = {"sent": "#2a7f4f", "wasted": "#c0392b", "turned away": "#e69f00"}
_LABELS = {
    "sent": "successful calls",
    "wasted": "wasted: the provider was down",
    "turned away": "turned away: too many a second",
}
_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 860, 190, 64, 24, 64, 62


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a picture.

    Args:
        results: one panel each, with the same scales.
        title: above them.
        path: its suffix says the format, ``.svg`` or ``.png``.

    Raises:
        ValueError: another suffix, or PNG without matplotlib.
    """
    if path.suffix == ".svg":
        path.write_text(svg(results, title))
    elif path.suffix == ".png":
        _png(results, title, path)
    else:
        raise ValueError(f"invalid picture {path.name!r}: expected a name ending in .svg or .png")


def svg(results: Sequence[Result], title: str) -> str:
    """Return the picture as SVG."""
    end, most = _extent(results)
    height = _TOP + len(results) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        f' viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 24, title, size=16),
    ]
    x = float(_LEFT)
    for name, label in _LABELS.items():
        parts.append(f'<rect x="{x:g}" y="38" width="14" height="4" fill="{_COLOURS[name]}"/>')
        parts.append(_text(x + 20, 44, label))
        x += 40 + 7 * len(label)
    for number, result in enumerate(results):
        parts.append(_panel(result, _TOP + number * (_PANEL + _GAP), end, most))
    return "\n".join([*parts, "</svg>\n"])


def _panel(result: Result, top: float, end: float, most: float) -> str:
    bottom, width = top + _PANEL, _WIDTH - _LEFT - _RIGHT
    parts = [_text(_LEFT, top + 14, _caption(result), size=13)]
    floor, plot_height = bottom, _PANEL - 26
    for share in (0.0, 0.5, 1.0):
        y = floor - share * plot_height
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}" stroke="#ddd"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, f"{share * most:.3g}/s", anchor="end"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = spell_duration(share * end)
        parts.append(_text(_LEFT + share * width, floor + 16, label, anchor="middle"))
    for name, colour in _COLOURS.items():
        points = " ".join(
            f"{_LEFT + at / end * width:.1f},{floor - rate / most * plot_height:.1f}"
            for at, rate in result.curves.get(name, ())
        )
        if points:
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="1.3" points="{points}"/>'
            )
    return "\n".join(parts)


def _caption(result: Result) -> str:
    drain = "not drained" if result.drain is None else f"drained in {spell_duration(result.drain)}"
    dead = sum(result.dead.values())
    return (
        f"{result.strategy}: {result.wasted:,} wasted, {result.turned_away:,} turned away,"
        f" {drain}" + (f", {dead:,} dead letters" if dead else "")
    )


def _extent(results: Sequence[Result]) -> tuple[float, float]:
    points = [p for result in results for curve in result.curves.values() for p in curve]
    return max((at for at, _ in points), default=1.0) or 1.0, max(
        (rate for _, rate in points), default=1.0
    ) or 1.0


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        f' fill="#222">{escape(text)}</text>'
    )


def _png(results: Sequence[Result], title: str, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ValueError("PNG needs matplotlib: install it, or write .svg") from exc
    end, most = _extent(results)
    figure = Figure(figsize=(9, 0.8 + 2.4 * len(results)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(results), 1, squeeze=False, sharex=True)
    for axes, result in zip(panels[:, 0], results, strict=True):
        axes.set_title(_caption(result), loc="left", fontsize=9)
        axes.set_xlim(0, end / 60)
        axes.set_ylim(0, most * 1.05)
        axes.set_ylabel("calls a second")
        for name, colour in _COLOURS.items():
            curve = result.curves.get(name, [])
            axes.plot(
                [at / 60 for at, _ in curve],
                [rate for _, rate in curve],
                color=colour,
                linewidth=1,
                label=_LABELS[name],
            )
    panels[-1, 0].set_xlabel("minutes")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=120)
