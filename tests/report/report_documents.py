"""Run records to draw, shared by the tests of both renderers."""

from hotloop import record

FILE = "/home/ana/projects/criteria/src/encoder.py"
HOSTILE = "<script>alert(1)</script>\"'&</style>\u2028\u202egnp\x1b[31m 模型 🚀 \ud800"


def fresh(**fields):
    document = record.empty()
    document.update(
        {"status": "finished", "created": 1.78e9, "updated": 1.78e9 + 90, "finished": 1.78e9 + 90, **fields}
    )
    return document
