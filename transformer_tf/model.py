"""What is the mountain: encoder, decoder, and the one matrix that both share.

Paper, sections 3.1 and 3.4. Masks are made here, once, and handed down.
"""

import dataclasses
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from transformer_tf.attention import (
    Cache,
    causal_mask,
    flat,
    padding_mask,
    sizes,
)
from transformer_tf.config import ModelConfig, embedding_stddev
from transformer_tf.layers import Decoder, Encoder


class DecoderCache(NamedTuple):
    """What decoding token by token need not compute again."""

    memory: list  # per layer a Cache (B, H, S, K): the source, projected once
    target: list  # per layer a Cache (N, H, T, K): grows by what each call reads
    output_kernel: object  # (D, V): the embedding matrix, transposed once


class Transformer(keras.Model):
    """The encoder-decoder Transformer (paper, Figure 1).

    One matrix is source embedding, target embedding and, transposed, the last
    projection (3.4). Its rows are padded to a multiple of 8, which matrix units like;
    the rows beyond `vocab_size` stand for no piece and must never be chosen.

    Args:
        vocab_size: pieces of the joint vocabulary.
        num_layers: stations on each side.
        d_model, num_heads, d_ff, dropout_rate, projection_gain: as for `EncoderLayer`.
        positions: "sinusoidal" (3.5) or "learned" (Table 3, row E).
        max_length: longest source or target in tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout_rate: float = 0.1,
        positions: str = "sinusoidal",
        max_length: int = 256,
        projection_gain: float = 1.0,
        **kwargs,
    ):
        # The layers below compute in the type of the policy, the logits in float32.
        super().__init__(dtype="float32", **kwargs)
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.embedding = keras.layers.Embedding(
            -(-vocab_size // 8) * 8,
            d_model,
            embeddings_initializer=keras.initializers.RandomNormal(
                stddev=embedding_stddev(d_model)
            ),
            name="embedding",
        )
        options = dict(
            num_layers=num_layers,
            d_model=d_model,
            num_heads=num_heads,
            d_ff=d_ff,
            dropout_rate=dropout_rate,
            positions=positions,
            max_length=max_length,
            projection_gain=projection_gain,
        )
        self.encoder = Encoder(self.embedding, name="encoder", **options)
        self.decoder = Decoder(self.embedding, name="decoder", **options)

    def call(self, inputs, training=False):
        """Teacher forcing: (source (B, S), target (B, T)) -> logits (B, T, V)."""
        source, target = inputs
        memory, source_mask = self.encode(source, training=training)
        return self.decode(target, memory, source_mask, training=training)

    def encode(self, source, training=False):
        """(B, S) ids -> memory (B, S, D) and its mask (B, 1, 1, S)."""
        source_mask = padding_mask(source)
        memory = self.encoder(source, training=training, mask=source_mask)
        return memory, source_mask

    def decode(self, target, memory, source_mask, training=False, cache=None):
        """Logits of the token that follows each target token.

        Args:
            target: (B, T) ids. With a cache: (N, 1), the newest token of each of the
                N = B * W hypotheses, those of one sentence side by side.
            memory: (B, S, D) from `encode`; with a cache it is not read again.
            source_mask: (B, 1, 1, S) from `encode`.
            cache: `DecoderCache` from `init_cache` or from the call before.

        Returns:
            Logits (B, T, V) in float32; with a cache also the new cache.
        """
        # Padding of the target needs no mask: it comes last, and nobody looks ahead.
        if cache is None:
            x, _ = self.decoder(
                target,
                memory,
                training=training,
                mask=causal_mask(ops.shape(target)[1]),
                memory_mask=source_mask,
            )
            return self.logits(x)
        x, target_cache = self.decoder(
            target, cache.memory, cache=cache.target, memory_mask=source_mask
        )
        return self.logits(x, cache.output_kernel), cache._replace(target=target_cache)

    def output_kernel(self):
        """(D, V): the embedding matrix, transposed (3.4)."""
        return ops.transpose(self.embedding.embeddings)

    def logits(self, x, kernel=None):
        """(B, T, D) -> (B, T, V): how well each piece fits (3.4).

        Computed in float32 whatever the compute type: rounded to bfloat16, a logit of
        10 would be off by 0.03. The way back may be as coarse as the other gradients.
        """
        kernel = self.output_kernel() if kernel is None else kernel
        mixed = x.dtype != kernel.dtype
        product = _product_with_coarse_gradient if mixed else ops.matmul
        return ops.reshape(product(flat(x), kernel), (*sizes(x), kernel.shape[1]))

    def init_cache(self, memory, rows) -> DecoderCache:
        """The cache before the first token.

        Args:
            memory: (B, S, D) from `encode`.
            rows: N, the number of hypotheses decoded side by side, a multiple of B.
        """
        layers = self.decoder.dec_layers
        projected = [layer.cross_mha.project_memory(memory) for layer in layers]
        heads, width = projected[0].key.shape[1], projected[0].key.shape[3]
        empty = ops.zeros((rows, heads, 0, width), dtype=projected[0].key.dtype)
        # Transposed here and not at each step: for a few rows that would cost more than
        # the product itself.
        return DecoderCache(
            projected, [Cache(empty, empty) for _ in layers], self.output_kernel()
        )


@ops.custom_gradient
def _product_with_coarse_gradient(x, kernel):
    """(N, D) (D, V) in the type of the kernel; its gradients are computed in x's."""
    product = ops.matmul(ops.cast(x, kernel.dtype), kernel)

    def gradient(upstream):
        upstream = ops.cast(upstream, x.dtype)
        to_x = ops.matmul(upstream, ops.transpose(ops.cast(kernel, x.dtype)))
        to_kernel = ops.matmul(ops.transpose(x), upstream)
        return to_x, ops.cast(to_kernel, kernel.dtype)

    return product, gradient


def build_transformer(
    config: ModelConfig, vocab_size: int | None = None
) -> Transformer:
    """A model of that size with all its variables, in the current Keras policy.

    Args:
        config: the size.
        vocab_size: pieces that the vocabulary really has; a small corpus has fewer
            than it was asked for.
    """
    options = dataclasses.asdict(config)
    model = Transformer(**{**options, "vocab_size": vocab_size or config.vocab_size})
    tokens = np.ones((1, 2), np.int32)
    model((tokens, tokens))
    return model
