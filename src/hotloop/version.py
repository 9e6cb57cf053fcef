"""The version of hotloop, in a module of its own: rooms read it without importing the public face."""

__version__ = "0.1.0"
