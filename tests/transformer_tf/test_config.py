import pytest

from transformer_tf.config import (
    PRESETS,
    ConfigError,
    DecodingConfig,
    ModelConfig,
    TrainingConfig,
    chosen,
)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (ModelConfig, "num_heads", 3),
        (ModelConfig, "num_heads", 0),
        (ModelConfig, "dropout_rate", 1.0),
        (ModelConfig, "dropout_rate", -0.1),
        (ModelConfig, "num_layers", 0),
        (ModelConfig, "vocab_size", 10**9),
        (ModelConfig, "positions", "rotary"),
        (TrainingConfig, "batch_tokens", 0),
        (TrainingConfig, "accumulation", 0),
        (TrainingConfig, "label_smoothing", 1.0),
        (TrainingConfig, "precision", "int8"),
        (TrainingConfig, "average_checkpoints", 6),
        (DecodingConfig, "beam_size", 9),
        (DecodingConfig, "length_penalty", float("nan")),
    ],
)
def test_a_wrong_value_is_refused_and_named(config, field, value):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}, expected "):
        config(**{field: value})


def test_base_and_big_are_the_papers():
    def sizes(name):
        model = PRESETS[name].model
        return (
            model.num_layers,
            model.d_model,
            model.d_ff,
            model.num_heads,
            model.dropout_rate,
            PRESETS[name].training.max_steps,
        )

    assert sizes("base") == (6, 512, 2048, 8, 0.1, 100_000)
    assert sizes("big") == (6, 1024, 4096, 16, 0.3, 300_000)
    for name in ("base", "big"):
        training = PRESETS[name].training
        assert (training.batch_tokens, training.warmup_steps) == (25_000, 4000)
        assert (training.label_smoothing, training.learning_rate_scale) == (0.1, 1.0)


@pytest.mark.parametrize("value", [-1, 0, 4])
def test_what_is_counted_from_1_is_there_or_refused(value):
    assert [chosen("layer", n, 3) for n in (1, 2, 3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match=f"^--layer is {value}, expected 1 to 3$"):
        chosen("layer", value, 3)
