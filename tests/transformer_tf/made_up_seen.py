"""What a model might have seen, of random numbers: no model, and quick."""

import numpy as np

from transformer_tf.attention import AttentionSteps
from transformer_tf.explain import Look, Seen


def make_seen(source, target, layers=2, heads=2, head_width=8, seed=5):
    """A `Seen` of S and T tokens in float32, as a model would give it."""
    random = np.random.default_rng(seed)
    s, t = len(source), len(target)
    everyone = np.ones((1, 1, 1, s), bool)
    causal = np.tril(np.ones((1, 1, t, t), bool))

    def looks(queries, keys, mask):
        size = (heads, queries, keys, head_width)
        return [make_look(random, *size, mask) for _ in range(layers)]

    return Seen(
        source=list(source),
        fed=["<s>", *target[:-1]],
        target=list(target),
        looks={
            "encoder": looks(s, s, everyone),
            "decoder": looks(t, t, causal),
            "cross": looks(t, s, everyone),
        },
        logits=None,
    )


def make_look(random, heads, queries, keys, head_width, mask):
    def normal(*shape):
        return random.normal(size=(1, *shape)).astype(np.float32)

    query = 2 * normal(heads, queries, head_width)
    key, value = normal(heads, keys, head_width), normal(heads, keys, head_width)
    scores = query @ np.swapaxes(key, -1, -2)
    scaled = scores / np.float32(head_width**0.5)
    powers = np.exp(scaled) * mask
    shares = (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
    steps = AttentionSteps(scores, scaled, shares, shares @ value)
    x, attn_output, out = (normal(queries, heads * head_width) for _ in range(3))
    return Look(x, query, key, value, mask, steps, attn_output, out)
