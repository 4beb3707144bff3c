"""What the machine computes fast, and the settings that follow from it."""

import tensorflow as tf

CPU_BFLOAT16 = {"amx_bf16", "avx512_bf16"}  # instructions, as Linux names them


def choose_precision(precision: str) -> str:
    """ "auto" -> bfloat16 where every visible GPU (Ampere or later) or, without one,
    the CPU multiplies it faster than float32."""
    if precision != "auto":
        return precision
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "bfloat16" if CPU_BFLOAT16 & _cpu_flags() else "float32"
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    capable = [d.get("compute_capability", (0, 0)) >= (8, 0) for d in details]
    return "bfloat16" if all(capable) else "float32"


def choose_xla(xla: str) -> str:
    """ "auto" -> full on a GPU, where it joins the many small operations; off on a CPU,
    where it multiplies matrices more slowly than oneDNN."""
    if xla != "auto":
        return xla
    return "full" if tf.config.list_physical_devices("GPU") else "off"


def _cpu_flags() -> set[str]:
    """What the CPU says it can do; nothing where it cannot be asked (not Linux)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="ignore") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(flags.split())
