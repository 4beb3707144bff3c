from transformer_tf.config import TrainingConfig
from transformer_tf.reporting import Reporter
from transformer_tf.run_directory import Metrics
from transformer_tf.scores import Scores
from transformer_tf.training import Progress

PROGRESS = Progress(
    step=50,
    skipped=0,
    loss=3.25,
    learning_rate=1e-3,
    tokens_per_second=1234.5,
    seconds_per_update=0.5,
    seconds=90.0,
)
SCORES = Scores(12.5, 34.5, "nrefs:1|tok:13a", "nrefs:1|nc:6")


def make_reporter(tmp_path, **changes):
    config = TrainingConfig(max_steps=250, **changes)
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.rewind(0)
    return Reporter(tmp_path / "log", metrics, config, step=0)


def test_without_a_terminal_progress_is_a_line(tmp_path, capsys):
    with make_reporter(tmp_path) as reporter:
        reporter.after_update()
        reporter.progress(PROGRESS)
    assert capsys.readouterr().out == (
        "update 50 loss 3.250 rate 1.00e-03 1,234 target tokens/s 0:01:40 left\n"
    )


def test_a_limit_of_minutes_comes_first(tmp_path, capsys):
    with make_reporter(tmp_path, max_minutes=2) as reporter:
        reporter.progress(PROGRESS)
    assert "0:00:30 left" in capsys.readouterr().out


def test_a_validation_is_told_kept_and_plotted(tmp_path, capsys):
    with make_reporter(tmp_path) as reporter:
        reporter.progress(PROGRESS)
        reporter.validation(2.5, SCORES, "水 -> water (the water)")
    printed = capsys.readouterr().out
    assert "validation after update 50: loss 2.500" in printed
    assert "BLEU 12.5 (nrefs:1|tok:13a)" in printed
    assert "水 -> water (the water)" in printed
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[1] == "50,1.5,0.001,3.25,2.5,12.5,34.5"
    assert list((tmp_path / "log").glob("events.*"))


def test_without_a_sample_there_are_no_scores(tmp_path, capsys):
    with make_reporter(tmp_path) as reporter:
        reporter.progress(PROGRESS)
        reporter.validation(2.5, None, "")
    assert "BLEU" not in capsys.readouterr().out
    assert (tmp_path / "metrics.csv").read_text().endswith(",2.5,nan,nan\n")
