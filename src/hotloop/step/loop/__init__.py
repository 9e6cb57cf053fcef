"""`hotloop.Loop`: runs each call of a step, rescues failed steps, and accounts for all of them."""
