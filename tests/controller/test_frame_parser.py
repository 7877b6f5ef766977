"""Frames survive any chunking and any junk around them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import ProtocolError
from controller.frames import Frame, FrameParser

NONCE = "00ff00ff00ff00ff"

frames = st.lists(
    st.tuples(st.sampled_from(["note", "out", "err", "end"]), st.binary(max_size=200)), max_size=6
)
# Junk may look like a beginning of a frame, or be a frame of somebody else.
junk = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"@pctrun ", b"@", b"@pctrun 00ff", b"@pctrun 1234567812345678 out 3\nabc\n", b"\n@pctrun \n"]
    ),
)


def encode(kind: str, data: bytes) -> bytes:
    return b"@pctrun %s %s %d\n%s\n" % (NONCE.encode(), kind.encode(), len(data), data)


def gathered(found: list[Frame]) -> list[tuple[str, bytes]]:
    """Whole documents one by one; neighbouring pieces of an output joined."""
    result: list[tuple[str, bytes]] = []
    for kind, group in itertools.groupby(found, key=lambda frame: frame.kind):
        if kind in ("out", "err"):
            result.append((kind, b"".join(frame.data for frame in group)))
        else:
            result.extend((kind, frame.data) for frame in group)
    return result


@given(frames, st.lists(junk, min_size=7, max_size=7), st.data())
def test_any_chunking_and_any_junk_gives_the_same_frames(
    sent: list[tuple[str, bytes]], noise: list[bytes], data: st.DataObject
) -> None:
    mark = f"@pctrun {NONCE} ".encode()
    noise = [piece for piece in noise if mark not in piece]
    parts = [encode(*frame) for frame in sent]
    stream = b"".join(itertools.chain.from_iterable(itertools.zip_longest(noise, parts, fillvalue=b"")))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    parser = FrameParser(NONCE)
    found: list[Frame] = []
    for start, stop in itertools.pairwise([0, *cuts, len(stream)]):
        found += parser.feed(stream[start:stop])
    wanted = gathered([Frame(kind, body) for kind, body in sent if body or kind in ("note", "end")])
    assert gathered(found) == wanted


def test_one_byte_at_a_time_is_enough() -> None:
    parser = FrameParser(NONCE)
    stream = b"Welcome!\n" + encode("note", b'{"text":"x"}') + b"perl: warning" + encode("end", b"{}")
    found = [frame for byte in stream for frame in parser.feed(bytes([byte]))]
    assert found == [Frame("note", b'{"text":"x"}'), Frame("end", b"{}")]


def test_output_is_handed_on_before_its_frame_is_complete() -> None:
    parser = FrameParser(NONCE)
    head = b"@pctrun %s out 1000000\n" % NONCE.encode()
    assert list(parser.feed(head + b"begin")) == [Frame("out", b"begin")]


def test_a_broken_header_is_refused_in_one_line() -> None:
    with pytest.raises(ProtocolError, match="malformed frame header"):
        list(FrameParser(NONCE).feed(b"@pctrun %s out many\n" % NONCE.encode()))


def test_a_document_beyond_reason_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="announces"):
        list(FrameParser(NONCE).feed(b"@pctrun %s end 99999999999\n" % NONCE.encode()))


def test_the_last_junk_is_kept_for_the_message() -> None:
    parser = FrameParser(NONCE)
    list(parser.feed(b"pct: command not found\n"))
    assert parser.skipped == b"pct: command not found\n"
