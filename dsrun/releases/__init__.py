"""What the releases of the libraries have: names, parameters and attributes, from when to when.

The data are packed files beside these modules, one a package, made by tools/releases from the published archives. A
file is a magic line, a header, and blocks of text under LZMA, of which one look-up unpacks one: `packed.py` has the
form, `lookup.py` the answers. No other room needs more than `lookup`.
"""
