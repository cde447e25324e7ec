"""Replicas as Ray actors, on as many machines as a cluster has. The extra `paceline[ray]`.

Ray places them and tells of their end; samples and answers take the same connection as those of
local replicas.
"""

import socket

from paceline.extract.vllm.replica import call_driver

# Ray learns of an end some seconds after the connection does.
_TOLD_TIMEOUT_S = 30.0


class RayHost:
    """An actor that serves the driver."""

    def __init__(self, actor: object, served: object, number: int, gpus: int) -> None:
        self._actor = actor
        self._served = served
        self._gpus = gpus
        self.name = f"vLLM worker {number} (Ray actor)"

    def needs(self) -> str:
        """Ray waits without a word for room, even for room that no node has."""
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        room = ", ".join(
            f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU")
        )
        wanted = f"{self._gpus} free GPUs and a free CPU" if self._gpus else "a free CPU"
        return f"a node with {wanted} (the cluster has {room} free)"

    def alive(self) -> bool:
        import ray

        return not ray.wait([self._served], timeout=0)[0]

    def fate(self) -> str:
        import ray

        try:
            ray.get(self._served, timeout=_TOLD_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            return "has no connection, and Ray does not know why"
        except ray.exceptions.RayError as error:
            return f"is gone: {error}"
        return "has ended"

    def end(self) -> None:
        import ray

        ray.kill(self._actor)
        # The call fails once the actor's process is gone; until then it might still publish.
        ray.wait([self._served], num_returns=1)


class _Actor:
    def serve(self, host: str, port: int, key: bytes, number: int) -> None:
        call_driver(host, port, key, number)


def connect(address: str) -> str:
    """Join the cluster; returns this machine's address as its nodes see it."""
    import ray

    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    return ray.util.get_node_ip_address()


def launch_ray(
    number: int, port: int, key: bytes, gpus: int, environment: dict[str, str]
) -> RayHost:
    """Start a replica where the cluster has room, spread over its nodes."""
    import ray

    host = ray.util.get_node_ip_address() or socket.gethostname()
    actor = (
        ray.remote(_Actor)
        .options(
            num_gpus=gpus,
            num_cpus=1,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )
        .remote()
    )
    return RayHost(actor, actor.serve.remote(host, port, key, number), number, gpus)
