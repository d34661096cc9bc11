"""Checks of a job before anything is started: memory, disk, kernels, optimizer, packages, versions."""
