"""Makes what dsrun/config/schemas holds from the code of DeepSpeed and PyTorch; no part of the package."""
