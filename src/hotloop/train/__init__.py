"""The application behind ``hotloop train``: settings, data, the fit loop, checkpoints, the run's record and display."""
