"""What a run does to the process that it runs in."""

import signal
import threading

import uvloop

from opdkit.actors.foreground import own_sigterm_handler


def test_the_callers_answer_to_sigterm_is_restored() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        with own_sigterm_handler() as restore:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray sets one of its own
            restore()
            signal.raise_signal(signal.SIGTERM)
            loop = uvloop.new_event_loop()
            loop.add_signal_handler(signal.SIGTERM, loop.stop)
            loop.close()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM, signal.SIGTERM]


def test_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with own_sigterm_handler() as restore:
            restore()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
