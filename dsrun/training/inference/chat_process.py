"""`python -m dsrun.training.inference.chat_process REQUEST`: chat.py, with Ctrl-C while its imports take seconds."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Carry out the ChatRequest in the first argument."""
    # While modules are imported Ctrl-C ends at once, without a traceback: there is nothing to tidy up yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dsrun.training.inference import chat

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return chat.main()


if __name__ == "__main__":
    sys.exit(main())
