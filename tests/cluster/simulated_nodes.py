"""Script that holds a simulated cluster of three nodes until its standard input ends.

    python simulated_nodes.py

It prints the address of the cluster. For each line that it reads, it kills a node other than the
first, adds another and prints "replaced". Ray forks to start nodes, which a process whose JAX has
threads should not do.
"""

import sys

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

SMALL = {"num_cpus": 1, "object_store_memory": 100_000_000}
WORKER = {**SMALL, "resources": {"sampler": 1.0}}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**WORKER)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        cluster.add_node(**WORKER)
        sys.stdout.write("replaced\n")
        sys.stdout.flush()
    cluster.shutdown()
