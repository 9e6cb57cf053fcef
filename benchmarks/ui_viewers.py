"""What ten viewers of a run's page cost, while the run trains.

usage: OMP_NUM_THREADS=1 python benchmarks/ui_viewers.py [SECONDS] [VIEWERS] [STEPS]

A record of STEPS steps gets 20 more each second. Viewers do what the page's scripts do: they hear the stream, and ask
for the parts and the curves where it says that something has changed. The cost is the CPU time of the server's process
as a share of the time that passes. The run's own process does nothing for viewers. Goal: less than 5% of one core.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil
from ledger import processor

from hotloop.record import RunRecord

GOAL = 0.05
PARTS = (
    "/run/head?run=a",
    "/run/charts?run=a",
    *(f"/run/part?part={one}&run=a" for one in ("summary", "files", "details")),
)


def main(seconds: float = 60.0, viewers: int = 10, steps: int = 10_000) -> None:
    """Measure and print a result."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "runs"
        record = RunRecord(root / "a")
        for step in range(1, steps + 1):
            record.append("steps", entry(step))
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", "hotloop", "ui", str(root), "--no-browser", "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            url, token = re.search(r"(http://\S+)/\?token=(\S+)", server.stdout.readline()).groups()
            cookie = f"hotloop_{url.rsplit(':', 1)[1]}={token}"
            asked: list[str] = []
            for _ in range(viewers):
                threading.Thread(target=view, args=(url, cookie, asked), daemon=True).start()
            time.sleep(25)  # what the machine can run is asked of a process of its own meanwhile
            process, began, many = psutil.Process(server.pid), time.monotonic(), len(asked)
            before = sum(process.cpu_times()[:2])
            while time.monotonic() - began < seconds:
                steps += 1
                record.append("steps", entry(steps))
                time.sleep(0.05)
            cost = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
            memory = process.memory_info().rss
        finally:
            server.kill()
            server.wait()
        record.finish()
    print(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"), "processor": processor(), "viewers": viewers,
                "steps_recorded": steps,
                "seconds": seconds, "requests": len(asked) - many, "share_of_a_core": round(cost, 4),
                "server_memory_mb": round(memory / 2**20), "goal": GOAL, "passed": cost < GOAL,
            },
            indent=1,
        )
    )  # fmt: skip


def entry(step: int) -> dict[str, object]:
    """Return the entry of a step."""
    return {"step": step, "seconds": 0.05, "loss": 1 / step, "learning_rate": 1e-3, "running": "eager"}


def view(url: str, cookie: str, asked: list[str]) -> None:
    """Follow the run as a page does."""

    def ask(path: str):
        asked.append(path)
        return urllib.request.urlopen(urllib.request.Request(url + path, headers={"cookie": cookie}))

    for line in ask("/run/news?run=a"):
        if line.startswith(b"event: changed"):
            for path in PARTS:
                ask(path).read()


if __name__ == "__main__":
    main(*(kind(one) for kind, one in zip((float, int, int), sys.argv[1:], strict=False)))
