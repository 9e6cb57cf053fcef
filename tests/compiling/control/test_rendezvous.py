"""How a process asks the others before a compile, where the thread that answers has failed, and in a fork."""

import logging
import os

import pytest
from torch import distributed

from hotloop.compiling.control import rendezvous
from hotloop.compiling.control.rendezvous import Rendezvous


class Patience:
    """Stands for that of the process: no collectives, so that everybody may compile."""

    def hold(self, who, settle=0.0):
        pass

    def drop(self, who):
        pass

    def counts(self):
        return {}

    def held_by(self, who):
        return False

    def needed(self):
        return True


class World:
    """What the processes' group is known by: an object that ends."""


@pytest.fixture
def two(monkeypatch):
    """Give two processes' parts, in one process, with one store between them."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worlds = []

    def make(rank):
        worlds.append(World())
        monkeypatch.setattr(distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(rendezvous, "store", lambda: store)
        return Rendezvous(worlds[-1])

    monkeypatch.setattr(rendezvous, "patience", Patience())
    made = [make(0), make(1)]
    yield made
    for one in reversed(made):
        one.close()


def ended(one):
    one._thread.join(300)
    assert not one._thread.is_alive()


def test_both_answer(two, monkeypatch):
    monkeypatch.setattr(Rendezvous, "_BEHIND_SECONDS", 300.0)
    assert [one.leave() for one in two] == ["", ""]


@pytest.mark.campaign
def test_a_thread_that_fails_says_so_and_the_others_are_told(two, monkeypatch, caplog):
    class Broken(Patience):
        def hold(self, who, settle=0.0):
            raise ValueError("no such group")

    first, second = two
    heard = second._heard
    monkeypatch.setattr(second, "_heard", lambda *message: Broken().hold("rank 0") or heard(*message))
    with caplog.at_level(logging.WARNING, "hotloop"):
        asked = first.leave()
        ended(second)
    told = "cannot be asked any more: ValueError: no such group"
    assert told in caplog.text
    assert asked in (f"rank 1 {told}", "another process did not answer in time")
    sent = []
    monkeypatch.setattr(first, "_send", lambda *message: sent.append(message))
    assert first.leave() == f"rank 1 {told}"
    assert not sent  # it is not asked again
    assert second.leave() == f"this process {told}"


def test_a_store_that_has_ended_is_the_end_of_the_run(two, monkeypatch, caplog):
    _, second = two

    def gone(*_):
        raise RuntimeError("Connection reset by peer")

    class Gone:
        set = add = gone

    monkeypatch.setattr(second, "_heard", lambda *_: (setattr(second, "_inbox", Gone()), gone()))
    with caplog.at_level(logging.WARNING, "hotloop"):
        two[0].leave()
        ended(second)
    assert second.leave() == ""
    assert not caplog.records


def test_a_fork_leaves_the_connections_of_its_parent_alone(two, monkeypatch):
    first, _ = two
    monkeypatch.setattr(Rendezvous, "_BEHIND_SECONDS", 300.0)
    monkeypatch.setattr(rendezvous.current, "rendezvous", first)
    monkeypatch.setattr(rendezvous.current, "follow", lambda: None)
    used = []

    class Noted:
        def __getattr__(self, name):
            used.append(name)
            raise AssertionError(name)

    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        first._store = first._inbox = Noted()
        try:
            os.write(
                writes, repr((rendezvous.current.leave(), rendezvous.current.compiled(), first.close(), used)).encode()
            )
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as said:
        assert said.read() == "('', None, None, [])"
    os.waitpid(child, 0)
    assert first.leave() == ""
