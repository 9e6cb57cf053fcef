"""Searching for settings: trials that are ordinary runs, kept in a storage that any number of workers share."""
