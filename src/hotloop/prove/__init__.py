"""Workloads run on purpose: finds what is wrong with a program, whether compiled code is right, and what it gains."""
