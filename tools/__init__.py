"""Tools for who works on dsrun: no part of the package."""
