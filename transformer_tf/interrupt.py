"""What happens when somebody says stop: SIGINT (Ctrl-C) and SIGTERM."""

import signal

from transformer_tf.run_directory import log


class Interrupt:
    """Remembers SIGINT and SIGTERM while it is open, so that the update ends and is
    saved. Asked twice, the process ends at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.signal = 0

    def __enter__(self) -> "Interrupt":
        self.before = [signal.signal(number, self._take) for number in self.SIGNALS]
        return self

    def __exit__(self, *_) -> None:
        for number, handler in zip(self.SIGNALS, self.before, strict=True):
            signal.signal(number, handler)

    def _take(self, number, frame) -> None:
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number
        log(f"{signal.Signals(number).name}: stopping after this update")
