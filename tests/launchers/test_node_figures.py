"""The rank program that measures nodes, in real ranks: two nodes of two ranks on this machine."""

import socket

import pytest

from launchers.base import Rendezvous
from launchers.megatron_core.launcher import MegatronCoreLauncher
from launchers.process import LaunchRequest, Limits, run_trial


def measured(tree, folder, ranks_per_node):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = Rendezvous("127.0.0.1", port, 4, 0, ranks_per_node)
    program = MegatronCoreLauncher.figures_program
    request = LaunchRequest(f"figures{ranks_per_node}", program, {"device": "cpu"}, rendezvous, (0, 1, 2, 3), folder, {})
    events = []
    end = list(run_trial(tree, request, Limits(150, 150, 150), on_event=events.append))[-1]
    assert set(end.exit_codes.values()) == {0}, end
    return [event for event in events if event["event"] == "figures"]


@pytest.mark.timeout(300)
def test_every_rank_measures_itself_and_its_links(open_tree, tmp_path):
    tree = open_tree(preload=MegatronCoreLauncher.preload)
    for ranks_per_node in (2, 4):
        found = measured(tree, tmp_path / str(ranks_per_node), ranks_per_node)
        assert {event["rank"] for event in found} == {0, 1, 2, 3}
        for event in found:
            assert 1e8 < event["gemm_flops_per_s"] < 1e13
            assert 1e7 < event["memory_bytes_per_s"] < 1e12
            assert event["inside_bytes_per_s"] > 0
            assert 1e-7 < event["inside_latency_s"] < 1
            assert (event["between_bytes_per_s"] is None) == (ranks_per_node == 4)
