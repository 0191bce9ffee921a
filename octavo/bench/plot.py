"""Curves as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAMESPACE = "http:" + "//www.w3.org/2000/svg"  # a name, not a link
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 360, 50, 40
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad")


def cumulative_svg(curves: Mapping[str, Sequence[float]], unit: str) -> str:
    """The share of values that are at most x, one curve each; x is cut off at the 99.5th percentile."""
    most = max((sorted(values)[int(0.995 * (len(values) - 1))] for values in curves.values() if values), default=1.0)
    most = most or 1.0
    parts = [
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for share in (0.0, 0.5, 0.9, 1.0):
        y = _y(share)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - 10}" stroke="#ddd"/><text x="8" y="{y + 4:.1f}">{share:.0%}</text>'
        )
    for i in range(5):
        x = LEFT + (WIDTH - LEFT - 10) * i / 4
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{most * i / 4:.4g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{unit}</text>')
    for (name, values), colour, row in zip(curves.items(), COLOURS, range(9), strict=False):
        points = " ".join(_points(values, most))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 200}" y="{HEIGHT - 80 - 16 * row}" fill="{colour}">{name}</text>')
    return "".join(parts) + "</svg>\n"


def _y(share: float) -> float:
    return 10 + (HEIGHT - BOTTOM - 10) * (1 - share)


def _points(values: Sequence[float], most: float) -> list[str]:
    ordered = sorted(values)
    step = max(len(ordered) // 400, 1)
    points = []
    for i in range(0, len(ordered), step):
        x = LEFT + (WIDTH - LEFT - 10) * min(ordered[i] / most, 1.0)
        points.append(f"{x:.1f},{_y((i + 1) / len(ordered)):.1f}")
    return points
