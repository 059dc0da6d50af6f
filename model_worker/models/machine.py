"""What kernels' results depend on besides model and versions: the machine, and settings of the environment."""

import hashlib
import os
import platform
from pathlib import Path

import torch

KERNEL_SETTINGS = ("ATEN_", "CUBLAS_", "DNNL_", "MKL_", "NVIDIA_", "ONEDNN_")
CPU_INFO = Path("/proc/cpuinfo")
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def machine_facts(device: torch.device) -> dict[str, str]:
    """Fact to value, for people and for keys: two machines that differ in none of them compute alike with one torch."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(KERNEL_SETTINGS)}
    facts = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": str(os.cpu_count()),
        "caches": _caches(),
        "kernels": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "settings": " ".join(f"{name}={value}" for name, value in sorted(settings.items())),
    }
    return facts | (_gpu_facts(device) if device.type == "cuda" else {})


def _gpu_facts(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, capability {gpu.major}.{gpu.minor}",
        "cuda": f"{torch.version.cuda}, cudnn {torch.backends.cudnn.version()}",
    }


def _processor() -> str:
    """The processor's name, family, model and stepping as Linux tells them; elsewhere as Python does."""
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        pairs = [line.partition(":") for line in CPU_INFO.read_text().split("\n\n")[0].splitlines()]
    except OSError:
        return platform.processor()
    found = {name.strip(): value.strip() for name, _, value in pairs}
    return " / ".join(found[name] for name in wanted if name in found) or platform.processor()


def _caches() -> str:
    """Level, type and size of each cache of the first core; empty where the system does not tell."""
    found = []
    for folder in sorted(CPU_CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        found.append(f"L{level} {kind.lower()} {size}")
    return ", ".join(found)
