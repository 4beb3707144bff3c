import pytest
import tensorflow as tf

from transformer_tf import devices
from transformer_tf.devices import choose_precision, choose_xla


@pytest.fixture
def no_gpu():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU; run where there is none")


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"avx2", "avx512f"}, "float32"),
        ({"avx512_bf16"}, "bfloat16"),
        ({"amx_bf16", "amx_tile"}, "bfloat16"),
        (set(), "float32"),
    ],
)
def test_precision_on_a_cpu_follows_its_instructions(
    no_gpu, monkeypatch, flags, expected
):
    monkeypatch.setattr(devices, "_cpu_flags", lambda: flags)
    assert choose_precision("auto") == expected


@pytest.mark.parametrize(
    "capabilities, expected",
    [([(9, 0)], "bfloat16"), ([(7, 5)], "float32"), ([(8, 0), (7, 0)], "float32")],
)
def test_precision_on_gpus_is_what_all_of_them_can(monkeypatch, capabilities, expected):
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: list(range(len(capabilities)))
    )
    monkeypatch.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda gpu: {"compute_capability": capabilities[gpu]},
    )
    assert choose_precision("auto") == expected
    assert choose_xla("auto") == "full"


def test_what_is_asked_for_is_done():
    assert choose_precision("float16") == "float16"
    assert choose_xla("full") == "full"


def test_xla_is_off_on_a_cpu(no_gpu):
    assert choose_xla("auto") == "off"
