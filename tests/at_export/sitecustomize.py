"""For a Python whose export is to be slow, or to meet a disk that has just become full: AT_EXPORT says which.

"sleep SECONDS", or "fill FILE LEFT": the file grows until there are LEFT bytes of room. It happens once in a process,
as the folder is made that the model is written into (an audit hook: nothing of dsrun's is changed).
"""

import gc
import os
import sys
import time
from pathlib import Path

gc.set_threshold(200_000, 50, 1000)  # as in tests/light


def fill(path: str, left: int) -> None:
    with Path(path).open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            file.truncate(max(0, os.fstat(file.fileno()).st_size - left))


def hook(event: str, args: tuple) -> None:
    if event == "os.mkdir" and os.fspath(args[0]).endswith("/.model.new") and (words := what.copy()):
        what.clear()
        if words[0] == "sleep":
            time.sleep(float(words[1]))
        else:
            fill(words[1], int(words[2]))


what = os.environ.get("AT_EXPORT", "").split()
if what:
    sys.addaudithook(hook)
