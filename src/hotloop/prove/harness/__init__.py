"""`hotloop.harness`: checks that a program meets the contract of captured steps."""
