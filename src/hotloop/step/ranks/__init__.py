"""The processes and threads that train together with this one."""
