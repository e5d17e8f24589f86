"""The tables of metrics and events in the docs: ``python -m`` this module prints them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import click

from .events import ALL
from .instruments import INSTRUMENTS

__all__ = ["events_table", "main", "metrics_table"]


def metrics_table() -> str:
    """Return a Markdown table of all metrics."""
    rows = [
        (
            f"`{one.prometheus_name}`",
            one.kind.value,
            ", ".join(f"`{label}`" for label in one.labels),
            one.text,
        )
        for one in INSTRUMENTS
    ]
    return _table(("metric", "kind", "labels", "what"), rows)


def events_table() -> str:
    """Return a Markdown table of all events."""
    rows = [
        (f"`{kind.__name__}`", (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " "))
        for kind in ALL
    ]
    return _table(("kind of event", "what"), rows)


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return text.replace("| --- |", "|---|").replace(" --- |", "---|") + "\n"


@click.command(help=__doc__)
def main() -> None:
    """Print them."""
    click.echo(metrics_table())
    click.echo(events_table(), nl=False)


if __name__ == "__main__":
    main()
