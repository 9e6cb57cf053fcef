"""Which tier comes next: candidates, earlier runs, the background compile, and `auto`."""
