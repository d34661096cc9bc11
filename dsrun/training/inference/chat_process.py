"""`python -m dsrun.training.inference.chat_process REQUEST`: chat.py, with Ctrl-C while its imports take seconds."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Do what the first argument says."""
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # there is nothing to be tidied up yet, and no traceback to be shown
    from dsrun.training.inference import chat

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return chat.main()


if __name__ == "__main__":
    sys.exit(main())
