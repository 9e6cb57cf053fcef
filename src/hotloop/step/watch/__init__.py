"""Whether what was recorded is still what the step does: its operations judge, plain Python values ask for a look."""
