"""One module a framework: its hooks, translated into hotloop calls. None knows another, none patches its framework.

Each framework is imported when its module of this package is used, and a missing one says which extra installs it.
"""
