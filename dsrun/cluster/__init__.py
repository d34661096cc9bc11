"""The machines: which devices there are and which may be used, ports, and compiled extensions."""
