"""Runs on a Ray cluster: what ``hotloop submit`` sends there, what it reads of it, and what comes back.

``submitting`` checks and sends; ``there`` is what the cluster runs; ``fetch`` brings results back. All of it goes
through the one port of the cluster's dashboard.
"""
