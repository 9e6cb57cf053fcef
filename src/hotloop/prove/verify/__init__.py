"""`hotloop.verify`: compiled code held against eager and float64."""
