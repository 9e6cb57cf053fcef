"""A Ray cluster of several nodes on this machine, for the tests of what runs on one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def nodes(*cpus: int, client: int | None = None):
    """Start a head without CPUs, and a node with so many CPUs each; they are gone with the block.

    Args:
        client: the port of the head for ``ray://``.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, **({"ray_client_server_port": client} if client else {})}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for many in cpus:
            made.add_node(num_cpus=many)
        yield made
    finally:
        made.shutdown()


def children(process: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
