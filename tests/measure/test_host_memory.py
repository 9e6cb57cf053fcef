"""Memory as the system tells it: the machine's, or the least that a control group around the process leaves."""

import pytest

from hotloop import host

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"
MACHINE = host.Memory(64 * GIB, 48 * GIB)
SECOND = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
FIRST = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "33 31 0:30 {top} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def system(root, *, groups, mounts, meminfo=MEMINFO, **folders):
    """Lay out the files of a machine; folders are those below ``sys/fs/cgroup``, each with its files."""
    (root / "proc/self").mkdir(parents=True)
    for name, text in (("meminfo", meminfo), ("self/cgroup", groups), ("self/mountinfo", mounts)):
        (root / "proc" / name).write_text(text)
    for folder, files in folders.items():
        there = root / "sys/fs/cgroup" / folder
        there.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (there / name).write_text(f"{value}\n")
    return root


def second(limit, used, cached=0):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {cached}"}


def first(limit, used, cached=0):
    stat = f"inactive_file 7\ntotal_inactive_file {cached}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


NONE = first(9223372036854771712, 50 * GIB)
FOUND = {
    "version 2, as a container sees it": (
        {"groups": "0::/\n", "mounts": SECOND, ".": second(8 * GIB, 3 * GIB, GIB)},
        host.Memory(8 * GIB, 6 * GIB),
    ),
    "the limit of a group around it": (
        {
            "groups": "0::/slurm/job7\n",
            "mounts": SECOND,
            "slurm": second(16 * GIB, 14 * GIB),
            "slurm/job7": second(8 * GIB, GIB),
        },
        host.Memory(8 * GIB, 2 * GIB),
    ),
    "version 2, without a limit": (
        {"groups": "0::/user\n", "mounts": SECOND, "user": second("max", 3 * GIB)},
        MACHINE,
    ),
    "version 1, in a group": (
        {
            "groups": "5:cpu:/\n4:memory:/docker/ab\n",
            "mounts": FIRST.format(top="/"),
            "memory": NONE,
            "memory/docker/ab": first(2 * GIB, 2 * GIB, GIB),
        },
        host.Memory(2 * GIB, GIB),
    ),
    "a path that leads out of the container": (
        {"groups": "0::/../../elsewhere\n", "mounts": SECOND, ".": second(8 * GIB, 9 * GIB)},
        host.Memory(8 * GIB, 0),
    ),
    "no control groups": ({"groups": "", "mounts": ""}, MACHINE),
    "no /proc/meminfo": ({"groups": "", "mounts": "", "meminfo": ""}, host.Memory(None, None)),
}


@pytest.mark.parametrize(("files", "found"), FOUND.values(), ids=FOUND)
def test_the_least_of_machine_and_groups_counts(tmp_path, files, found):
    assert host.memory(system(tmp_path, **files)) == found
