"""Download a model from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from dsrun.errors import DsrunError

FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja", "*_chatglm.py"]
"""What is downloaded: config, weights, tokenizer. ChatGLM's code is read for a constant, never run."""
BIN_FILES = ["pytorch_model*.bin"]
NOT = ["*/*", "consolidated*"]
"""The same weights in another form: Llama's original/, onnx/, Mistral's consolidated.safetensors."""


def download(repository: str, model: str) -> Path:
    """The local folder of a repository, downloaded where it is not in the cache yet (it shows its own progress).

    HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are honoured. Raises DsrunError where it is gated,
    missing or out of reach.
    """
    from huggingface_hub import errors, snapshot_download

    otherwise = f"Or pass a folder that holds it: dsrun finetune {model} --model-path DIR"
    try:
        folder = Path(snapshot_download(repository, allow_patterns=FILES, ignore_patterns=NOT))
        if not any(folder.glob("*.safetensors")):
            folder = Path(
                snapshot_download(repository, allow_patterns=FILES + BIN_FILES, ignore_patterns=NOT)
            )
    except errors.GatedRepoError as error:
        hint = f"Accept its licence on its page, then `hf auth login`. {otherwise}"
        raise DsrunError(f"{repository} is gated", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        raise DsrunError(f"there is no repository {repository} (or it is private)", hint=otherwise) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        mirror = os.environ.get("HF_ENDPOINT")
        hint = (
            f"Does HF_ENDPOINT answer: {mirror}?"
            if mirror
            else "Behind a firewall, set HF_ENDPOINT to a mirror."
        )
        raise DsrunError(f"{repository} can't be downloaded: {reason}", hint=f"{hint} {otherwise}") from error
    return folder
