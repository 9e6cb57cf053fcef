"""Writes the rows of a committed result file into the package, for the table of ``hotloop presets``.

usage: python benchmarks/publish.py benchmarks/results/DATE-GPU-presets.json
"""

from __future__ import annotations

import json
import pathlib
import sys

FIELDS = (
    *("workload", "preset", "regions", "ms", "eager_ms", "speedup"),
    *("cold_s", "eager_mb", "compiling_mb", "after_mb"),
)


def find(rows, workload, preset, regions=None):
    """Return the row of a workload and preset."""
    matching = (row for row in rows if (row["workload"], row["preset"]) == (workload, preset))
    return next(row for row in matching if regions in (None, row["regions"]))


def contradictions(rows):
    """List the contradictions between the measurement and a common ranking."""
    fast, tuned = find(rows, "xlmr-2", "reduce-overhead"), find(rows, "xlmr-2", "triton")
    inductor, aot = find(rows, "xlmr-2", "inductor"), find(rows, "unet-small", "aot_eager")
    whole, blocks = find(rows, "unet", "default", "whole"), find(rows, "unet", "default", "blocks")
    return [
        (
            "triton is ranked best, for a high overhead: on xlmr-2 it was "
            f"{tuned['speedup']:.2f}x as fast as eager after {tuned['cold_s']:.0f} s, "
            f"reduce-overhead {fast['speedup']:.2f}x after {fast['cold_s']:.0f} s."
        ),
        (
            "inductor's autotuning is ranked better than default: on xlmr-2 its "
            f"{inductor['speedup']:.2f}x cost {inductor['cold_s']:.0f} s; CUDA graphs gave more for less."
        ),
        f"aot_eager is no speed-up: {aot['speedup']:.2f}x on unet-small.",
        (
            "compiled code is said to need more memory: on unet default held "
            f"{whole['after_mb']:,} MB, eager {whole['eager_mb']:,} MB."
        ),
        (
            "compiling by blocks is said to compile faster: on unet it took "
            f"{blocks['cold_s']:.0f} s, whole {whole['cold_s']:.0f} s, since most of it is no repeated block."
        ),
    ]


def main():
    """Write src/hotloop/measured.json."""
    source = pathlib.Path(sys.argv[1])
    document = json.loads(source.read_text())
    timed = [row for row in document["rows"] if "ms" in row]
    machine, settings = document["machine"], document["settings"]
    published = {
        "machine": f"{machine['gpu']}, torch {machine['torch']}, {document['date']}, bf16 autocast, "
        f"{settings['optimizer']}; {source.name}",
        "contradictions": contradictions(timed),
        "rows": [{key: row[key] for key in FIELDS} for row in timed],
    }
    target = pathlib.Path(__file__).parents[1] / "src" / "hotloop" / "measured.json"
    target.write_text(json.dumps(published, indent=1) + "\n")


if __name__ == "__main__":
    main()
