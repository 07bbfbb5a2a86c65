"""Tests of the handlers of stop signals."""

import signal

from lightning_jax.system.signals import handle_stop_signals


def test_both_signals_reach_the_handler_within_the_context() -> None:
    received = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with handle_stop_signals(lambda number, frame: received.append(number)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        received = []
        with handle_stop_signals(lambda number, frame: received.append(number)):
            signal.raise_signal(signal.SIGTERM)
        assert not received and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
