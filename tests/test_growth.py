"""No room grows unseen: each has a number in growth.toml."""

from __future__ import annotations

import growth
import pytest

TABLE = '# head\n"bench" = 100\n"dsrun/cli" = 1000  # a board\n'


def test_rooms_are_within_their_numbers():
    assert not growth.problems(growth.sizes(), growth.bounds(growth.TABLE.read_text(encoding="utf-8")))


def test_the_table_has_each_room_once():
    lines = growth.TABLE.read_text(encoding="utf-8").splitlines()
    rooms = [line for line in lines if not line.startswith("#")]
    assert all(growth.LINE.fullmatch(line) for line in rooms)
    assert len(growth.bounds("\n".join(rooms))) == len(rooms)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"bench": 60, "dsrun/cli": 1000}, []),
        ({"bench": 101, "dsrun/cli": 850}, ["bench has 101"]),
        ({"bench": 100, "dsrun/cli": 800}, ["dsrun/cli has 800"]),
        ({"bench": 100, "dsrun/cli": 900, "dsrun/new": 1}, ["dsrun/new has 1 lines and no number"]),
        ({"bench": 100}, ["dsrun/cli has 0"]),
    ],
)
def test_above_and_far_below(found, expected):
    says = growth.problems(found, growth.bounds(TABLE))
    assert len(says) == len(expected)
    assert all(text in one for text, one in zip(expected, says, strict=True))


def test_a_raise_needs_a_reason_and_the_others_are_kept():
    with pytest.raises(ValueError, match="bench"):
        growth.written(TABLE, {"bench": 101, "dsrun/cli": 900})
    raised = growth.written(TABLE, {"bench": 101, "dsrun/cli": 900}, "peers")
    assert raised == '# head\n"bench" = 150  # peers\n"dsrun/cli" = 1000  # a board\n'
    assert growth.written(raised, {"dsrun/cli": 420}) == '# head\n"dsrun/cli" = 450  # a board\n'


def test_generated_pages_and_rooms_of_jobs(tmp_path):
    for name, text in {
        "dsrun/a.py": "1\n2\n", "dsrun/jobs/runs/b.py": "1\n", "dsrun/config/rules/zero/c.py": "1\n",
        "docs/reference/made.md": f"{growth.GENERATED}; -->\n", "docs/howto/d.md": "1\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert growth.sizes(tmp_path) == {"dsrun": 2, "dsrun/jobs/runs": 1, "dsrun/config": 1, "docs/howto": 1}
