"""For a Python in which something happens as files are written: AT_EXPORT and AT_SAVE say what.

"sleep SECONDS", or "fill FILE LEFT": the file grows until there are LEFT bytes of room. It happens once in a process
(an audit hook: nothing of dsrun's is changed). AT_EXPORT: as the folder is made that the model is written into.
AT_SAVE, with "STEP: " before it: as the first whole file of that step's checkpoint is opened again, to reach the disk.
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


def carry_out(words: list[str]) -> None:
    if words[0] == "sleep":
        time.sleep(float(words[1]))
    else:
        fill(words[1], int(words[2]))


def hook(event: str, args: tuple) -> None:
    if event == "os.mkdir" and at_export and os.fspath(args[0]).endswith("/.model.new"):
        words = at_export.copy()
        at_export.clear()
        carry_out(words)
    elif event == "open" and at_save and f"/checkpoints/step-{step}/" in str(args[0]):
        words = at_save.copy()
        at_save.clear()
        carry_out(words)


at_export = os.environ.get("AT_EXPORT", "").split()
step, _, rest = os.environ.get("AT_SAVE", "").partition(": ")
at_save = rest.split()
if at_export or at_save:
    sys.addaudithook(hook)
