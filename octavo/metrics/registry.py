"""Counters, gauges and histograms, and their text in Prometheus' exposition format.

Label values are closed sets that are given when a metric is made, so nothing that comes from outside can add a
series. Not thread-safe: one event loop owns a registry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence


class Counter:
    """Only grows. One number for each value of its label, or one without a label."""

    def __init__(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> None:
        self.name = name
        self.text = text
        self.label = label
        self.numbers = dict.fromkeys(values if label else ("",), 0.0)

    def add(self, amount: float = 1.0, value: str = "") -> None:
        """Count; a label value that is not in the set counts as "other", where there is one."""
        self.numbers[value if value in self.numbers else "other"] += amount


class Gauge:
    """A number read when it is asked for."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.name = name
        self.text = text
        self.read = read


class Histogram:
    """Observations counted by upper bound."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket that holds this share of the observations; 0 without any."""
        left = share * sum(self.counts)
        for bound, count in zip((*self.bounds, self.bounds[-1]), self.counts, strict=True):
            left -= count
            if left <= 0 and count:
                return bound
        return 0.0


Metric = Counter | Gauge | Histogram


def escape(value: str) -> str:
    """A label value as the format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def render(metrics: Iterable[Metric], prefix: str, labels: str) -> str:
    """The metrics' text, each name after `prefix`. `labels`: what every series carries, such as `model_name="m"`."""
    lines: list[str] = []
    for metric in metrics:
        name = prefix + metric.name
        kind = type(metric).__name__.lower()
        lines.append(f"# HELP {name} {metric.text}")
        lines.append(f"# TYPE {name} {kind}")
        if isinstance(metric, Counter):
            for value, number in metric.numbers.items():
                own = f'{labels},{metric.label}="{escape(value)}"' if metric.label else labels
                lines.append(f"{name}{{{own}}} {_number(number)}")
        elif isinstance(metric, Gauge):
            lines.append(f"{name}{{{labels}}} {_number(metric.read())}")
        else:
            lines += _histogram(metric, name, labels)
    return "\n".join(lines) + "\n"


def _histogram(metric: Histogram, name: str, labels: str) -> list[str]:
    lines, total = [], 0
    for bound, count in zip((*metric.bounds, float("inf")), metric.counts, strict=True):
        total += count
        edge = "+Inf" if bound == float("inf") else f"{bound:g}"
        lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {total}')
    return [*lines, f"{name}_sum{{{labels}}} {_number(metric.sum)}", f"{name}_count{{{labels}}} {total}"]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
