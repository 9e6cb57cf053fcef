"""One eager step observed: its operations, host reads and side effects."""
