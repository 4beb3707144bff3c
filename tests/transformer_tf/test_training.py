import time

import pytest
import tensorflow as tf
from small_training import dataset_of, make_batch, make_trainer, run

from transformer_tf.training import DivergedError, OutOfMemoryError, WarmupSchedule


def test_rate_is_the_papers():
    base = WarmupSchedule(d_model=512, warmup_steps=4000)
    assert float(base(3999)) == pytest.approx(7.0e-4, rel=0.01)  # the peak of base
    assert float(base(0)) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert float(base(15_999)) == pytest.approx(float(base(3999)) / 2)
    assert WarmupSchedule.from_config(base.get_config())(7) == base(7)


def test_learns_a_batch_by_heart():
    trainer = make_trainer(max_steps=150, warmup_steps=40, label_smoothing=0.0)
    run(trainer, [make_batch()] * 150)
    assert trainer.validation_loss(dataset_of(make_batch())) < 0.1


def test_callbacks_come_when_due():
    calls = []
    trainer = make_trainer(
        max_steps=10, log_every=5, validate_every=4, checkpoint_every=3
    )
    run(
        trainer,
        [make_batch()] * 10,
        after_update=lambda: calls.append(("update", trainer.step)),
        report=lambda p: calls.append(("report", p.step)),
        checkpoint=lambda: calls.append(("checkpoint", trainer.step)),
        validate=lambda: calls.append(("validate", trainer.step)),
    )

    def steps_of(called):
        return [step for name, step in calls if name == called]

    assert steps_of("update") == list(range(1, 11))
    assert steps_of("report") == [3, 4, 5, 6, 8, 9, 10]
    assert steps_of("validate") == [4, 8]
    assert steps_of("checkpoint") == [3, 6, 9, 10]


def test_stops_when_asked_and_saves_without_validating():
    saved, validated = [], []
    trainer = make_trainer(max_steps=10, validate_every=2)
    run(
        trainer,
        [make_batch()] * 10,
        should_stop=lambda: trainer.step == 2,
        checkpoint=lambda: saved.append(trainer.step),
        validate=lambda: validated.append(trainer.step),
    )
    assert (saved, validated) == ([2], [])


def test_patience_ends_a_run_for_good():
    losses = [3.0, 2.0, 2.5, 1.9, 2.0, 1.95, 1.0]
    trainer = make_trainer(patience=2, max_steps=10, validate_every=1)

    def validate():
        trainer.note_validation(losses[trainer.step - 1])

    run(trainer, [make_batch()] * 10, validate=validate)
    assert trainer.step == 6
    run(trainer, [make_batch()] * 10, validate=validate)
    assert trainer.step == 6


def test_minutes_end_a_run_for_good():
    trainer = make_trainer(max_minutes=0.01, max_steps=10)
    run(trainer, [make_batch()] * 10, after_update=lambda: time.sleep(0.7))
    assert trainer.step == 1
    run(trainer, [make_batch()] * 10)
    assert trainer.step == 1


def test_ten_skipped_updates_in_a_row_stop_the_run_before_it_is_saved():
    trainer = make_trainer(max_steps=100, checkpoint_every=3)
    embeddings = trainer.model.embedding.embeddings
    saved = []

    def spoil():
        if trainer.step == 4:
            embeddings.assign(tf.fill(embeddings.shape, float("nan")))

    with pytest.raises(DivergedError, match="at update 20: .* not finite 16 times"):
        run(
            trainer,
            [make_batch()] * 100,
            after_update=spoil,
            checkpoint=lambda: saved.append(trainer.step),
        )
    assert saved == [3]


def test_a_loss_far_worse_than_guessing_stops_the_run():
    trainer = make_trainer(max_steps=100, learning_rate_scale=1000, log_every=5)
    with pytest.raises(DivergedError, match=r"guessing would give 5\.7"):
        run(trainer, [make_batch()] * 100)


def test_a_batch_that_does_not_fit_is_known_before_the_first_update(monkeypatch):
    trainer = make_trainer()

    def too_much(shapes):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    monkeypatch.setattr(trainer.update, "warm_up", too_much)
    with pytest.raises(OutOfMemoryError, match=r"64 x \(9 \+ 8\) .*--batch_tokens 32"):
        trainer.warm_up([(64, 9, 8)])
