"""Environment variables of the processes that Ray starts."""

from collections.abc import Mapping

from opdkit.protocols.config import PlacementSection

MAX_MESSAGE_BYTES = 1 << 30
"""Of one Serve message: the scores of a long sequence over a full vocabulary are the largest."""

CLUSTER_ENVIRONMENT: Mapping[str, str] = {
    # Handles, routers and replicas on one loop each, with gRPC between them: a third of the
    # processor time of a call, and streams with back-pressure. 4 MiB is gRPC's own limit.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_MESSAGE_BYTES),
    # The mode above also opens an HTTP port on each replica, which nobody uses here, and then keeps
    # every replica that is to go for half a minute.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # A thread that has crashed worker processes at their start.
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""For every process of the cluster and the driver: set before Ray is imported or started."""


def engine_environment(placement: PlacementSection, *, is_eager: bool) -> dict[str, str]:
    """Return the variables of a process that holds a vLLM engine, on top of the cluster's.

    Args:
        placement: whether it has a GPU, and how many threads.
        is_eager: the model itself is not compiled.
    """
    environment = {
        # The worker in the engine's own process: half the start-up time, and no spinning.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        # More threads than cores make everything many times slower; waiting ones must not spin.
        "OMP_NUM_THREADS": str(placement.num_threads),
        "OMP_WAIT_POLICY": "passive",
    }
    if is_eager and not placement.num_gpus:
        # The sampler compiles one line of arithmetic all the same: 30 s before the first token.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment
