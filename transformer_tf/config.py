"""What size, how long: every number that a user may set, and the named presets.

One name for field = flag = key of the configuration file. Values are checked here, so
that a wrong one is refused before anything is allocated. Numbers of the paper that
nobody sets are here too: the code that acts and the report of `paper.py` read the same.
"""

from dataclasses import dataclass, field

PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3
MAX_BEAM_SIZE = 8
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
STRATEGIES = ("auto", "none", "mirrored", "multi_worker")

# Added to the score of a position that may not be looked at (3.2.3). exp(-1e9) is
# exactly 0 in float32, and a row with nothing to look at becomes uniform instead of
# NaN, which minus infinity would give.
MASKED_SCORE = -1e9
LAYERNORM_EPSILON = 1e-6  # of the paper's code
POSITION_BASE = 10_000  # wavelengths go from 2 pi to this many times as much (3.5)
ADAM = dict(beta_1=0.9, beta_2=0.98, epsilon=1e-9)  # 5.3
GNMT_OFFSET = 5.0  # k of the length penalty ((k + n) / (k + 1)) ** alpha (6.1)


def embedding_stddev(d_model: int) -> float:
    """Of a new embedding: times sqrt(d_model), as on the way in (3.4), it is 1."""
    return d_model**-0.5


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the field and its bounds."""

    exit_code = 2


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")


def _check_range(config: object, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    _check(low <= value <= high, name, value, f"a number from {low} to {high}")


def _check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    _check(value in choices, name, value, "one of " + ", ".join(choices))


def chosen(name: str, value: int, count: int) -> int:
    """The place, from 0, of what a flag counts from 1: a layer, a head, a token.

    Raises:
        ConfigError: there are only `count` of them.
    """
    if not 1 <= value <= count:
        raise ConfigError(f"--{name} is {value}, expected 1 to {count}")
    return value - 1


@dataclass(frozen=True)
class ModelConfig:
    """The size of the mountain (paper, Table 3)."""

    vocab_size: int = 8000  # pieces asked of the joint vocabulary (3.4)
    num_layers: int = 4  # N: stations in the encoder, and again in the decoder (3.1)
    d_model: int = 256  # width of a token's vector (3.1)
    num_heads: int = 4  # h: heads that share d_model between them (3.2.2)
    d_ff: int = 1024  # inner width of the feed-forward network (3.3)
    dropout_rate: float = 0.1  # P_drop, on sub-layer outputs and embeddings (5.4)
    positions: str = "sinusoidal"  # "sinusoidal" (3.5) or "learned" (Table 3, row E)
    projection_gain: float = 1.0  # of Glorot's, at the start; README says why not 1
    max_length: int = 256  # longest source or target in tokens, end token included

    def __post_init__(self) -> None:
        # The upper bounds keep a typing slip in a file from asking for terabytes.
        _check_range(self, "vocab_size", 300, 256_000)
        _check_range(self, "num_layers", 1, 64)
        _check_range(self, "d_model", 2, 8192)
        _check_range(self, "num_heads", 1, 256)
        _check_range(self, "d_ff", 1, 65_536)
        _check_range(self, "max_length", 8, 4096)
        _check_range(self, "projection_gain", 0.01, 10)
        check_heads(self.d_model, self.num_heads)
        check_dropout(self.dropout_rate)
        _check_choice(self, "positions", ("sinusoidal", "learned"))
        _check(self.d_model % 2 == 0, "d_model", self.d_model, "an even number")


def check_heads(d_model: int, num_heads: int) -> None:
    """Raises ConfigError unless the heads share d_model evenly (3.2.2)."""
    _check(
        num_heads > 0 and d_model % num_heads == 0,
        "num_heads",
        num_heads,
        f"a divisor of d_model = {d_model}",
    )


def check_dropout(dropout_rate: float) -> None:
    """Raises ConfigError unless 0 <= dropout_rate < 1."""
    _check(0 <= dropout_rate < 1, "dropout_rate", dropout_rate, "0 <= dropout_rate < 1")


@dataclass(frozen=True)
class TrainingConfig:
    """How it learns (paper, section 5)."""

    batch_tokens: int = 25_000  # target tokens of one update, padding included (5.1)
    accumulation: int = 1  # parts an update is computed in, to need less memory
    max_steps: int = 100_000  # updates until the end (5.2)
    max_minutes: float = 0.0  # end earlier after this time, 0 = no limit
    warmup_steps: int = 4000  # updates with a rising learning rate (5.3)
    learning_rate_scale: float = 1.0  # factor on the paper's rate, 1 = the paper (5.3)
    label_smoothing: float = 0.1  # epsilon_ls (5.4)
    precision: str = "auto"  # float32, bfloat16, float16; auto: bfloat16 if it is fast
    xla: str = "auto"  # off, full: compile the step for each shape; auto: full on a GPU
    strategy: str = "auto"  # none, mirrored (GPUs of a machine), multi_worker (several)
    seed: int = 1  # of weights, dropout and data order
    log_every: int = 50  # updates between two lines of the log
    validate_every: int = 1000  # updates between two validations
    checkpoint_every: int = 500  # updates between two checkpoints
    keep_checkpoints: int = 5  # newest checkpoints that stay on disk
    average_checkpoints: int = 5  # newest checkpoints averaged for the export (6.1)
    patience: int = 0  # validations without a better loss before stopping, 0 = never
    validation_sentences: int = 200  # sentences translated for BLEU at a validation

    def __post_init__(self) -> None:
        _check_range(self, "batch_tokens", 16, 10_000_000)
        _check_range(self, "accumulation", 1, self.batch_tokens // 16)
        for name in ("max_steps", "warmup_steps", "log_every", "validate_every"):
            _check_range(self, name, 1, 100_000_000)
        _check_range(self, "checkpoint_every", 1, 100_000_000)
        _check_range(self, "max_minutes", 0, 1_000_000)
        _check_range(self, "learning_rate_scale", 1e-6, 1000)
        _check_range(self, "label_smoothing", 0, 0.99)
        _check_choice(self, "precision", PRECISIONS)
        _check_choice(self, "xla", ("auto", "off", "full"))
        _check_choice(self, "strategy", STRATEGIES)
        _check_range(self, "keep_checkpoints", 1, 1000)
        _check(
            1 <= self.average_checkpoints <= self.keep_checkpoints,
            "average_checkpoints",
            self.average_checkpoints,
            f"1 to keep_checkpoints = {self.keep_checkpoints}",
        )
        _check_range(self, "patience", 0, 1_000_000)
        _check_range(self, "seed", 0, 2**32 - 1)
        _check_range(self, "validation_sentences", 0, 100_000)


@dataclass(frozen=True)
class DecodingConfig:
    """How it chooses words (paper, section 6.1)."""

    beam_size: int = 4  # hypotheses kept side by side, 1 = greedy
    length_penalty: float = 0.6  # alpha of ((5 + n) / 6) ** alpha
    extra_length: int = 50  # a translation ends at source length + this many tokens

    def __post_init__(self) -> None:
        _check_range(self, "beam_size", 1, MAX_BEAM_SIZE)
        _check_range(self, "length_penalty", -10, 10)
        _check_range(self, "extra_length", 0, 1000)


@dataclass(frozen=True)
class Preset:
    """A size and the recipe that suits it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


