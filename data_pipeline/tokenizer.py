"""How does text become ids, and ids text again?

One SentencePiece vocabulary for both languages (the paper shares its embedding matrix,
3.4). Python `sentencepiece` trains it and checks it; the ops of `tensorflow_text` run
it, so the same code works eagerly, in `tf.data` and in an exported SavedModel.
"""

import contextlib
import hashlib
import io
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
import tensorflow as tf
import tensorflow_text as tf_text

from data_pipeline.errors import DataError

PAD_ID, UNK_ID, BOS_ID, EOS_ID = 0, 1, 2, 3

MAX_MODEL_BYTES = 16 * 2**20  # the parser inside TensorFlow is an old one:
MAX_PIECES = 256_000  # nothing oversized reaches it


def train_vocabulary(
    sentences: Iterable[str],
    vocab_size: int,
    model_type: str = "unigram",
    num_threads: int = 8,
    max_sentences: int = 1_000_000,
) -> bytes:
    """Learns one vocabulary from the sentences of both languages.

    The same sentences in the same order give the same bytes on every machine. That is
    why `num_threads` is not the number of cores: expected counts are summed per thread,
    so another number of threads rounds differently and is another vocabulary.

    Args:
      sentences: one pass over all of them, streamed. Sentences longer than 4,192 bytes
        are skipped.
      vocab_size: pieces wanted; a small corpus yields fewer.
      model_type: "unigram" or "bpe".
      num_threads: part of the result, see above.
      max_sentences: beyond that many, a random sample is used.

    Returns:
      The serialized model, the content of a `vocab.model`.

    Raises:
      DataError: if the sentences cannot fill a vocabulary, or it cannot hold them.
    """
    if model_type not in ("unigram", "bpe"):
        raise ValueError(f"model_type is {model_type!r}; expected 'unigram' or 'bpe'")
    if not 0 < vocab_size <= MAX_PIECES:
        raise ValueError(f"vocab_size is {vocab_size}; expected 1 to {MAX_PIECES:,}")
    sample = _sample(sentences, max_sentences)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=0.9995,
            byte_fallback=True,
            normalization_rule_name="nmt_nfkc",
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            num_threads=num_threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_why_training_failed(str(error), vocab_size)) from error
    checked_processor(model.getvalue(), "the vocabulary just trained")
    return model.getvalue()


def _sample(sentences: Iterable[str], size: int) -> list[bytes]:
    """Keeps `size` sentences at most, each with the same chance, as the trainer takes.

    SentencePiece has a sampler too, but seeds it by the clock.
    """
    rng = random.Random(0)
    sample: list[bytes] = []
    seen = 0
    for sentence in sentences:
        text = re.sub(r"[\0\r\n]+", " ", sentence).strip()
        if not text:
            continue
        seen += 1
        place = seen - 1 if seen <= size else int(rng.random() * seen)
        if place < size:
            sample[place : place + 1] = [text.encode("utf-8", errors="replace")]
    return sample


