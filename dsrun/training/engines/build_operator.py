"""Compile one of DeepSpeed's operators: `python -m dsrun.training.engines.build_operator CPUAdamBuilder`."""

from __future__ import annotations

import sys


def main() -> int:
    """Build (or load, where it is built) the operator of the named builder."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(sys.argv[1])
    if builder is None:
        sys.stderr.write(f"DeepSpeed has no {sys.argv[1]} for {get_accelerator().device_name()}\n")
        return 1
    builder.load(verbose=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
