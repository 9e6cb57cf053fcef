"""What a step may change, how that is copied, put back and undone, and the random streams."""
