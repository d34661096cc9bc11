# ruff: noqa: N802  (pynvml's names)
"""A node of recorded answers: NVML's, through the real pynvml, whose functions are replaced; and nvidia-smi's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
DRIVER = "580.82.07"
GIB = 2**30


def node(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


class Nvml:
    """NVML's functions for a node. A handle is a card's number, or that and a slice's place."""

    def __init__(self, made: dict[str, Any]) -> None:
        import pynvml

        self.cards, self.init, self.fails = made["cards"], made.get("init"), pynvml.NVMLError

    def nvmlInit(self) -> None:
        if self.init:
            raise self.fails(self.init)

    def nvmlShutdown(self) -> None:
        """Nothing is held."""

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, ...]:
        if code := self.cards[index].get("lost"):
            raise self.fails(code)
        return (index,)

    def _of(self, handle: tuple[int, ...]) -> tuple[str, float]:
        card = self.cards[handle[0]]
        return card["slices"][handle[1]] if len(handle) > 1 else (card["name"], card["total_gib"])

    def nvmlDeviceGetName(self, handle: tuple[int, ...]) -> str:
        return self._of(handle)[0]

    def nvmlDeviceGetUUID(self, handle: tuple[int, ...]) -> str:
        return f"{'MIG' if len(handle) > 1 else 'GPU'}-{'-'.join(map(str, handle))}"

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, ...]) -> SimpleNamespace:
        card = self.cards[handle[0]]
        if code := card.get("no_memory"):
            raise self.fails(code)
        total = self._of(handle)[1]
        used = 0.0 if len(handle) > 1 else card["used_gib"]
        return SimpleNamespace(total=total * GIB, used=used * GIB, free=(total - used) * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.cards[handle[0]]["capability"])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: tuple[int, ...]) -> list[SimpleNamespace]:
        card = self.cards[handle[0]]
        if code := card.get("no_processes"):
            raise self.fails(code)
        return (
            [SimpleNamespace(pid=pid, usedGpuMemory=used * GIB) for pid, used in [card["process"]] if pid]
            if ("process" in card and len(handle) == 1)
            else []
        )

    def nvmlDeviceGetMigMode(self, handle: tuple[int, ...]) -> tuple[int, int]:
        if self.cards[handle[0]]["capability"] < [8, 0]:
            raise self.fails(3)  # not supported
        divided = int("slices" in self.cards[handle[0]])
        return divided, divided

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: tuple[int, ...]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: tuple[int, ...], place: int) -> tuple[int, ...]:
        if place >= len(self.cards[handle[0]].get("slices", ())):
            raise self.fails(6)  # not found
        return (*handle, place)

    def into(self, patch: Any) -> None:
        """Replace the real functions. patch: pytest's monkeypatch."""
        import pynvml

        for name in vars(Nvml):
            if name.startswith("nvml"):
                patch.setattr(pynvml, name, getattr(self, name))


SMI_FAULTS = {
    12: "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.",
    18: "Failed to initialize NVML: Driver/library version mismatch",
    4: "Failed to initialize NVML: Insufficient Permissions",
}


def smi(made: dict[str, Any], words: list[str]) -> tuple[int, str]:
    """nvidia-smi's exit code and answer."""
    if made.get("init"):
        return made["init"], SMI_FAULTS[made["init"]]
    there = [(number, card) for number, card in enumerate(made["cards"]) if not card.get("lost")]
    if "-q" in words:
        return 0, xml(there)
    if any(word.startswith("--query-compute-apps") for word in words):
        busy = [(number, *card["process"]) for number, card in there if "process" in card]
        return 0, "".join(
            f"GPU-{number}, {pid}, {round(used * 1024)}, python\n" for number, pid, used in busy
        )
    return 0, "".join(
        f"{number}, {card['name']}, GPU-{number}, {_mib(card, 'total_gib')}, {_mib(card, 'used_gib')}, {DRIVER}"
        f"{', ' + '.'.join(map(str, card['capability'])) if 'compute_cap' in ' '.join(words) else ''}\n"
        for number, card in there
    )


def _mib(card: dict[str, Any], key: str) -> str:
    return "[N/A]" if card.get("no_memory") else str(round(card[key] * 1024))


def xml(there: list[tuple[int, dict[str, Any]]]) -> str:
    """What doctor reads of `nvidia-smi -q -x`, in its tags."""
    cards = "".join(
        f'<gpu id="{number}"><product_name>{card["name"]}</product_name><remapped_rows><remapped_row_pending>'
        f"{'Yes' if card.get('pending') else 'No'}</remapped_row_pending><remapped_row_failure>No"
        "</remapped_row_failure></remapped_rows><ecc_errors><volatile><sram_uncorrectable>0</sram_uncorrectable>"
        "</volatile></ecc_errors></gpu>"
        for number, card in there
    )
    return f"<nvidia_smi_log><driver_version>{DRIVER}</driver_version>{cards}</nvidia_smi_log>"


def program(name: str, folder: Path) -> None:
    """Put a nvidia-smi that answers for a node into a folder."""
    path = folder / "nvidia-smi"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} {name} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


if __name__ == "__main__":
    code, text = smi(node(sys.argv[1]), sys.argv[2:])
    print(text)
    sys.stdout.flush()
    os._exit(code)
