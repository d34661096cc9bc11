"""How coordinator and host agents talk: over real pipes and real connections."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import until

from dsrun.jobs.supervision import protocol


@pytest.fixture
def pipes():
    """(a connection, what it reads from, what it writes to): its other side are bare handles."""
    far_read, write = os.pipe()
    read, far_write = os.pipe()
    connection = protocol.Connection(read, write)
    yield connection, far_write, far_read
    connection.close()
    for handle in (far_write, far_read):
        with contextlib.suppress(OSError):
            os.close(handle)


@pytest.fixture
def both():
    """Two connections, each other's other side."""
    one, two = socket.socketpair()
    connections = [protocol.Connection(end.fileno(), end.fileno(), owner=end) for end in (one, two)]
    yield connections
    for connection in connections:
        connection.close()


def test_objects_arrive_as_they_were(both):
    one, two = both
    said = {"名": "值\n", "surrogate": os.fsdecode(b"\xff"), "list": [1, None, 2.5]}
    one.send(said=said)
    assert two.receive(1) == [{"said": said}]
    assert two.receive() == []


def test_half_lines_wait_for_the_rest(pipes):
    connection, write, _ = pipes
    text = json.dumps({"a": "中"}, ensure_ascii=False).encode() + b"\n" + b'{"b": 2}\n{"c"'
    for byte in text:
        os.write(write, bytes([byte]))
        connection.receive() if byte == 0xE4 else None
    assert connection.receive() == [{"a": "中"}, {"b": 2}]
    os.write(write, b": 3}\n")
    assert connection.receive() == [{"c": 3}]


def test_what_a_login_shell_prints_is_noise(pipes):
    connection, write, _ = pipes
    noise = [b"Welcome!", b"", b"{", b"[1]", b"3", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b"\0"]
    text = b"\n".join([*noise, b'{"real": 1}', b""])
    thread = threading.Thread(target=os.write, args=(write, text))
    thread.start()
    assert until(lambda: connection.receive(0.1), "the message") == [{"real": 1}]
    thread.join()
    assert not connection.closed


def test_a_line_without_an_end_is_nobodys(both):
    one, two = both

    def talk() -> None:
        while not one.closed and not two.closed:
            try:
                os.write(one.fileno(), b"x" * 65536)
            except OSError:
                time.sleep(0.001)

    thread = threading.Thread(target=talk)
    thread.start()
    until(lambda: two.receive(0.1) or two.closed, "it is closed")
    assert two.closed
    thread.join()


def test_who_never_stops_talking_keeps_nobody_waiting(tmp_path):
    with Path("/dev/zero").open("rb") as endless, (tmp_path / "sink").open("wb") as sink:
        connection = protocol.Connection(os.dup(endless.fileno()), os.dup(sink.fileno()))
        connection.receive(0.1)  # comes back
        connection.close()


def test_what_was_said_before_the_end_is_heard(pipes):
    connection, write, read = pipes
    os.write(write, b'{"exit": 1}\n')
    os.close(write)
    os.close(read)
    connection.send(heartbeat=True)  # fails, as nobody reads
    assert not connection.closed
    assert connection.receive() == [{"exit": 1}]
    assert connection.closed
    assert connection.lost
    assert connection.receive(1) == []
    connection.send(more=1)


def test_nobody_reads_any_more(pipes):
    connection, _, read = pipes
    os.close(read)
    connection.send(heartbeat=True)
    connection.receive()
    assert connection.closed


def test_a_reader_that_stops_is_given_up(both, monkeypatch):
    monkeypatch.setattr(protocol, "SEND_S", 0.3)
    one, _ = both
    one.send(much="x" * (8 << 20))  # comes back
    assert one.closed


def test_a_slow_reader_gets_it_all(both):
    one, two = both
    thread = threading.Thread(target=one.send, kwargs={"much": "x" * (2 << 20)})
    thread.start()
    found = []
    while not found:
        time.sleep(0.01)
        found += two.receive()
    thread.join()
    assert len(found[0]["much"]) == 2 << 20


