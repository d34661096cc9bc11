from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needed import since
from running import examples

from dsrun.cluster.hostfile import HostSlots
from dsrun.cluster.selection import select
from dsrun.errors import DsrunError

HOSTS = (HostSlots("w1", 4, 1), HostSlots("w2", 4, 2), HostSlots("gpu3", 2, 3))
ONE = HOSTS[:1]
V6 = (HostSlots("fe80::1", 2, 1), HostSlots("fe80::2", 2, 2))
ALL = (("w1", (0, 1, 2, 3)), ("w2", (0, 1, 2, 3)), ("gpu3", (0, 1)))


@pytest.fixture(scope="module")
def theirs():
    """DeepSpeed's own choice: hosts and slots, or None where it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        runner = pytest.importorskip("deepspeed.launcher.runner")
    runner.logger.disabled = True

    def chosen(entries, include=None, exclude=None):
        pool = {entry.host: entry.slots for entry in entries}
        try:
            found = runner.parse_inclusion_exclusion(pool, include or "", exclude or "")
        except ValueError:
            return None
        return tuple((host, tuple(slots)) for host, slots in found.items())

    yield chosen
    runner.logger.disabled = False


FILTERS = [
    ({}, ALL),
    ({"include": "w1"}, (("w1", (0, 1, 2, 3)),)),
    ({"include": "w2:0,2@w1"}, (("w1", (0, 1, 2, 3)), ("w2", (0, 2)))),
    ({"include": "w2:3,1"}, (("w2", (1, 3)),)),
    ({"include": "w1:0@w1:2"}, (("w1", (0, 2)),)),
    ({"exclude": "w1"}, (("w2", (0, 1, 2, 3)), ("gpu3", (0, 1)))),
    ({"exclude": "w1:0@w2@gpu3:1"}, (("w1", (1, 2, 3)), ("gpu3", (0,)))),
    ({"exclude": "w1:0,1,2,3"}, (("w2", (0, 1, 2, 3)), ("gpu3", (0, 1)))),
]


@since(deepspeed="0.19.7")  # before, a host without slots gives none
@pytest.mark.parametrize(("options", "hosts"), FILTERS, ids=str)
def test_filters(theirs, options, hosts):
    assert select(HOSTS, **options).hosts == hosts == theirs(HOSTS, **options)


@pytest.mark.parametrize(
    ("entries", "options", "hosts"),
    [
        (HOSTS, {"devices": "w1:0-2,w2:all"}, (("w1", (0, 1, 2)), ("w2", (0, 1, 2, 3)))),
        (HOSTS, {"devices": "w1:0,2-3,gpu3:1"}, (("w1", (0, 2, 3)), ("gpu3", (1,)))),
        (HOSTS, {"devices": " w1:0 , 1 "}, (("w1", (0, 1)),)),
        (ONE, {"devices": "2,3"}, (("w1", (2, 3)),)),
        (ONE, {"devices": "3,1"}, (("w1", (3, 1)),)),
        (HOSTS, {"devices": "w2:0,w1:3,1-2"}, (("w2", (0,)), ("w1", (3, 1, 2)))),
        (ONE, {"devices": "all"}, (("w1", (0, 1, 2, 3)),)),
        (V6, {"devices": "fe80::1:1,fe80::2:all"}, (("fe80::1", (1,)), ("fe80::2", (0, 1)))),
        (V6, {"include": "fe80::2"}, (("fe80::2", (0, 1)),)),
        (V6, {"exclude": "fe80::2:0"}, (("fe80::1", (0, 1)), ("fe80::2", (1,)))),
        (HOSTS, {"gpus": 2}, (("w1", (0, 1)), ("w2", (0, 1)), ("gpu3", (0, 1)))),
        (HOSTS, {"nodes": 2}, ALL[:2]),
        (HOSTS, {"nodes": 2, "gpus": 3}, (("w1", (0, 1, 2)), ("w2", (0, 1, 2)))),
    ],
    ids=str,
)
def test_devices_and_counts(entries, options, hosts):
    assert select(entries, **options).hosts == hosts


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"include": "w1", "exclude": "w2"}, "--include w1 and --exclude w2"),
        ({"include": "w1", "gpus": 2}, "--include w1 and --gpus 2"),
        ({"exclude": "w1", "nodes": 2}, "--exclude w1 and --nodes 2"),
        ({"devices": "w1:0", "gpus": 1, "nodes": 1}, "--devices w1:0 and --gpus 1 and --nodes 1"),
        ({"include": "w9"}, "'w9'"),
        ({"include": "gpu-3"}, "'gpu3'"),
        ({"include": "w1:4"}, "slot 4"),
        ({"exclude": "w1:0,7,9"}, "slot 7,9"),
        ({"include": "w1:a"}, "'a'"),
        ({"include": "w1:0-1"}, "--devices"),
        ({"include": "w1:"}, "''"),
        ({"include": "w1:-1"}, "'-1'"),
        ({"include": "w1:" + "9" * 5000}, "..."),
        ({"include": ""}, "missing"),
        ({"include": "w1@"}, "missing"),
        ({"include": "w1,w2"}, "'w1,w2'"),
        ({"include": "w1:0,0"}, "w1:0"),
        ({"include": "w1:0@w1:0,1"}, "w1:0"),
        ({"include": "w1@w1"}, "w1"),
        ({"include": "w1@w1:1"}, "w1"),
        ({"exclude": "w1:1@w1"}, "w1"),
        ({"exclude": "w1@w2@gpu3"}, "w1, w2, gpu3"),
        ({"devices": "2,3"}, "'2'"),
        ({"devices": "all"}, "'all'"),
        ({"devices": "w1"}, "w1:all"),
        ({"devices": "w1:0,w2"}, "w2:all"),
        ({"devices": "w1:all,0"}, "w1:0"),
        ({"devices": "w1:0,w1:1"}, "w1"),
        ({"devices": "w1:2-1"}, "1-2"),
        ({"devices": "w1:2-9"}, "slot 4,5,6,7,8,9"),
        ({"devices": "w1:0-" + "9" * 5000}, "no device"),
        ({"devices": "w1:x"}, "'x'"),
        ({"devices": "w1:"}, "''"),
        ({"devices": ""}, "3 hosts"),
        ({"devices": "w9:0"}, "'w9'"),
        ({"gpus": 3}, "gpu3"),
        ({"gpus": 0}, "--gpus 0"),
        ({"nodes": 4}, "--nodes 4"),
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": -1}, "--nodes -1"),
    ],
    ids=str,
)
def test_what_is_refused(options, named):
    with pytest.raises(DsrunError) as raised:
        select(HOSTS, **options)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, ["gpu3", "w1", "w2"]),
        ({"nodes": 1}, ["w1"]),
        ({"exclude": "w1:0@gpu3"}, ["w1", "w2"]),
        ({"include": "w1:0@w2"}, ["w2"]),
        ({"devices": "w1:all,w2:0-3"}, ["w1"]),
    ],
    ids=str,
)
def test_hosts_of_which_no_slot_is_named(options, whole):
    assert sorted(select(HOSTS, **options).whole) == whole


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"include": "w9"}, "--hosts"),
        ({"nodes": 9}, "--hosts has"),
        ({"devices": "w1:9"}, "--hosts"),
    ],
    ids=str,
)
def test_the_source_of_the_hosts_is_printed(options, named):
    with pytest.raises(DsrunError) as raised:
        select(HOSTS, **options, source="--hosts")
    assert named in str(raised.value)


def test_all_problems_at_once():
    with pytest.raises(DsrunError) as raised:
        select(HOSTS, include="w9@w1:7@w2:x")
    assert len(raised.value.problems) == 3


def test_no_host():
    with pytest.raises(DsrunError, match="no host to choose from"):
        select(())


def test_a_host_twice():
    with pytest.raises(DsrunError, match="w1"):
        select((*HOSTS, HostSlots("w1", 1, 4)))


def test_ranks():
    chosen = select(HOSTS, include="gpu3@w1:2,3")
    assert chosen.hosts == (("w1", (2, 3)), ("gpu3", (0, 1)))
    assert select(HOSTS, include=include(chosen)) == chosen


def include(chosen):
    """The --include that gives exactly these devices."""
    return "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in chosen.hosts)


SLOTS = st.lists(st.sampled_from(["0", "1", "2", "3", "01"]), min_size=1, max_size=3, unique=True)
ODD_SLOTS = st.lists(st.sampled_from(["0", "1", "4", "", "x", "-1", " 1"]), max_size=4)
NODE = st.builds(
    lambda host, slots: host if slots is None else f"{host}:{','.join(slots)}",
    st.sampled_from(["w1", "w2", "gpu3"]) | st.sampled_from(["w1", "w2", "gpu3", "w9", ""]),
    st.none() | SLOTS | SLOTS | ODD_SLOTS,
)
FILTER = st.lists(NODE, min_size=1, max_size=3).map("@".join) | st.text(
    st.sampled_from("w12:,@0 3"), max_size=12
)


@since(deepspeed="0.19.7")
@given(FILTER.filter(bool), st.sampled_from(["include", "exclude"]))
@settings(max_examples=examples(1500), deadline=None)
def test_any_filter(theirs, text, option):
    try:
        chosen = select(HOSTS, **{option: text})
    except DsrunError:
        return
    known = theirs(HOSTS, **{option: text})
    if known is not None:
        assert chosen.hosts == known
    # What is handed on to DeepSpeed gives the same.
    assert theirs(HOSTS, include=include(chosen)) == ordered(chosen.hosts)


def ordered(hosts):
    """Devices in DeepSpeed's order: hosts as in the hostfile, slots ascending."""
    return tuple((host, tuple(sorted(dict(hosts)[host]))) for host, _ in ALL if host in dict(hosts))


