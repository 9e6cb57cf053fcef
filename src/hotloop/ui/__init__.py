"""``hotloop ui``: a page for settings and runs, served to this machine; the truth of each run is its folder."""
