"""What test suites need, ours and users': a captured step without a GPU."""