def test_two_threads_do_not_mix_their_lines(both):
    one, two = both
    texts = ["a" * 300_000, "b" * 300_000]
    threads = [threading.Thread(target=one.send, kwargs={"text": text}) for text in texts]
    for thread in threads:
        thread.start()
    found = []
    while len(found) < 2:
        found += two.receive(0.1)
    assert sorted(message["text"] for message in found) == texts


SILENCE_S = 20.0


@pytest.fixture
def later(monkeypatch):
    """`later(seconds)`: so much time has passed, for the protocol's clock."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(protocol, "time", clock)

    def pass_by(seconds: float) -> None:
        passed[0] += seconds

    return pass_by


@pytest.mark.parametrize("remote", [True, False])
def test_silence(pipes, later, remote):
    connection, write, _ = pipes
    connection.remote, connection.silence_s = remote, SILENCE_S
    later(SILENCE_S + 1)
    assert not connection.lost  # it has never said anything: it may still be starting
    os.write(write, b'{"heartbeat": true}\n')
    assert connection.receive() == []
    assert not connection.lost
    later(SILENCE_S + 1)
    assert connection.lost == remote
    assert not connection.closed


def test_a_silence_is_borne_longer_while_its_work_goes_on(pipes, later):
    connection, write, _ = pipes
    connection.silence_s = SILENCE_S
    os.write(write, b'{"heartbeat": true}\n')
    connection.receive()
    for _ in range(protocol.PATIENCE):
        connection.moved_at = protocol.time.monotonic()
        assert not connection.lost
        later(SILENCE_S - 1)
    assert not connection.lost
    connection.moved_at = protocol.time.monotonic()
    later(protocol.PATIENCE + 1)
    assert connection.lost, "not for ever"


def test_a_silence_is_not_borne_once_the_work_stands_still(pipes, later):
    connection, write, _ = pipes
    connection.silence_s = SILENCE_S
    os.write(write, b'{"heartbeat": true}\n')
    connection.receive()
    later(1)
    connection.moved_at = protocol.time.monotonic()
    later(SILENCE_S + 1)
    assert connection.lost


def test_silence_from_the_very_beginning(pipes, later):
    later(protocol.START_S + 1)
    assert pipes[0].lost


@pytest.mark.parametrize("remote", [True, False])
def test_one_who_sleeps_is_not_lost_and_hears_no_heartbeats(both, later, remote):
    one, two = both
    two.remote, two.silence_s = remote, SILENCE_S
    one.send(asleep=True)
    assert two.receive(1) == []
    later(SILENCE_S + 1)
    assert not two.lost
    two.heartbeat()
    assert one.receive() == []
    with pytest.raises(BlockingIOError):
        os.read(one.fileno(), 1)
    one.awake()
    assert not one.lost
    one.send(asleep=False)
    two.receive(1)
    assert not two.lost
    later(SILENCE_S + 1)
    assert two.lost == remote  # as it was before


def test_an_answer_is_waited_for_and_what_follows_is_kept(both):
    one, two = both
    for name in ("a", "b", "c", "d"):
        one.send(**{name: 1})
    assert two.expect("b", 1) == {"b": 1}
    assert two.receive() == [{"c": 1}, {"d": 1}]
    assert two.expect("z", 0.2) is None
    one.send(z=1)
    one.close()
    assert two.expect("z", 1) == {"z": 1}  # it hung up right afterwards
    assert two.expect("z", 1e9) is None  # nobody waits for one that has hung up


def test_handles_beyond_the_first_thousand():
    """select.select refuses those; a coordinator of a thousand hosts has them."""
    import fcntl
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2000:
        if hard != resource.RLIM_INFINITY and hard < 2000:
            pytest.skip("so many handles are not allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    try:
        read, write = os.pipe()
        high = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 1500) for handle in (read, write)]
        connection = protocol.Connection(*high)
        assert connection.receive(0.01) == []
        connection.send(text="x" * 30_000)
        assert len(connection.receive(1)) == 1
        connection.close()
        os.close(read)
        os.close(write)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_hanging_up_twice_closes_nobody_elses_handle(pipes):
    connection, _, _ = pipes
    connection.close()
    others = os.pipe()  # takes the numbers that are free again
    connection.close()
    for handle in others:
        os.close(handle)


# Over TCP


@pytest.fixture
def listener():
    found = protocol.Listener("a token")
    yield found
    found.close()


def called(listener, token="a token", addresses=("127.0.0.1",), port=None):
    """(what the coordinator has, what the agent has) after a call."""
    found = []
    thread = threading.Thread(
        target=lambda: found.append(protocol.call(addresses, port or listener.port, token))
    )
    thread.start()
    heard = None
    while thread.is_alive():
        heard = heard or listener.accept()
        time.sleep(0.005)
    return heard or listener.accept(), found[0]


def test_both_prove_themselves_and_talk(listener):
    coordinator, agent = called(listener)
    agent.send(node=3)
    assert coordinator.expect("node", 1) == {"node": 3}
    coordinator.send(bye=True)
    assert agent.receive(1) == [{"bye": True}]
    coordinator.close()
    agent.close()


def test_the_address_that_answers_is_taken(listener):
    coordinator, agent = called(listener, addresses=("256.0.0.1", "127.0.0.1"))
    assert coordinator
    assert agent
    coordinator.close()
    agent.close()


def test_an_agent_with_another_token_is_refused(listener):
    coordinator, agent = called(listener, token="another")
    assert (coordinator, agent) == (None, None)


def test_a_coordinator_that_does_not_know_the_token_is_none():
    """Somebody listens where the coordinator was, and says yes to everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b'{"nonce": "1"}\n')
                said = json.loads(connection.recv(4096).split(b"\n")[0])
                assert "token" not in json.dumps(said)
                connection.sendall(
                    json.dumps({"proof": said["proof"]}).encode() + b"\n"
                )  # its own, sent back
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        assert protocol.call(["127.0.0.1"], server.getsockname()[1], "a token") is None
        thread.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b'{"proof": "\xc3\xa9"}\n', b'{"proof": null}\n',
                                  b'{"nonce": 1}\n', b"\xff" * 70_000])  # fmt: skip
