"""A requirement of dsrun's own that is not installed, as pip's --no-deps leaves it: one message, no internal error."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.cli import OWN_PACKAGES

CHECKOUT = Path(__file__).resolve().parents[2]
BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from dsrun.cli import main
main({words!r})
"""


@pytest.mark.parametrize("name", ["jsonschema", "referencing"])
def test_a_missing_requirement_is_one_clear_message(name, tmp_path):
    config = tmp_path / "deepspeed.json"
    config.write_text('{"train_batch_size": "x"}')
    code = BLOCKED.format(name=name, words=["validate", str(config)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"{name} is not installed in {sys.prefix}" in done.stderr
    assert f"-m pip install {name}" in done.stderr
    assert "internal error" not in done.stderr


def test_every_requirement_is_named():
    config = configparser.ConfigParser()
    config.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    rows = config["options"]["install_requires"].split("\n")
    needed = {re.split("[<>=;]", row)[0].strip() for row in rows if row}
    assert needed - {"click"} <= set(OWN_PACKAGES.values())
