"""``hotloop cache``: what is kept of compiles, what of it is stale, and bundles of it for other machines."""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - Typer reads the annotations of a command when it runs
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hotloop.cli.printing import console
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from hotloop.cache.bundle import Bundle
    from hotloop.cache.compiled import CompiledStore, Entry

app = typer.Typer(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str | None, typer.Option(help="Only for this model: its fingerprint as `hotloop cache` shows it.")]


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: Json = False) -> None:
    """Show the size of what is kept, how often it was used, and what is stale."""
    if context.invoked_subcommand is not None:
        return
    from hotloop.cache.keys import fits  # noqa: PLC0415 - torch is loaded for this command alone

    store, here = _store(), fits()
    rows = [_row(entry, entry.stale(here)) for entry in store.entries()]
    if as_json:
        total = sum(row["bytes"] for row in rows)
        typer.echo(json.dumps({"folder": str(store.folder), "bytes": total, "fits": here, "entries": rows}, indent=2))
        return
    _print(store, rows)


@app.command("clear")
def clear(
    stale: Annotated[bool, typer.Option("--stale", help="Only what hardly serves again.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what is kept of compiles: all of it, or what is stale (other versions or hardware, unused for long)."""
    from hotloop.cache.keys import fits  # noqa: PLC0415 - as above

    here = fits()
    gone = _store().clear(lambda entry: not stale or bool(entry.stale(here)))
    freed = sum(entry.size for entry in gone)
    if as_json:
        typer.echo(json.dumps({"removed": [entry.name for entry in gone], "bytes": freed}))
    else:
        typer.echo(f"{len(gone)} removed, {_mib(freed)}")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The bundle to write.")], model: Model = None, as_json: Json = False
) -> None:
    """Write a bundle of what is kept and fits this machine, and print its checksum."""
    from hotloop.cache import bundle  # noqa: PLC0415 - as above

    _tell(bundle.export_bundle(_store(), file, model), as_json=as_json)


@app.command("import")
def take_in(
    file: Annotated[Path, typer.Argument(help="The bundle to take in.")],
    checksum: Annotated[str | None, typer.Option(help="What the export printed: refuses any other bundle.")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Take a bundle in. It is code that will run as you: import only what you made yourself, best with --checksum.

    Refused, with the part that does not fit: other versions or hardware, another model, a checksum that is not the
    manifest's.
    """
    from hotloop.cache import bundle  # noqa: PLC0415 - as above

    try:
        taken = bundle.import_bundle(_store(), file, checksum=checksum, model=model)
    except OSError as error:
        raise ConfigError(f"the bundle cannot be kept: {error}") from error
    _tell(taken, as_json=as_json)


def _store() -> CompiledStore:
    from hotloop.cache.process_folder import compiled_store  # noqa: PLC0415 - as above

    store = compiled_store()
    if store is None:
        raise ConfigError("HOTLOOP_CACHE_DIR is empty, so nothing is kept: unset it, or name a folder")
    return store


def _row(entry: Entry, stale: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "models": dict(entry.manifest.models),
        "files": len(entry.manifest.files),
        "bytes": entry.size,
        "hits": entry.uses,
        "used": entry.used,
        "made": entry.manifest.made,
        "fits": dict(entry.manifest.fits),
        "stale": stale,
    }


def _print(store: CompiledStore, rows: list[dict[str, Any]]) -> None:
    out = console()
    total, stale = (sum(row["bytes"] for row in some) for some in (rows, [row for row in rows if row["stale"]]))
    out.print(
        f"{store.folder}: {_mib(total)} of compiled code, {_mib(stale)} of it stale", soft_wrap=True, markup=False
    )
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("entry", "models", "files", "size", "hits", "last used", "stale"):
        table.add_column(column, justify="right" if column in ("files", "size", "hits") else "left")
    for row in rows:
        models = ", ".join(f"{kind} {name[:12]}" for name, kind in row["models"].items())
        used = time.strftime("%Y-%m-%d", time.localtime(row["used"]))
        cells = (
            row["name"][:12],
            models,
            f"{row['files']:,}",
            _mib(row["bytes"]),
            f"{row['hits']:,}",
            used,
            row["stale"],
        )
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    out.print(table)


def _tell(bundle: Bundle, *, as_json: bool) -> None:
    manifest = bundle.manifest
    if as_json:
        facts = {"fits": dict(manifest.fits), "models": dict(manifest.models), "files": len(manifest.files)}
        typer.echo(json.dumps({"checksum": bundle.checksum, "bytes": bundle.size, **facts}, indent=2))
        return
    typer.echo(f"{len(manifest.files):,} files, {_mib(bundle.size)}, for {', '.join(manifest.fits.values())}")
    for name, kind in manifest.models.items():
        typer.echo(f"model {kind} {name}")
    typer.echo(f"checksum {bundle.checksum}")


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
