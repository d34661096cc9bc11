from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from running import examples

from dsrun.cluster import hostfile
from dsrun.cluster.hostfile import RULES, SEVERITIES, checked, parse, read
from dsrun.errors import DsrunError

CORPUS = Path(os.environ.get("DSRUN_CORPUS", "")) / "hostfiles.json"
REAL = (
    json.loads(CORPUS.read_text(encoding="utf-8"))
    if "DSRUN_CORPUS" in os.environ and CORPUS.is_file()
    else []
)


def rules(found, severity):
    return [each.rule for each in found.findings if each.severity == severity]


def pairs(found):
    return [(entry.host, entry.slots) for entry in found.entries]


@pytest.fixture(scope="module")
def theirs():
    """DeepSpeed's own reader: text -> hosts and slots, or None where it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        runner = pytest.importorskip("deepspeed.launcher.runner")
    runner.logger.disabled = True

    def parsed(text):
        # Open in text mode, as runner.fetch_hostfile does it: \r and \r\n end lines too.
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        try:
            return list(runner._parse_hostfile(lines).items())
        except ValueError:
            return None

    yield parsed
    runner.logger.disabled = False


GOOD = {
    "a slots=4": [("a", 4)],
    "a slots=4\nb slots=4": [("a", 4), ("b", 4)],
    "b slots=4\r\na slots=2\r\n": [("b", 4), ("a", 2)],
    "  a \t slots=4  ": [("a", 4)],
    "\n\n# a comment, 中文\n\n   # b slots=1\na slots=08\n": [("a", 8)],
    "a slots=4 # 主节点\nb slots=4#x": [("a", 4), ("b", 4)],
    "a slots=4 max_slots=8\nb slots=4 max-slots=4": [("a", 4), ("b", 4)],
    "a slots=4 slots_max=8 # c": [("a", 4)],
    "a slots=4 max_slots=" + "9" * 5000: [("a", 4)],
    "10.0.0.1 slots=8\nfe80::1 slots=8\nfe80::2%eth0 slots=8": [
        ("10.0.0.1", 8), ("fe80::1", 8), ("fe80::2%eth0", 8),
    ],
    "node_1.lab.example-uni.edu slots=1000": [("node_1.lab.example-uni.edu", 1000)],
    "n. slots=1": [("n.", 1)],
    "\u3000\na slots=1": [("a", 1)],
}  # fmt: skip


@pytest.mark.parametrize("text", GOOD, ids=lambda text: repr(text[:30]))
def test_what_is_accepted_is_read_as_deepspeed_reads_it(theirs, text):
    found = parse(text)
    assert found.errors == ()
    assert pairs(found) == GOOD[text] == theirs(text)
    assert [entry.host in text.splitlines()[entry.line - 1] for entry in found.entries]


# A text, its line with the error, the rule, what the message names (a value, or the right line), and whether DeepSpeed
# takes the file.
BAD = [
    ("a slots = 4", 1, "H002", "a slots=4", False),
    ("a slots= 4", 1, "H002", "a slots=4", False),
    ("a slots =4", 1, "H002", "a slots=4", False),
    ("a slot=4", 1, "H003", "a slots=4", False),
    ("a Slots=4", 1, "H003", "a slots=4", False),
    ("a gpus=4", 1, "H003", "a slots=4", False),
    ("a slots:4", 1, "H003", "a slots=4", False),
    ("a 4", 1, "H003", "a slots=4", False),
    ("a max_slots=8 slots=4", 1, "H003", "", False),
    ("b slots=4\na:4", 2, "H004", "", False),
    ("a", 1, "H001", "a slots=N", False),
    ("fe80::1", 1, "H001", "fe80::1 slots=N", False),
    ("//", 1, "H001", "", False),
    ("a slots=", 1, "H005", "", False),
    ("a slots=four", 1, "H005", "'four'", False),
    ("a slots=+4", 1, "H005", "'+4'", False),
    ("a slots=٤", 1, "H005", "", True),
    ("4 a", 1, "H006", "", False),
    ("4 slots a", 1, "H006", "", False),
    ("slots=4 a", 1, "H006", "", False),
    ("slots = 4", 1, "H006", "", False),
    ("a slots=4x", 1, "H005", "", True),
    ("a slots=2.5", 1, "H005", "", True),
    ("a slots=4,", 1, "H005", "", True),
    ("a slots=4slots=4", 1, "H005", "", True),
    ("a slots=4 foo", 1, "H007", "", True),
    ("a slots=4 slots=8", 1, "H007", "'slots=8'", True),
    ("a slots=4 max_slots=2", 1, "H008", "", True),
    ("a slots=4 max_slots=many", 1, "H008", "max_slots=M", True),
    ("a slots=4 max_slots=", 1, "H008", "max_slots=M", True),
    ("a slots=4\nb slots=4\na slots=2", 3, "H009", "", False),
    ("a slots=0", 1, "H010", "", True),
    ("a slots=000", 1, "H010", "", True),
    ("a slots=-4", 1, "H010", "'-4'", False),
    ("a slots=1001", 1, "H010", "'1001'", True),
    ("a slots=" + "9" * 4000, 1, "H010", "", True),
    ("u@a slots=4", 1, "H011", "User u", True),
    ("-oProxyCommand=x slots=4", 1, "H012", "'='", True),
    ("-l slots=4", 1, "H012", "", True),
    ("a, slots=4", 1, "H012", "','", True),
    ("主节点 slots=4", 1, "H012", "'主'", True),
    ("'a' slots=4", 1, "H012", "", True),
    ("$(reboot) slots=4", 1, "H012", "'$'", True),
    ("a..b slots=4", 1, "H012", "", True),
    ("a" * 254 + " slots=4", 1, "H012", "", True),
    ("10.0.0.300 slots=4", 1, "H012", "", True),
    ("10.0.0.010 slots=4", 1, "H012", "", True),
    ("4 slots=4", 1, "H012", "", True),
    ("[::1] slots=4", 1, "H012", "::1", True),
    ("a:22 slots=4", 1, "H013", "ssh_port", True),
    ("node[1-4] slots=8", 1, "H014", 'dsrun hosts expand "node[1-4]:8"', True),
    ("", 1, "H015", "", False),
    ("\n \t\n", 1, "H015", "", False),
    ("# a slots=4\n", 1, "H015", "", False),
    ("\ufeffa slots=4", 1, "H016", "", True),
    ("a\u00a0slots=4", 1, "H017", "U+00A0", True),
    ("a\u3000slots=4", 1, "H017", "U+3000", True),
    ("a slots=4\u3000", 1, "H017", "a slots=4", True),
    ("a slots＝4", 1, "H017", "a slots=4", False),
    ("a slots=４", 1, "H017", "a slots=4", True),
    ("＃ a slots=4", 1, "H017", "U+FF03", False),
    ("b slots=1\na\u200b slots=4", 2, "H017", "", True),
    ("a slots=4\n\ufeffb slots=4", 2, "H017", "U+FEFF", True),
    ("a slots=4\x0c", 1, "H017", "U+000C", True),
    ("a slots=4\x1b[0m", 1, "H017", "U+001B", True),
    ("\u200b", 1, "H017", "", False),
    ("aslots=4", 1, "H018", "a slots=4", False),
    ("a with 4 GPUs", 1, "H018", "", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "rule", "said", "taken"), BAD, ids=lambda value: repr(value)[:30])
def test_what_is_refused(theirs, text, line, rule, said, taken):
    (error,) = parse(text).errors
    assert (error.line, error.rule) == (line, rule)
    assert said in f"{error.message} {error.hint}"
    assert error.hint
    assert f"{error.message}{error.hint}".isprintable()
    assert (theirs(text) is not None) is taken


def test_only_what_would_not_run_as_written_is_refused_beyond_deepspeed():
    beyond = {rule for _, _, rule, _, taken in BAD if taken}
    assert {rule for _, _, rule, _, _ in BAD} == {rule for rule in RULES if rule.startswith("H0")}
    assert not beyond & {"H001", "H002", "H003", "H004", "H006", "H009", "H015", "H018"}


FROM_DOCUMENTATION = [
    "node_ip", "ip1", "ip", "ip-2", "IP_ADDRESS", "your-host", "your_server_1", "yourhost", "my-node", "hostname",
    "hostname2", "host_name", "worker_ip", "node-ip1", "master_addr", "x.x.x.x", "xxx", "gpu1.example.com",
    "a.invalid", "192.0.2.7", "198.51.100.16", "2001:db8::5",
]  # fmt: skip
OF_MACHINES = [
    "node0", "node-1", "worker-10", "host1", "master", "slave2", "ip-10-0-0-1", "ip1.lab", "hostname-lab", "myhosting",
    "your", "10.0.0.1", "a800-3", "node_a", "x1", "example", "gpu.example.edu", "2001:db9::5", "192.0.20.7",
]  # fmt: skip


@pytest.mark.parametrize("name", FROM_DOCUMENTATION)
def test_names_from_documentation(name):
    found = parse(f"{name} slots=4\nb slots=4")
    assert (rules(found, "error"), rules(found, "warning")) == ([], ["H101"])


@pytest.mark.parametrize("name", OF_MACHINES)
def test_names_that_machines_have(name):
    found = parse(f"{name} slots=4\nb slots=4")
    assert found.findings == ()


@pytest.mark.parametrize("name", ["<host>", "${HOST}", "{host}", "$NODE"])
def test_a_name_to_fill_in_that_could_be_no_name(name):
    found = parse(f"{name} slots=4\nb slots=4")
    assert (rules(found, "error"), rules(found, "warning")) == (["H012"], ["H101"])


@pytest.mark.parametrize("name", ["localhost", "LocalHost.localdomain", "127.0.0.1", "127.1.2.3", "::1"])
def test_the_own_machine_among_several(name):
    found = parse(f"a slots=4\n{name} slots=4")
    assert [(each.line, each.rule) for each in found.findings] == [(2, "H102")]
    assert rules(parse(f"{name} slots=4"), "warning") == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.2"),
        ("Node1", "node1"),
        ("node1", "node1."),
        ("fe80::1", "FE80:0::1"),
    ],
)
def test_one_machine_under_two_names(one, other):
    found = parse(f"{one} slots=4\n{other} slots=4")
    (warning,) = found.findings
    assert (warning.line, warning.rule) == (2, "H103")
    assert f"{one!r} in line 1" in warning.message
    assert len(found.entries) == 2


def test_notes():
    found = parse("# all\na slots=8")
    assert [(each.line, each.rule, each.severity) for each in found.findings] == [(2, "H201", "note")]
    found = parse("a slots=8\nb slots=8\nc slots=4")
    (note,) = found.findings
    assert (note.line, note.rule, note.message) == (3, "H202", "unequal slots (8 on 2, 4 on 1), here 4")
    # Beside an error, how many there are is not known.
    assert rules(parse("a slots=8\nb slots=x"), "note") == []


def test_everything_at_once_by_line():
    found = parse("a slots=4\nb\na slots=4\nip1 slots=4\nc slots=0\n")
    assert [(each.line, each.rule) for each in found.findings] == [
        (2, "H001"), (3, "H009"), (4, "H101"), (5, "H010"),
    ]  # fmt: skip
    assert pairs(found) == [("a", 4), ("ip1", 4)]


def test_a_host_twice_in_a_refused_line_is_one_error():
    assert rules(parse("a slots=0\na slots=4"), "error") == ["H010"]


def test_rule_ids():
    assert all(re.fullmatch(r"H[012][0-9]{2}", rule) and RULES[rule] for rule in RULES)
    assert SEVERITIES == {"0": "error", "1": "warning", "2": "note"}


def test_a_message_is_not_endless():
    (error,) = parse("a" * 10**6).errors
    assert len(error.message) + len(error.hint) < 1000


def test_checked(tmp_path):
    path = tmp_path / "a lab's 主机"
    path.write_text("a slots=4\nb slots=4 # c\n", encoding="utf-8")
    assert [(entry.host, entry.slots, entry.line) for entry in checked(path)] == [("a", 4, 1), ("b", 4, 2)]
    path.write_text("a slots=4x\nb slots=4\nb slots=4\n", encoding="utf-8")
    with pytest.raises(DsrunError) as raised:
        checked(path)
    assert [problem.where for problem in raised.value.problems] == [f"{path}:1", f"{path}:3"]
    assert "(H005)" in raised.value.problems[0].what
    assert raised.value.problems[0].hint == "Write a slots=4"


def test_files_that_are_no_hostfiles(tmp_path):
    with pytest.raises(DsrunError, match=r"No such file.*\n.*this machine alone"):
        read(tmp_path / "absent")
    with pytest.raises(DsrunError, match="Is a directory"):
        checked(tmp_path)
    (tmp_path / "utf16").write_text("a slots=4", encoding="utf-16")
    with pytest.raises(DsrunError, match=r"is not UTF-8 .*\n.*Save it as UTF-8"):
        read(tmp_path / "utf16")


def test_a_byte_order_mark_alone():
    assert rules(parse("\ufeff\n"), "error") == ["H016", "H015"]


def test_a_byte_order_mark_on_a_disk(tmp_path):
    (tmp_path / "hf").write_text("a slots=4\nb slots=4\n", encoding="utf-8-sig")
    assert rules(read(tmp_path / "hf"), "error") == ["H016"]


def test_ten_thousand_hosts(monkeypatch):
    """Each name is looked at a fixed number of times, however many there are."""
    calls = 0
    real = hostfile.hostnames.name_fault

    def counted(host):
        nonlocal calls
        calls += 1
        return real(host)

    monkeypatch.setattr(hostfile.hostnames, "name_fault", counted)
    found = parse("".join(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255} slots=8\n" for i in range(10_000)))
    assert (len(found.entries), found.findings, calls) == (10_000, (), 10_000)


def test_what_is_written_is_read_again():
    entries = parse("b slots=4 # c\n\na slots=2 max_slots=4").entries
    again = parse(hostfile.text_of(entries)).entries
    assert [(entry.host, entry.slots) for entry in again] == [("b", 4), ("a", 2)]


WORDS = st.sampled_from([
    "a", "b", "node1", "localhost", "127.0.0.1", "::1", "slots=", "slots=4", "slots=8", "slots=4x", "slots",
    "max_slots=8", "=", ":", "4", "0", "-1", "#", "\ufeff", "\u00a0", "\u3000", "＝", "４", "٤", "\x0b", "\x0c",
    "\x1c", "\x85", "\u2028", "\ud800", "\x00", "\r", "@", "<", ">",
])  # fmt: skip
GAPS = st.sampled_from([" ", " ", "\t", "\n", "\r\n"])
ENTRY = st.builds(
    "{}{}slots={}{}".format,
    st.sampled_from(["a", "b", "c", "node-1.lab", "10.0.0.1", "::1", "localhost"]),
    st.sampled_from([" ", "  ", "\t", " ", "\u00a0"]),
    st.sampled_from(["1", "4", "08", "8"]),
    st.sampled_from(["", "", " ", "  # slots=9", "#x", " max_slots=9", "x", "\r", "\x0c", " slots=2"]),
)
LINES = st.lists(ENTRY | st.sampled_from(["", " ", "# c", "c"]), max_size=5).map("\n".join)
TEXTS = st.text() | st.lists(WORDS | GAPS).map("".join) | LINES


@given(TEXTS)
@example("a slots=4\u2028b slots=4")
@settings(max_examples=examples(1500), deadline=None)
def test_any_text(theirs, text):
    found = parse(text)
    assert {each.rule for each in found.findings} <= set(RULES)
    assert bool(found.entries) or bool(found.errors)
    if not found.errors:
        assert pairs(found) == theirs(text)
        assert pairs(parse(hostfile.text_of(found.entries))) == pairs(found)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_.-]{0,6}[a-z0-9]", fullmatch=True), st.integers(1, 1000), min_size=1
    ),
    st.lists(
        st.sampled_from(["", " ", "\t# c", "#c", " max_slots=1000", "\n", "\n# c slots=1", "\r"]), min_size=9
    ),
)
@settings(max_examples=examples(300), deadline=None)
def test_any_right_text(theirs, hosts, ends):
    hosts = {host: slots for host, slots in hosts.items() if ".." not in host} or {"a": 1}
    text = "\n".join(
        f"{host} slots={slots}{ends[number % len(ends)]}"
        for number, (host, slots) in enumerate(hosts.items())
    )
    found = parse(text)
    assert found.errors == ()
    assert pairs(found) == list(hosts.items()) == theirs(text)


@pytest.mark.skipif(not REAL, reason="DSRUN_CORPUS names no folder with a hostfiles.json")
@pytest.mark.parametrize("case", REAL, ids=lambda case: case["file"])
def test_real_hostfiles(theirs, case):
    found = parse(case["text"])
    assert bool(found.errors) is not case["ds_accepts"]
    if case["ds_accepts"]:
        assert pairs(found) == theirs(case["text"])
        assert len(found.entries) == case["ds_pool_size"]
        assert sum(entry.slots for entry in found.entries) == case["ds_total_slots"]
    if not case["anonymised"]:
        assert ("H101" in rules(found, "warning")) is ("placeholder host names" in case["oddities"])
    assert ("H009" in rules(found, "error")) is ("duplicate hosts" in case["oddities"])


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("li@gpu01 slots=0", ["H011", "H010"]),
        ("gpu[1-3] slots=4 max_slots=2", ["H014", "H008"]),
        ("li@gpu01 slots=4x", ["H011", "H005"]),
        ("gpu01 slots=0 junk", ["H010"]),
    ],
)
def test_every_problem_of_a_line_is_reported(line, rules):
    assert [found.rule for found in hostfile.parse(line).errors] == rules
