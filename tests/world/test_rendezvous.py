"""How ranks find rank 0."""

import os
import socket
import threading

import pytest

from toolkit.errors import ToolkitError
from toolkit.rundir.claims import claim_attempt
from toolkit.world.discover import discover
from toolkit.world.rendezvous import _listen, meet, open_store


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # meet() sets these where nobody has
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")


def world(rank, run=None, **more):
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TOOLKIT_LAUNCHER": "local"}
    return discover(ranks | ({"TOOLKIT_RUN_DIR": str(run.path)} if run else {}) | more)


def test_ranks_meet_at_the_socket_that_rank_0_keeps(run_directory):
    claim_attempt(run_directory)
    found = []
    waiting = threading.Thread(target=lambda: found.append(meet(world(1, run_directory))))
    waiting.start()
    mine = meet(world(0, run_directory))
    waiting.join(10)
    assert (found[0].host, found[0].port) == (mine.host, mine.port) == (mine.host, mine.listener.getsockname()[1])
    with socket.create_connection((found[0].host, found[0].port), timeout=5):
        mine.listener.close()
    assert mine.host == "127.0.0.1"  # one node: no other host can reach the store


def test_a_rank_0_that_never_comes_is_an_error_with_its_file(run_directory):
    claim_attempt(run_directory)
    with pytest.raises(ToolkitError, match="rank 0 did not write its address within 0 s") as error:
        meet(world(1, run_directory), timeout_s=0.2)
    assert error.value.where.endswith("rendezvous.json") and "share this folder" in error.value.fix


def test_an_older_attempts_address_is_not_taken(run_directory):
    claim_attempt(run_directory)
    claim_attempt(run_directory)
    meet(world(0, run_directory)).listener.close()
    with pytest.raises(ToolkitError, match="did not write"):
        meet(world(1, run_directory, TOOLKIT_ATTEMPT="1"), timeout_s=0.1)


def test_ranks_that_nothing_connects_are_told_how_to_start():
    with pytest.raises(ToolkitError, match="2 ranks have no means of finding rank 0") as error:
        meet(world(1))
    assert "toolkit run" in error.value.fix


def test_a_port_that_is_taken_is_one_line():
    endpoint = _listen("127.0.0.1")
    with pytest.raises(ToolkitError, match=r"cannot listen on 127\.0\.0\.1:.*in use") as error:
        _listen("127.0.0.1", endpoint.port)
    endpoint.listener.close()
    assert "free port" in error.value.fix


def test_gloo_and_nccl_stay_on_the_chosen_interface(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    alone = discover({})
    meet(alone).listener.close()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")  # of the site's [network] vars, or the user's
    meet(alone).listener.close()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0,ib1"


@pytest.mark.parametrize("secret", ["0f" * 16, ""])
def test_keys_of_the_store_begin_with_a_value_that_others_cannot_guess(monkeypatch, secret):
    import torch.distributed as dist

    monkeypatch.setenv("TOOLKIT_STORE_PREFIX", secret)
    endpoint = _listen("127.0.0.1")
    store = open_store(discover({"RANK": "0", "WORLD_SIZE": "1", "TOOLKIT_ATTEMPT": "3"}), endpoint)
    store.set("key", "value")
    stranger = dist.TCPStore("127.0.0.1", endpoint.port, is_master=False)
    assert stranger.check([f"{secret}/attempt-3/key" if secret else "attempt-3/key"])
    assert stranger.check(["attempt-3/key"]) == (not secret)
