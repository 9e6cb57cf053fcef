"""Searching for settings: trials that are ordinary runs, in a study of Optuna's that any number of workers share."""
