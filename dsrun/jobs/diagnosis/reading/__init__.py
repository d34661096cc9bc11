"""A log as bytes, lines and exceptions, before anybody asks what failed."""
