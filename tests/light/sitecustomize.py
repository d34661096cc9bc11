"""For every Python that a test starts: a third of what importing torch and DeepSpeed takes is garbage collection."""

import gc

gc.set_threshold(200_000, 50, 1000)
