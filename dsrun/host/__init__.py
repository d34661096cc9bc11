"""This machine and its environment, read by dsrun and, sent as text, on hosts: Python 3.8, its own library."""
