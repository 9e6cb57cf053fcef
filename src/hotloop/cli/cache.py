"""``hotloop cache``: shows what is kept of compiles and what is stale, and moves it to other machines in bundles."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003 - Typer reads the annotations of a command when it runs
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hotloop.cli.common import AsJson, console, echo_json
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from hotloop.cache.bundle import Bundle
    from hotloop.cache.compiled import CompiledStore, Entry
    from hotloop.cache.share import Moved

app = typer.Typer(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
Model = Annotated[str | None, typer.Option(help="Only for this model: its fingerprint as `hotloop cache` shows it.")]
Place = Annotated[str, typer.Argument(metavar="URL", help="A folder, or a URL that fsspec knows: s3://bucket/cache.")]


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the size of what is kept, how often it was used, and what is stale."""
    if context.invoked_subcommand is not None:
        return
    from hotloop.cache.keys import fits  # noqa: PLC0415 - loads torch

    store, here = _store(), fits()
    rows = [_row(entry, entry.stale(here)) for entry in store.entries()]
    total = sum(row["bytes"] for row in rows)
    if as_json:
        echo_json({"folder": str(store.folder), "bytes": total, "fits": here, "entries": rows})
        return
    stale = sum(row["bytes"] for row in rows if row["stale"])
    summary = f"{store.folder}: {_mib(total)} of compiled code, {_mib(stale)} of it stale"
    console().print(summary, soft_wrap=True, markup=False)
    if rows:
        console().print(_table(rows))


@app.command("clear")
def clear(
    stale: Annotated[bool, typer.Option("--stale", help="Only entries that will hardly be used again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what is kept of compiles: all of it, or stale entries (other versions or hardware, unused for long)."""
    from hotloop.cache.keys import fits  # noqa: PLC0415 - loads torch

    here = fits()
    removed = _store().clear(lambda entry: not stale or bool(entry.stale(here)))
    freed = sum(size for _, size in removed)
    if as_json:
        echo_json({"removed": [name for name, _ in removed], "bytes": freed})
    else:
        typer.echo(f"{len(removed)} removed, {_mib(freed)}")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The bundle to write.")], model: Model = None, as_json: AsJson = False
) -> None:
    """Write a bundle of the kept code that fits this machine, and print its checksum."""
    from hotloop.cache import bundle  # noqa: PLC0415 - loads torch

    _show_bundle(bundle.export_bundle(_store(), file, model), as_json=as_json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="The bundle to import.")],
    checksum: Annotated[
        str | None, typer.Option(help="The checksum that the export printed: any other bundle is refused.")
    ] = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Import a bundle. Its code will run as you: import only bundles that you made yourself, best with --checksum.

    It refuses a bundle for other versions, hardware or another model, or with a wrong checksum, and names the part
    that does not fit.
    """
    from hotloop.cache import bundle  # noqa: PLC0415 - loads torch

    try:
        taken = bundle.import_bundle(_store(), file, checksum=checksum, model=model)
    except OSError as error:
        raise ConfigError(f"the bundle cannot be kept: {error}") from error
    _show_bundle(taken, as_json=as_json)


@app.command("push")
def push(url: Place, as_json: AsJson = False) -> None:
    """Send what is kept and fits this machine to a shared cache."""
    from hotloop.cache.share import Share  # noqa: PLC0415 - loads torch

    _show_moved("given", Share(url).push(_store()), as_json=as_json)


@app.command("pull")
def pull(url: Place, as_json: AsJson = False) -> None:
    """Take what fits this machine from a shared cache. Its code will run as you."""
    from hotloop.cache.share import Share  # noqa: PLC0415 - loads torch

    try:
        moved = Share(url).pull(_store())
    except OSError as error:
        raise ConfigError(f"what the shared cache has cannot be kept: {error}") from error
    _show_moved("taken", moved, as_json=as_json)


def _show_moved(verb: str, moved: Moved, *, as_json: bool) -> None:
    if as_json:
        echo_json({"bundles": moved.bundles, "bytes": moved.size, "misses": list(moved.misses)})
    else:
        typer.echo(f"{verb}: {moved}")


def _store() -> CompiledStore:
    from hotloop.cache.compiled import compiled_store  # noqa: PLC0415 - loads torch

    store = compiled_store()
    if store is None:
        raise ConfigError("HOTLOOP_CACHE_DIR is empty, so nothing is kept: unset it, or name a folder")
    return store


def _row(entry: Entry, stale: str) -> dict[str, Any]:
    facts = {"models": dict(entry.models), "files": len(entry.files), "bytes": entry.size, "fits": dict(entry.fits)}
    return {"name": entry.name, **facts, "hits": entry.uses, "used": entry.used, "stale": stale}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("entry", "models", "files", "size", "hits", "last used", "stale", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        models = ", ".join(f"{kind} {name[:12]}" for name, kind in row["models"].items())
        used = time.strftime("%Y-%m-%d", time.localtime(row["used"]))
        figures = (f"{row['files']:,}", _mib(row["bytes"]), f"{row['hits']:,}")
        table.add_row(*map(Text, (row["name"][:12], models, *figures, used, row["stale"])))
    return table


def _show_bundle(bundle: Bundle, *, as_json: bool) -> None:
    if as_json:
        facts = {"fits": dict(bundle.fits), "models": dict(bundle.models), "files": len(bundle.files)}
        echo_json({"checksum": bundle.checksum, "bytes": bundle.size, **facts})
        return
    typer.echo(f"{len(bundle.files):,} files, {_mib(bundle.size)}, for {', '.join(bundle.fits.values())}")
    for name, kind in bundle.models.items():
        typer.echo(f"model {kind} {name}")
    typer.echo(f"checksum {bundle.checksum}")


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
