"""Workloads run on purpose: what is wrong with a program, whether a way to run it is right, and what it brings."""
