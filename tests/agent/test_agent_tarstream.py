"""A stream of files is read whole or refused, wherever it is cut, and costs no second copy in memory."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading

import pytest

from agent import tarstream

FILES = {
    "plain.txt": b"x" * 2700,
    "empty": b"",
    "whole/blocks.bin": b"b" * 1024,
    f"{'deep' * 30}/ü.txt": b"a name of more than 100 characters",
    "big.bin": bytes(range(256)) * 4096,
}


def tar_of(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    for name, content in files.items():
        header = tarfile.TarInfo(name)
        header.size = len(content)
        stream.write(header.tobuf(tarfile.PAX_FORMAT) + content + b"\0" * (-len(content) % 512))
    return stream.getvalue() + bytes(1024)


def read_all(data: bytes) -> dict[str, bytes]:
    """As it comes through a real pipe, in the pieces that the pipe makes."""
    ours, theirs = os.pipe()

    def send() -> None:
        with os.fdopen(theirs, "wb") as sink:
            sink.write(data)

    sender = threading.Thread(target=send)
    sender.start()
    found = {}
    with os.fdopen(ours, "rb") as source:
        try:
            for member, content in tarstream.members(source):
                sha, output = hashlib.sha256(), io.BytesIO()
                size = tarstream.copy(content, sha, output)
                assert size == member.size and sha.digest() == hashlib.sha256(output.getvalue()).digest()
                found[member.name] = output.getvalue()
            assert source.read() == b""  # nothing is left in the pipe
        finally:
            source.read()
            sender.join(30)
    return found


def test_every_file_comes_whole_and_the_stream_is_read_to_its_end():
    assert read_all(tar_of(FILES)) == FILES


def test_a_file_that_nobody_reads_is_passed_over():
    stream = io.BufferedReader(io.BytesIO(tar_of(FILES)))
    assert [member.name for member, _ in tarstream.members(stream)] == list(FILES)


@pytest.mark.parametrize("cut", [0, 100, 511, 600, 512 + 2700, 512 + 2800, -1024 - 512, -1024 - 1_000_000])
def test_a_stream_that_ends_early_is_an_error_wherever_it_is_cut(cut):
    data = tar_of(FILES)
    with pytest.raises((tarfile.TarError, EOFError)):
        read_all(data[:cut])


@pytest.mark.parametrize("cut", [3584, 3700])
def test_a_stream_that_ends_between_two_files_holds_what_came(cut):
    assert list(read_all(tar_of(FILES)[:cut])) == ["plain.txt"]
