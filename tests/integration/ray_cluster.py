"""A Ray cluster of several nodes on this machine, in a process of its own: argv = one JSON object of `add_node` options per node.

Prints its address, then answers lines on stdin: `nodes` with the number of living nodes, `remove N` after node N has died,
`lose ID` after the node with that id in Ray has.
The end of stdin ends the cluster.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.cluster_utils import Cluster


def main():
    head, *others = [json.loads(text) for text in sys.argv[1:]]
    options = {"object_store_memory": 100 * 1024 * 1024, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**options, **head})
    nodes = [cluster.head_node, *(cluster.add_node(**{**options, **other}) for other in others)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error", namespace="watcher")
    print(cluster.address, flush=True)
    for line in sys.stdin:
        verb, *number = line.split()
        if verb == "remove":
            cluster.remove_node(nodes[int(number[0])], allow_graceful=False)
        if verb == "lose":
            cluster.remove_node(next(node for node in nodes if node.node_id == number[0]), allow_graceful=False)
        print(sum(node["Alive"] for node in ray.nodes()), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
