"""Whether the Hugging Face hub answers, asked once and briefly: transformers tries each file for many seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 5.0


def unreachable(name: str, say: Callable[[str], None], file: str = "config.json") -> str | None:
    """Ask the hub about a model, having said so; give the reason where it does not answer, None where it does.

    Any answer counts, also that there is no such model: loading it then says so in the hub's own words.
    """
    hub = require("huggingface_hub", "A model by hub name")
    say(f"Looking for {name} at the Hugging Face hub")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file), timeout=SECONDS)
    except hub.errors.HfHubHTTPError:
        return None
    except Exception as error:  # noqa: BLE001 - each HTTP library and offline mode have classes of their own for this
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        say(f"The hub does not answer ({reason}); looking for {name} in its cache on this machine")
        return reason
    return None
