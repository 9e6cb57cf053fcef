"""What ten viewers of a run's page cost, while the run trains.

usage: OMP_NUM_THREADS=1 python benchmarks/ui_viewers.py [SECONDS] [VIEWERS] [STEPS]
       OMP_NUM_THREADS=1 python benchmarks/ui_viewers.py training [PAIRS] [SECONDS] [VIEWERS]

A record of STEPS steps gets 20 more each second. Viewers do what the page's scripts do: they hear the stream, and ask
for the parts and the curves where it says that something has changed. The cost is the processor time of the server and
of its children (Linux: utime, stime, cutime and cstime of /proc/PID/stat) as a share of the time that passes: it is the
same on a busy machine and on an idle one. The run's own process does nothing for viewers, so that a training can lose
no more than that, and only where no other core is free. Goal: less than 1% of one core. ``idle`` is the same server
with the same run and without viewers.

With ``training``, a small diffusion model trains, and viewers come and go: turns of SECONDS with and without them, the
order alternating. Of each pair of turns, the ratio of its median steps is taken. Goal: the median ratio is below 1.01;
null says that the ratios are too far apart to tell. Where a core is free for the server, steps should not notice it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
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
from hotloop.report.series import median_interval

GOAL, GOAL_RATIO = 0.01, 1.01
FEWEST = 6  # pairs, for an interval that holds the median in 19 of 20 cases
SETTLED = 40.0  # seconds after which the server has asked what the machine can run, and each viewer has opened the page


def main(seconds: float = 120.0, viewers: int = 10, steps: int = 1_000) -> None:
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
        asked: list[str] = []
        try:
            url, cookie = opened(server.stdout.readline())
            trains = Trains(record, steps)
            trains.go_on(SETTLED)
            idle = trains.cost(server.pid, seconds / 2)
            for _ in range(viewers):
                threading.Thread(target=view, args=(url, cookie, asked), daemon=True).start()
            trains.go_on(SETTLED)
            many = len(asked)
            cost = trains.cost(server.pid, seconds)
            memory = psutil.Process(server.pid).memory_info().rss
        finally:
            server.kill()
            server.wait()
        record.finish()
    print(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"), "processor": processor(), "cores": psutil.cpu_count(),
                "load": round(psutil.getloadavg()[0], 1), "viewers": viewers, "steps_at_first": steps,
                "steps_at_last": trains.steps, "steps_per_second": STEPS_PER_SECOND, "seconds": seconds,
                "requests": len(asked) - many, "share_of_a_core": round(cost, 5),
                "idle_share_of_a_core": round(idle, 5),
                "server_memory_mb": round(memory / 2**20), "goal": GOAL, "passed": cost < GOAL,
            },
            indent=1,
        )
    )  # fmt: skip


STEPS_PER_SECOND = 20
PARTS = ("/run/now?run=a", "/run/charts?run=a")


class Trains:
    """A record that grows as that of a training does, at a fixed rate."""

    def __init__(self, record: RunRecord, steps: int) -> None:
        self.record, self.steps = record, steps

    def go_on(self, seconds: float) -> float:
        """Write steps for so long; return how long it was."""
        began, first = time.monotonic(), self.steps
        while (passed := time.monotonic() - began) < seconds:
            while self.steps - first < passed * STEPS_PER_SECOND:
                self.steps += 1
                self.record.append("steps", entry(self.steps))
            time.sleep(1 / STEPS_PER_SECOND)
        return passed

    def cost(self, pid: int, seconds: float) -> float:
        """Return which share of a core a process and its children took while that went on."""
        before = processor_seconds(pid)
        passed = self.go_on(seconds)
        return (processor_seconds(pid) - before) / passed


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and of its children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


TRAINING = (
    "recipe=diffusion", "run.device=cpu", "diffusion.width=32", "diffusion.autoencoder_steps=20",
    "diffusion.output=false", "data.sample_size=512", "training.batch_size=16", "training.num_epochs=100000",
)  # fmt: skip


def beside(pairs: int = 8, seconds: float = 15.0, viewers: int = 10) -> None:
    """Measure the steps of a training with and without viewers, in turns, and print a result."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "runs"
        hotloop = [sys.executable, "-u", "-m", "hotloop"]
        server = subprocess.Popen(
            [*hotloop, "ui", str(root), "--no-browser", "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        run = subprocess.Popen(
            [*hotloop, "train", *TRAINING, f"run.folder={root / 'a'}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = opened(server.stdout.readline())
            wait_for_steps(root / "a", 50)
            turns = take_turns(address, server.pid, pairs, seconds, viewers)
        finally:
            for one in (run, server):
                one.kill()
                one.wait()
        steps = [(one["time"], one["entry"]["seconds"]) for one in lines(root / "a") if one.get("append") == "steps"]
    report(steps, turns, seconds, viewers)


def lines(folder: Path) -> list[dict]:
    """Return the whole lines of a record."""
    text = (folder / "record.jsonl").read_text() if (folder / "record.jsonl").exists() else ""
    return [json.loads(one) for one in text.split("\n")[:-1]]


def wait_for_steps(folder: Path, many: int) -> None:
    """Wait until a run has done so many steps."""
    while sum(one.get("append") == "steps" for one in lines(folder)) < many:
        time.sleep(1)


def take_turns(address: tuple[str, str], server: int, pairs: int, seconds: float, viewers: int) -> list[dict]:
    """Let viewers come and go, each turn first in every other pair; return when each turn was and what it cost."""
    turns, process = [], psutil.Process(server)
    for pair in range(pairs):
        for watched in (pair % 2 == 0, pair % 2 == 1):
            seen = start_viewers(address, viewers) if watched else None
            time.sleep(2)  # they have opened the page
            began, before = time.time(), sum(process.cpu_times()[:2])
            time.sleep(seconds)
            cost = (sum(process.cpu_times()[:2]) - before) / (time.time() - began)
            turns.append({"pair": pair, "watched": watched, "from": began, "to": time.time(), "server": cost})
            if seen:
                seen.kill()
                seen.wait()
    return turns


def start_viewers(address: tuple[str, str], viewers: int) -> subprocess.Popen:
    """Start viewers, as a process of their own."""
    return subprocess.Popen([sys.executable, __file__, "viewers", *address, str(viewers)])


def opened(line: str) -> tuple[str, str]:
    """Return the address of a server and the cookie that it gives for the token in what it printed."""
    url, token = re.search(r"(http://\S+)/\?token=(\S+)", line).groups()
    with urllib.request.urlopen(f"{url}/?token={token}") as answer:
        return url, answer.headers["set-cookie"].partition(";")[0]


def only_view(url: str, cookie: str, viewers: str) -> None:
    """Watch until somebody ends this process."""
    threads = [threading.Thread(target=view, args=(url, cookie, [])) for _ in range(int(viewers))]
    for one in threads:
        one.start()


def report(steps: list[tuple[float, float]], turns: list[dict], seconds: float, viewers: int) -> None:
    """Print what the turns say."""
    for one in turns:
        one["steps"] = [took for at, took in steps if one["from"] <= at <= one["to"]]
        one["median"] = statistics.median(one["steps"])
    both = [sorted(pair, key=lambda one: one["watched"]) for pair in zip(turns[::2], turns[1::2], strict=True)]
    ratios = sorted(watched["median"] / alone["median"] for alone, watched in both)
    ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
    print(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"), "processor": processor(), "cores": psutil.cpu_count(),
                "viewers": viewers, "pairs": len(both), "seconds_of_a_turn": seconds,
                "steps": sum(len(one["steps"]) for one in turns),
                "step_ms_alone": round(1000 * statistics.median(one["median"] for one, _ in both), 3),
                "step_ratio": round(ratio, 4), "step_ratios": [round(one, 4) for one in ratios],
                "server_share_of_a_core": round(statistics.median(one["server"] for _, one in both), 4),
                "load": round(psutil.getloadavg()[0], 1), "goal": GOAL_RATIO,
                "step_ratio_between": [round(low, 4), round(high, 4)],
                "passed": None if low < GOAL_RATIO < high or len(both) < FEWEST else high < GOAL_RATIO,
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
    if sys.argv[1:2] == ["viewers"]:
        only_view(*sys.argv[2:])
    elif sys.argv[1:2] == ["training"]:
        beside(*(kind(one) for kind, one in zip((int, float, int), sys.argv[2:], strict=False)))
    else:
        main(*(kind(one) for kind, one in zip((float, int, int), sys.argv[1:], strict=False)))
