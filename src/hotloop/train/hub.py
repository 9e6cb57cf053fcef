"""Models from a folder or the Hugging Face hub: whether it answers, and what is said where one cannot be loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError, describe
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 5.0
"""The hub is asked once and briefly: transformers tries each file for many seconds."""


def unreachable(name: str, say: Callable[[str], None], file: str = "config.json") -> str | None:
    """Ask the hub about a model, having said so; give the reason where it does not answer, None where it does.

    Any answer counts, also that there is no such model: loading it then says so in the hub's own words.
    """
    hub = require("huggingface_hub", "A model by hub name", "demo")
    say(f"Looking for {name} at the Hugging Face hub")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file), timeout=SECONDS)
    except hub.errors.HfHubHTTPError:
        return None
    except Exception as error:  # noqa: BLE001 - each HTTP library and offline mode have classes of their own for this
        reason = describe(error)
        say(f"The hub does not answer ({reason}); looking for {name} in its cache on this machine")
        return reason
    return None


@contextlib.contextmanager
def loading(setting: str, name: str, silent: str | None, *, expected: str, instead: str) -> Iterator[None]:
    """Load a model quietly, and say of any failure which setting it comes from: libraries raise many classes for it.

    Args:
        setting: that names the model.
        name: its value.
        silent: why the hub does not answer, where it was asked and did not.
        expected: what a folder needs.
        instead: what needs no hub.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    try:
        with quiet():
            yield
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        away = f"the Hugging Face hub does not answer ({silent}); use a local folder or {instead}"
        hint = expected if Path(name).exists() else away if silent else "it is no folder here, nor at the hub"
        raise ConfigError(f"{setting}={name!r} cannot be loaded: {hint}. {describe(error)}") from error


@contextlib.contextmanager
def quiet(*more: str) -> Iterator[None]:
    """Keep the bars and reports of transformers, and of more packages, off the terminal while the block runs."""
    kinds = [require(f"{name}.utils.logging", "A transformers model", "demo") for name in ("transformers", *more)]
    before = [(one, one.get_verbosity(), one.is_progress_bar_enabled()) for one in kinds]
    for one in kinds:
        one.set_verbosity_error()
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one, verbosity, bars in before:
            one.set_verbosity(verbosity)
            if bars:
                one.enable_progress_bar()
