"""The picture of the losses."""

from __future__ import annotations

import json
import warnings

import pytest
from needed import needs

from dsrun.training.reports.plot import plot_losses

needs("matplotlib")


@pytest.mark.parametrize(("name", "title"), [("a $5 run", "a $5 run"), ("一次运行", "loss")])
def test_the_title_is_the_runs_name_where_the_font_has_it(name, title, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda _axes, text, **_given: titles.append(text))
    folder = tmp_path / name
    folder.mkdir()
    lines = [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_losses(folder).read_bytes().startswith(b"\x89PNG")
    assert titles == [title]
