"""Packages whose name is another than that of the module in them: what pip has to install for an import that fails."""

from __future__ import annotations

NAMES = {
    "cv2": "opencv-python-headless", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn",
    "skimage": "scikit-image", "bs4": "beautifulsoup4", "dateutil": "python-dateutil", "dotenv": "python-dotenv",
    "google.protobuf": "protobuf", "attr": "attrs", "jwt": "pyjwt", "git": "gitpython", "fitz": "pymupdf",
    "docx": "python-docx", "Crypto": "pycryptodome", "MPI": "mpi4py", "mpi4py.MPI": "mpi4py", "faiss": "faiss-cpu",
    "pynvml": "nvidia-ml-py", "hydra": "hydra-core", "megatron.core": "megatron-core", "transformer_engine":
    "transformer-engine[pytorch]", "flash_attn": "flash-attn --no-build-isolation", "rouge_chinese": "rouge-chinese",
    "sentence_transformers": "sentence-transformers", "torch_scatter": "torch-scatter", "lightning_fabric":
    "lightning", "pytorch_lightning": "pytorch-lightning", "serial": "pyserial", "zmq": "pyzmq", "OpenSSL": "pyopenssl",
    "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient", "Levenshtein": "levenshtein", "jose": "python-jose",
    "mamba_ssm": "mamba-ssm --no-build-isolation", "causal_conv1d":
    "causal-conv1d --no-build-isolation", "qwen_vl_utils": "qwen-vl-utils", "distutils": "setuptools",
    "pkg_resources": "'setuptools<81'", "imp": "", "amp_C": "", "apex": "",
}  # fmt: skip
"""Module -> what follows `pip install`; empty: pip has nothing of that name that would help."""
NO_PACKAGE = {
    "imp": "it left Python in 3.12: a newer release of whoever imports it, or Python 3.11",
    "apex": "from its sources (https://github.com/NVIDIA/apex): the package of that name is another program",
    "amp_C": "with Apex, from its sources, with --cpp_ext and --cuda_ext",
}
"""What to do there."""


def in_words(module: str) -> str:
    """What to install for a module, to stand behind "install it"; empty where the package has the module's name."""
    parts = module.split(".")
    known = next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in NAMES), None)
    if known is None:
        return ""
    return f" ({NO_PACKAGE[known]})" if known in NO_PACKAGE else f" (`pip install {NAMES[known]}`)"
