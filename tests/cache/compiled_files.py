"""A batch of files for stores of compiled code."""

import time

from hotloop.cache.compiled import File, Manifest, sha256_of
from hotloop.cache.keys import fits

CONTENT = {"fxgraph/ab/entry": b"graph" * 50, "cx/code.py": b"print()", "cx/library.so": b"\x7fELF" + bytes(400)}
MODELS = {"f" * 32: "Net"}


def put(store, content=CONTENT, here=None, models=MODELS):
    listed = {File(path, sha256_of(data), len(data)): data for path, data in content.items()}
    return store.put(Manifest(here or fits(), models, time.time(), tuple(listed)), listed.__getitem__)


def taken(store, place):
    found = store.load_into(place, fits())
    return {path: (place / path).read_bytes() for path in found}
