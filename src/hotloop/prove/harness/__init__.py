"""`hotloop.harness`: checks that a program runs safely under presets with CUDA graphs."""
