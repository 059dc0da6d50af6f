"""What a built worker can tell of itself without measuring."""

import platform
from collections.abc import Mapping
from importlib.metadata import version

from model_worker.engine.diagnosis import WorkerFacts
from model_worker.memory_plan import MemoryPlan, available_bytes
from model_worker.models.qualification import Qualification
from prefixcache.core.namespace import Namespace


def worker_facts(
    namespace: Namespace,
    plan: MemoryPlan,
    *,
    qualification: Qualification,
    machine: Mapping[str, str],
    startup_s: Mapping[str, float],
) -> WorkerFacts:
    """The facts of a worker of this plan, whose blocks have ``namespace`` in strict numerics."""
    return WorkerFacts(
        checks=qualification.checks,
        is_remembered=qualification.is_remembered,
        row_counts=qualification.row_counts,
        canary_digest=namespace.profile["canary"],
        memory_plan_bytes=plan.parts(),
        available_bytes=available_bytes(),
        versions=_versions(namespace),
        machine=dict(machine),
        startup_s=dict(startup_s),
    )


def _versions(namespace: Namespace) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": namespace.profile["torch"],
        "transformers": namespace.profile["transformers"],
        "prefixcache": version("prefixcache"),
        "grpc": version("grpcio"),
        "numerics": namespace.engine_version,
    }
