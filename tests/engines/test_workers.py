"""Memory shared with forked processes: what was written last is what is read, whatever its length."""

import os

from protofed.engines.workers import SharedBuffer


def test_what_was_written_last_is_read() -> None:
    slate = SharedBuffer()
    for blob in (b"", b"a longer text", b"short", os.urandom(100_000), b""):
        slate.write(blob)
        assert slate.read() == blob
    slate.close()


def test_a_fork_reads_what_its_parent_writes_later() -> None:
    slate = SharedBuffer()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0 if slate.read() == b"after the fork" else 1)
    slate.write(b"after the fork")
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for end in (reader, writer):
        os.close(end)
    slate.close()