CHOICES = st.dictionaries(
    st.sampled_from(["w1", "w2", "gpu3"]),
    st.sets(st.sampled_from([0, 1]) | st.sampled_from([0, 1, 2, 3])),
    min_size=1,
)


@since(deepspeed="0.19.7")
@given(CHOICES, st.sampled_from(["include", "exclude"]), st.randoms())
@settings(max_examples=examples(300), deadline=None)
def test_any_right_filter(theirs, wanted, option, random):
    """Hosts and slots in any order; all of a host where no slot is drawn."""
    wanted = {host: [slot for slot in slots if slot < len(dict(ALL)[host])] for host, slots in wanted.items()}
    for slots in wanted.values():
        random.shuffle(slots)
    nodes = [f"{host}:{','.join(map(str, slots))}" if slots else host for host, slots in wanted.items()]
    text = "@".join(nodes)
    known = theirs(HOSTS, **{option: text})
    if known:
        assert select(HOSTS, **{option: text}).hosts == known
    else:
        with pytest.raises(DsrunError, match="leaves no device"):
            select(HOSTS, **{option: text})


@given(CHOICES, st.randoms())
@settings(max_examples=examples(100), deadline=None)
def test_any_right_devices(wanted, random):
    """Hosts and slots in any order, which is kept."""
    hosts = [(host, list(set(slots) & wanted[host]) or list(slots)) for host, slots in ALL if host in wanted]
    random.shuffle(hosts)
    for _, slots in hosts:
        random.shuffle(slots)
    hosts = tuple((host, tuple(slots)) for host, slots in hosts)
    text = ",".join(f"{host}:{','.join(map(str, slots))}" for host, slots in hosts)
    assert select(HOSTS, devices=text).hosts == hosts


@given(st.text(st.sampled_from("w12:,-0all3"), max_size=16) | st.text(max_size=8))
@settings(max_examples=examples(500), deadline=None)
def test_any_devices(theirs, text):
    try:
        chosen = select(HOSTS, devices=text)
    except DsrunError:
        return
    assert theirs(HOSTS, include=include(chosen)) == ordered(chosen.hosts)
