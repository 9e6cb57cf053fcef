"""`hotloop.verify`: compares compiled code with eager and with float64."""