def test_strangers_are_sent_away_and_keep_nobody_waiting(listener, later, said):
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(said)
    assert listener.accept() is None
    coordinator, agent = called(listener)
    assert coordinator
    assert agent
    later(protocol.CONNECT_S + 1)
    assert listener.accept() is None
    for stranger in strangers:
        stranger.settimeout(60)
        with pytest.raises((ConnectionError, StopIteration)):
            while stranger.recv(1 << 16):
                pass
            raise StopIteration
        stranger.close()
    coordinator.close()
    agent.close()


def test_many_call_at_once(listener):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(protocol.call(["127.0.0.1"], listener.port, "a token")))
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    coordinators = []
    while any(thread.is_alive() for thread in threads):
        while coordinator := listener.accept():
            coordinators.append(coordinator)
        time.sleep(0.01)
    while coordinator := listener.accept():
        coordinators.append(coordinator)
    assert len(coordinators) == 100
    assert all(found)
    for connection in (*coordinators, *found):
        connection.close()


def test_this_machines_addresses():
    addresses = protocol.own_addresses()
    assert addresses[-1] in ("127.0.0.1", "::1")
    assert protocol.own_addresses("lo")[0] in ("127.0.0.1", "::1")
    assert protocol.interface_of("127.0.0.1") == "lo"
    assert protocol.interface_of("192.0.2.1") is None
    assert not any(address.startswith("fe80") for address in addresses)
