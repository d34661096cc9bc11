from __future__ import annotations

import socket

import pytest

from dsrun.cluster import ports
from dsrun.errors import DsrunError


@pytest.fixture
def few_ports(monkeypatch):
    """A range of 200 ports, all of them taken; gives the sockets. Elsewhere than the real range."""
    for first in range(12000, 19000, 200):
        taken = []
        try:
            for port in range(first, first + 200):
                taken.append(socket.socket())
                taken[-1].bind(("127.0.0.1", port))
                taken[-1].listen()
        except OSError:
            for one in taken:
                one.close()
            continue
        monkeypatch.setattr(ports, "FIRST", first)
        monkeypatch.setattr(ports, "LAST", first + 200)
        yield taken
        for one in taken:
            one.close()
        return
    pytest.skip("no 200 free ports in a row")


def test_a_port_below_those_for_outgoing_connections():
    for _ in range(50):
        port = ports.free_port()
        assert ports.FIRST <= port < ports.LAST <= 32768
        with socket.socket() as probe:
            probe.bind(("", port))


def test_two_jobs_started_at_once_differ():
    assert len({ports.free_port() for _ in range(20)}) > 15


def test_ports_in_use_are_passed_over(few_ports):
    free = few_ports.pop(77)
    port = free.getsockname()[1]
    free.close()
    assert {ports.free_port() for _ in range(5)} == {port}


def test_no_port_is_left(few_ports):
    with pytest.raises(DsrunError, match=f"no free port between {ports.FIRST} and {ports.LAST}"):
        ports.free_port()
