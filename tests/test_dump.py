import gzip

import pytest

from spmdlab import dump
from spmdlab.errors import HloError

TEXT = "HloModule jit_step, is_scheduled=true\n"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_text(tmp_path, pack):
    path = tmp_path / "step.txt"
    path.write_bytes(pack(TEXT.encode()))
    assert dump.read_hlo_text(path) == TEXT


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "step.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert dump.read_hlo_text(path) == TEXT


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b" \n\n", "is empty", id="blank"),
        pytest.param(b"\0\1\2HloModule", "is binary", id="binary"),
        pytest.param(b"HloModule \xff\xfe", "is no text", id="no-utf8"),
        pytest.param(gzip.compress(TEXT.encode())[:-9], "cannot be read", id="truncated-gzip"),
        pytest.param(gzip.compress(b""), "is empty", id="empty-gzip"),
        pytest.param(b"\x1f\x8bnot gzip at all", "cannot be read", id="no-gzip"),
    ],
)
def test_refuses_in_one_line(tmp_path, data, message):
    path = tmp_path / "step.txt"
    path.write_bytes(data)
    with pytest.raises(HloError, match=message) as raised:
        dump.read_hlo_text(path)
    assert "\n" not in str(raised.value)


def test_refuses_what_is_no_file(tmp_path):
    with pytest.raises(HloError, match="is a folder"):
        dump.read_hlo_text(tmp_path)
    with pytest.raises(HloError, match="does not exist"):
        dump.read_hlo_text(tmp_path / "none.txt")


def test_a_small_file_cannot_unpack_into_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "LARGEST_BYTES", 1000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"x" * 1001))
    with pytest.raises(HloError, match="more than 1000 B of text"):
        dump.read_hlo_text(path)
