"""The proof that a process has ended, where another thing has its number."""

from __future__ import annotations

import threading

import msgspec

from sglang_pd.backends.library.process import own_identity, process_gone


def test_a_process_whose_number_a_thread_has_now_has_ended() -> None:
    """The system makes no watch of a thread, and whoever asked took that for not knowing."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    assert thread.native_id is not None
    own = own_identity()
    before = msgspec.structs.replace(own, pid=thread.native_id, start_ticks=own.start_ticks - 100)
    assert process_gone(before)
    assert not process_gone(own)
    assert not process_gone(msgspec.structs.replace(before, boot_id="of another host"))
    over.set()
