"""Compiled code for stores, as torch might have written it."""

from hotloop.cache.keys import fits

CONTENT = {"fxgraph/ab/entry": b"graph" * 50, "cx/code.py": b"print()", "cx/library.so": b"\x7fELF" + bytes(400)}
MODELS = {"f" * 32: "Net"}


def put(store, content=CONTENT, here=None, models=MODELS):
    """Write files as torch does; return the entry."""
    entry = store.make(here or fits(), models)
    for name, data in content.items():
        path = entry.torch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return entry


def held(store):
    """Return the content of all files of a store."""
    return {name: path.read_bytes() for entry in store.entries() for name, path in entry.files.items()}
