"""Which packages are read, from which release on, and from which of their files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.version import Version

ANY_WHEEL, SDIST = r"-none-any\.whl$", r"\.tar\.gz$"


@dataclass(frozen=True)
class Package:
    """A package, under its name on the index."""

    name: str
    first: str
    """The first release that is read: the first of 2023, or of the package."""
    files: tuple[str, ...] = (ANY_WHEEL, SDIST)
    """Patterns of file names; the first that a release has a file for is taken."""
    roots: Mapping[str, str] = field(default_factory=dict)
    """Folder in the archive -> where it lies when installed; the package's own name where none is given."""
    every_release: bool = True
    """False: only the last patch of each minor, as the files are large."""
    left_out: str = ""
    """A pattern of the beginning of paths that are not read."""
    names_only: str = ""
    """A pattern of the beginning of paths of which only the names at the left margin are read."""
    reason: str = ""
    """Why these files, or not every release."""

    def chosen(self, releases: Iterable[str]) -> set[str]:
        """The releases that the data are made of: a cache may have more, of a difference that was asked for."""
        known = sorted(Version(release) for release in releases if Version(release) >= Version(self.first))
        if self.every_release:
            return {str(release) for release in known}
        return {str(release) for release in {(one.major, one.minor): one for one in known}.values()}

    def reads_names_only(self, path: str) -> bool:
        """Whether only the names of a file are read, and not what its classes and functions take."""
        return bool(self.names_only) and re.match(self.names_only, path) is not None

    def reads(self, path: str) -> bool:
        """Whether a file is read, by where it lies when installed."""
        return not self.left_out or re.match(self.left_out, path) is None

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        return self.name.replace("-", "_")

    @property
    def folders(self) -> Mapping[str, str]:
        return self.roots or {self.module: self.module}


TRAINED = (
    "auto|bert|bloom|chatglm|cohere|cohere2|deepseek_\\w+|falcon|gemma\\w*|glm\\w*|gpt2|gpt_neox|gpt_oss|gptj|granite|"
    "llama\\w*|llava|minimax\\w*|mistral\\w*|mixtral|olmo\\w*|opt|phi\\w*|qwen\\w+|roberta|smollm3|stablelm|starcoder2|t5|"
    "whisper"
)
"""The folders of models that are read whole."""
MAC = r"-cp311-(none|cp311)-macosx_\d+_0_arm64\.whl$"
PACKAGES = {
    package.name: package
    for package in (
        Package(
            "deepspeed",
            "0.8.0",
            (SDIST,),
            {"deepspeed": "deepspeed", "op_builder": "deepspeed/ops/op_builder"},
            reason="published as source packages only",
        ),
        Package(
            "transformers",
            "4.26.0",
            left_out=r"transformers/models/(.*/)?(convert|modular)_",
            names_only=rf"transformers/models/(?!({TRAINED})/)\w+/(?!(.*/)?__init__)",
            reason="without the scripts that convert checkpoints and the models' modular sources; of models that are "
            "seldom fine-tuned the names alone",
        ),
        Package("accelerate", "0.16.0"),
        Package("peft", "0.1.0"),
        Package("trl", "0.2.0"),
        Package("datasets", "2.9.0"),
        Package("lightning", "2.0.0"),
        Package(
            "tokenizers",
            "0.13.3",
            (r"-cp3\d+-(abi3|cp311)-manylinux\w+\.manylinux\w+x86_64\.whl$", r"-manylinux\w+x86_64\.whl$", SDIST),
            reason="its classes are compiled; their names and parameters are those of its stub files (.pyi)",
        ),
        Package(
            "torch",
            "2.0.0",
            (MAC,),
            every_release=False,
            left_out=r"torch/(testing/_internal|include|_inductor|share)/",
            reason="the wheel for macOS is a tenth of that for CUDA and has the same Python; compiled names are "
            "those of its stub files (.pyi)",
        ),
        Package(
            "bitsandbytes",
            "0.37.0",
            (r"-macosx\w+\.whl$", SDIST, ANY_WHEEL, r"-win_amd64\.whl$"),
            every_release=False,
            reason="a wheel is up to 100 MB of compiled kernels; those for Windows and macOS are the smallest",
        ),
        Package("flash-attn", "1.0.0", (SDIST,), every_release=False, reason="published as source packages only"),
        Package(
            "vllm",
            "0.1.0",
            (SDIST,),
            every_release=False,
            left_out=r"vllm/(model_executor/models|third_party|vllm_flash_attn)/",
            reason="a wheel is hundreds of MB of compiled kernels; without the models' own files",
        ),
    )
}  # fmt: skip
