"""What is checked of a job before anything is started: memory, disk, kernels, optimizer, packages, versions."""
