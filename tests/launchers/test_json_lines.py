"""Lines over pipes."""

from __future__ import annotations

import os

from launchers.json_lines import LineReader, LineWriter, from_line, stray_safe_reader, to_line, wait_for


def test_lines_are_cut_wherever_they_were_torn():
    read_end, write_end = os.pipe()
    reader = LineReader(read_end)
    os.write(write_end, b'{"a":1}\n{"b"')
    assert reader.read() == [b'{"a":1}']
    os.write(write_end, b":2}")
    assert reader.read() == []
    os.write(write_end, b"\n\nlast")
    assert reader.read() == [b'{"b":2}', b""]
    os.close(write_end)
    assert (reader.read(), reader.closed) == ([b"last"], True)
    os.close(read_end)


def test_a_foreign_line_without_end_is_not_kept_for_ever():
    read_end, write_end = os.pipe()
    reader = stray_safe_reader(read_end)
    lines = []
    for _ in range(40):
        os.write(write_end, b"x" * 4096)
        lines += reader.read()
    assert sum(map(len, lines)) > 30 * 4096
    os.write(write_end, b"\n" + to_line({"event": "step"}))
    assert from_line(reader.read()[-1]) == {"event": "step"}
    os.close(read_end)
    os.close(write_end)


def test_a_writer_never_blocks_and_knows_when_nobody_reads():
    read_end, write_end = os.pipe()
    writer, reader = LineWriter(write_end), LineReader(read_end)
    line = to_line({"text": "x" * 1_000_000})
    writer.add(line)
    assert writer.pending_bytes > 0
    assert not wait_for(write_end, write=True, timeout_s=0)
    lines = []
    while not lines:
        lines = reader.read()
        writer.flush()
    assert lines == [line[:-1]]
    os.close(read_end)
    writer.add(line)
    assert (writer.broken, writer.pending_bytes) == (True, 0)
    os.close(write_end)


def test_what_is_no_object_is_none():
    assert [from_line(line) for line in (b"", b"banner", b"3", b"[1]", b"\xff")] == [None] * 5
