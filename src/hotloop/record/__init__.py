"""The run record: one versioned JSON document of a run, written as the run goes and readable after a kill.

Lines are appended to ``record.jsonl`` the moment something happens; ``record.json`` is the same as one document,
written at the end. `load` prefers the lines, which a killed run has alone.
"""

from hotloop.files import whole
from hotloop.record.format import DOCUMENT, LINES, LISTS, MAPPINGS, SCHEMA, empty
from hotloop.record.process import SUBMITTED, on_cluster, this_process, was_killed
from hotloop.record.reading import Follower, load, load_ranks
from hotloop.record.schema import Schema, to_json
from hotloop.record.writing import ERROR_LENGTH, RunRecord

__all__ = [
    "DOCUMENT",
    "ERROR_LENGTH",
    "LINES",
    "LISTS",
    "MAPPINGS",
    "SCHEMA",
    "SUBMITTED",
    "Follower",
    "RunRecord",
    "Schema",
    "empty",
    "load",
    "load_ranks",
    "on_cluster",
    "this_process",
    "to_json",
    "was_killed",
    "whole",
]
