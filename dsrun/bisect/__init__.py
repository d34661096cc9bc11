"""Which package broke it, and in which release: between an environment that is right and one that is wrong.

`search.py` decides what to try next, from the outcomes alone; `environments.py` makes an environment of some versions;
`probes.py` says whether one is right; `report.py` writes down what was found, as an entry for presets/versions/.
"""