def _why_training_failed(message: str, vocab_size: int) -> str:
    too_small = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)
    if too_small:
        return (
            f"a vocabulary of {vocab_size} pieces cannot hold every character of these "
            f"sentences and 256 bytes; expected at least {too_small[1]}: "
            f"pass --vocab_size {too_small[1]} or more"
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return (
            "no sentence to train a vocabulary on; expected lines of text of at most "
            "4,192 bytes: check the corpus"
        )
    return f"the vocabulary could not be trained: {' '.join(message.split())}"


def checked_processor(
    model_bytes: bytes, name: str = "the vocabulary"
) -> sentencepiece.SentencePieceProcessor:
    """Loads a model with python `sentencepiece`, which survives crafted bytes.

    Raises:
      DataError: if it is empty, oversized, damaged or has other special ids than ours.
    """

    def refuse(problem: str, expected: str = "a SentencePiece model") -> DataError:
        return DataError(
            f"{name} {problem}; expected {expected}: "
            "restore the file or train again with train.py --fresh"
        )

    if not model_bytes:  # sentencepiece would accept this
        raise refuse("is empty")
    if len(model_bytes) > MAX_MODEL_BYTES:
        raise refuse(f"has {len(model_bytes):,} bytes", f"at most {MAX_MODEL_BYTES:,}")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    except RuntimeError as error:
        raise refuse("is damaged or no SentencePiece model") from error
    if not 0 < processor.get_piece_size() <= MAX_PIECES:
        raise refuse(
            f"has {processor.get_piece_size():,} pieces", f"1 to {MAX_PIECES:,}"
        )
    special_ids = [
        processor.pad_id(),
        processor.unk_id(),
        processor.bos_id(),
        processor.eos_id(),
    ]
    if special_ids != [PAD_ID, UNK_ID, BOS_ID, EOS_ID]:
        raise refuse(f"has pad, unk, bos, eos ids {special_ids}", "[0, 1, 2, 3]")
    return processor


class Tokenizer(tf.Module):
    """Text to ids and back, in the graph.

    As an attribute of a `tf.Module` it is exported with it, vocabulary included.
    Start and end tokens are not its business: the `add_bos` and `add_eos` of the ops
    are state shared by all tokenizers of a process.
    """

    def __init__(self, model_bytes: bytes, source: str = "the vocabulary"):
        """Checks the model, then hands it to TensorFlow.

        Args:
          model_bytes: what `train_vocabulary` returned.
          source: how an error message calls it.

        Raises:
          DataError: if the model cannot be used.
        """
        super().__init__(name="tokenizer")
        self._processor = checked_processor(model_bytes, source)
        self.model_bytes = model_bytes
        self.vocab_size: int = self._processor.get_piece_size()
        self.fingerprint: str = hashlib.sha256(model_bytes).hexdigest()

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a `vocab.model`.

        Raises:
          DataError: if there is none, or it cannot be used.
        """
        try:
            with open(path, "rb") as file:
                model_bytes = file.read(MAX_MODEL_BYTES + 1)
        except OSError as error:
            raise DataError(
                f"cannot read the vocabulary {path} ({error.strerror}); expected a "
                "file that train.py wrote: check the path or train again"
            ) from error
        return cls(model_bytes, f"the vocabulary {path}")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the `vocab.model`: whole, or not at all."""
        temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(self.model_bytes)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def tokenize(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Turns sentences (B,), UTF-8, into ids (B, None), int32, without bos or eos.

        Never fails: invalid UTF-8 becomes U+FFFD, unknown characters become bytes.
        """
        return self._tokenize(tf.convert_to_tensor(text, tf.string))

    def detokenize(self, ids: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
        """Turns ids (B, T), int32, dense or ragged, into sentences (B,).

        Never fails: pad, bos, eos and ids outside the vocabulary are left out. One of
        those would otherwise be an error for the whole batch.
        """
        with tf.device("/CPU:0"):
            text_ids = tf.ragged.boolean_mask(
                ids, (ids == UNK_ID) | (ids > EOS_ID) & (ids < self.vocab_size)
            )
        return self._detokenize(text_ids)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def _tokenize(self, text: tf.Tensor) -> tf.RaggedTensor:
        with tf.device("/CPU:0"):
            # SentencePiece drops control characters, except NUL.
            text = tf.strings.regex_replace(text, r"\x00", "")
            return self._new_ops().tokenize(text)

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)])
    def _detokenize(self, ids: tf.RaggedTensor) -> tf.Tensor:
        with tf.device("/CPU:0"):
            return self._new_ops().detokenize(ids)

    def _new_ops(self) -> tf_text.SentencepieceTokenizer:
        """Puts the vocabulary into the graph being traced.

        One made eagerly would be lost with the next `tf.random.set_seed`, which clears
        the kernels that own such resources. Never the Fast tokenizer: no byte fallback.
        """
        return tf_text.SentencepieceTokenizer(self.model_bytes)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Spells ids, for people: word starts show as ▁."""
        return [self._processor.id_to_piece(int(i)) for i in ids]
