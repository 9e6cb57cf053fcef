"""``hotloop presets``: the table of presets, for people and as JSON. It never imports torch."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotloop import measured, presets
from hotloop._torch.inductor_options import list_options
from hotloop.cli.common import AsJson, echo_json


def show(
    as_json: AsJson = False,
    options: Annotated[
        bool, typer.Option("--options", help="List torch's modes and the installed torch's Inductor options instead.")
    ] = False,
) -> None:
    """List the presets: what each sets, costs and is for, what we measured, and what to try when one fails."""
    if options:
        _show_options(as_json=as_json)
        return
    if as_json:
        rows = [
            {**preset.to_dict(), "measured": [row.to_dict() for row in measured.rows(name)]}
            for name, preset in presets.PRESETS.items()
        ]
        echo_json({
            "presets": rows,
            "measured_on": measured.MACHINE,
            "contradictions": list(measured.CONTRADICTIONS),
            "troubleshooting": list(presets.TROUBLESHOOTING),
        })  # fmt: skip
        return
    console = Console()
    table = Table(title="Presets (names in any case)", title_justify="left", show_lines=True, expand=True)
    table.add_column("preset", ratio=1)
    for column in ("performance", "overhead", "memory"):
        table.add_column(column, width=11)
    for preset in presets.PRESETS.values():
        use = f"[bold]{preset.name}[/bold]\n{escape(preset.sets)}\n[dim]for {escape(preset.best_for)}[/dim]"
        table.add_row(use, preset.performance, preset.overhead, preset.memory)
    console.print(table)
    console.print(_measured_table())
    for line in measured.CONTRADICTIONS:
        console.print(f"- {escape(line)}")
    console.print("\n[bold]When a preset fails or does not pay[/bold]")
    for number, line in enumerate(presets.TROUBLESHOOTING, start=1):
        console.print(f"{number}. {escape(line)}")
    console.print(
        "\nAll with partial graphs unless fullgraph=True. Dynamic shapes are torch's automatic kind: static until a "
        "second size comes; dynamic=True forces them, and runs slower."
    )


def _measured_table() -> Table:
    table = Table(title=f"\nMeasured: {measured.MACHINE}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("preset", "workload", "ms/eager", "gain", "cold s", "GiB compiling/after/eager"):
        table.add_column(column)
    for name in presets.NAMES:
        for row in measured.rows(name):
            workload = f"{row.workload} blocks" if row.regions == "blocks" else row.workload
            gib = "/".join(f"{megabytes / 1024:.1f}" for megabytes in (row.compiling_mb, row.after_mb, row.eager_mb))
            times = f"{row.ms:.1f}/{row.eager_ms:.1f}"
            table.add_row(name, workload, times, f"{row.speedup:.2f}x", f"{row.cold_s:.0f}", gib)
    return table


def _show_options(*, as_json: bool) -> None:
    """Print torch's compile modes and the Inductor options of the installed torch."""
    found = list_options()
    if as_json:
        options = [{"name": option.name, "type": option.type, "default": option.default} for option in found]
        echo_json({"modes": dict(presets.MODES), "options": options})
        return
    console = Console(highlight=False)
    for name, text in presets.MODES.items():
        console.print(f"mode {name}: {text}")
    if not found:
        console.print("No Inductor options: torch is not installed, or has no Inductor.")
    for option in found:
        kind = f": {option.type}" if option.type else ""
        console.print(f"{option.name}{kind} = {option.default}", markup=False, soft_wrap=True)
