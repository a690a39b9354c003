"""The store in which ranks meet: who reaches it, and what becomes of what others write there."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from fppo.fleet.rank import Rank
from fppo.runtime import launch, stores
from fppo.runtime.failure import MONITOR, Limits, Monitor, not_done
from fppo.runtime.stores import listening, new_token, own_keys
from fppo.runtime.watch import Watch

WORLD = 3


def _addresses(port: int) -> set[str]:
    """The addresses at which something listens on a port of this machine, as the system writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {x[1].split(":")[0] for x in lines if x[3:4] == ["0A"] and x[1].endswith(f":{port:04X}")}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells who listens where")
def test_stores_listen_at_one_address():
    loopback = {"0100007F"}
    store, rank = listening(), Rank()
    assert _addresses(store.port) == loopback
    assert _addresses(rank.host("127.0.0.1")) == loopback
    assert _addresses(rank.host("198.51.100.1")) == {"00000000"}  # an address of documents, and of no machine
    store.set("a", "b")
    assert TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False).get("a") == b"b"


def test_keys_of_a_start_are_its_own(monkeypatch):
    store, tokens = HashStore(), [new_token(), new_token()]
    own_keys(store, tokens[0], attempt="1").set("error", "mine")
    assert not own_keys(store, tokens[1], attempt="1").check(["error"])
    assert not own_keys(store, tokens[0], attempt="2").check(["error"])
    assert not PrefixStore("attempt_1", store).check(["error"])
    monkeypatch.setenv("FPPO_STORE_TOKEN", tokens[0])
    assert own_keys(store, attempt="1").get("error") == b"mine"


@pytest.mark.parametrize("chosen", [None, "", "eth7"])
@pytest.mark.parametrize("names", [["lo", "eth7"], ["eth7"]])
def test_ranks_of_one_machine_meet_on_its_loopback_unless_the_user_has_chosen(chosen, names, monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    expected = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names and not chosen else {}
    assert stores.loopback_only() == expected


def _monitors(store=None):
    watch = Watch({})
    return [Monitor(store or listening(), rank, WORLD, watch, Limits()) for rank in range(WORLD)]


@pytest.mark.parametrize("standing", ["", "{", "[1]", '{"beat": 1}', "null"])
def test_a_standing_that_no_rank_has_written_is_none(standing):
    store = listening()
    store.set("stand/1", standing)
    assert _monitors(store)[0]._standings(Watch({})) == dict.fromkeys(range(WORLD))


def test_ranks_that_end_before_their_work_is_done_have_failed(monkeypatch, capsys):
    store = HashStore()
    PrefixStore(MONITOR, store).set("done/1", "")
    assert not_done(store, range(WORLD)) == [0, 2]
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert launch.start(["train"], 2) == 1
    assert "rank 0, 1 ended with the status 0 before its work was done" in capsys.readouterr().err
