"""What outlives a process: the costs of earlier runs, and the child that fills the compile cache in the background."""