def _preset(model: dict, training: dict) -> Preset:
    return Preset(ModelConfig(**model), TrainingConfig(**training))


PRESETS = {
    # For tests and first steps: learns to say something within minutes on two cores.
    "tiny": _preset(
        dict(
            vocab_size=4000,
            num_layers=2,
            d_model=64,
            num_heads=4,
            d_ff=256,
            projection_gain=0.4,
        ),
        dict(
            batch_tokens=2048,
            max_steps=20_000,
            warmup_steps=400,
            learning_rate_scale=0.5,
            checkpoint_every=250,
            validate_every=500,
        ),
    ),
    # For a laptop and a corpus of everyday sentences; hours on two cores. Small updates
    # with a shorter warm-up: at this size many small steps beat few large ones.
    "small": _preset(
        dict(projection_gain=0.4),
        dict(
            batch_tokens=2048,
            max_steps=40_000,
            warmup_steps=1000,
            learning_rate_scale=0.75,
        ),
    ),
    # The paper's base model (Table 3): 12 hours on 8 P100 for 4.5 million pairs.
    "base": _preset(
        dict(vocab_size=37_000, num_layers=6, d_model=512, num_heads=8, d_ff=2048),
        dict(max_steps=100_000),
    ),
    # The paper's big model (Table 3): 3.5 days on 8 P100; averages 20 checkpoints.
    "big": _preset(
        dict(
            vocab_size=37_000,
            num_layers=6,
            d_model=1024,
            num_heads=16,
            d_ff=4096,
            dropout_rate=0.3,
        ),
        dict(max_steps=300_000, keep_checkpoints=20, average_checkpoints=20),
    ),
}
