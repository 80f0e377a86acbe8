"""Text, records, indexed datasets and tokenizers: used correctly, or refused by an error that names them."""

import json
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coat_launch.data import load_corpus
from coat_launch.errors import DataError
from coat_launch.tokenizer import Tokenizer
from tests.hostile.files import damaged, json_files, tries


def indexed(documents: list[list[list[int]]], dtype=np.uint16) -> tuple[bytes, bytes]:
    """An .idx and a .bin as Megatron writes them."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    begins = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    code = {np.uint16: 8, np.int32: 4}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(firsts))
    tokens = np.concatenate([np.array(sequence, dtype) for sequence in sequences])
    return header + lengths.tobytes() + begins.tobytes() + firsts.tobytes(), tokens.tobytes()


IDX, BIN = indexed([[[1, 2, 3], [4]], [[5, 6, 7, 8, 9]], [], [[10, 11], [12, 13, 14]]])


def all_tokens(split) -> list[int]:
    """Every token of a corpus whose samples are one token and its label; the label is the first token of the
    next sample."""
    return [int(split.sample(i)[0]) for i in range(len(split))] + [int(split.sample(len(split) - 1)[1])]


@tries()
@given(damaged(IDX) | st.just(IDX) | st.binary(max_size=120), damaged(BIN) | st.just(BIN))
def test_indexed_datasets(folder, idx, tokens):
    prefix = folder / "indexed"
    prefix.with_suffix(".idx").write_bytes(idx)
    prefix.with_suffix(".bin").write_bytes(tokens)
    try:
        corpus = load_corpus([prefix], seq_length=1, seed=0, vocab_size=2**16)
        found = all_tokens(corpus.train) + all_tokens(corpus.validation)
    except DataError as error:
        assert str(prefix) in str(error) or "part of the corpus has" in str(error), error
        return
    # each token of the file occurs once, however documents are cut
    dtype = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}[idx[17]]
    assert sorted(found) == sorted(np.frombuffer(tokens, dtype).tolist())


RECORDS = (
    b'{"text": "one and two"}\n\n{"id": 3, "text": "\\u00e9\\ud83d\\ude00 \xc3\xa9"}\n'
    b'{"text": ""}\n{"text": "x y"}\n'
)


@tries()
@given(
    st.one_of(
        damaged(RECORDS),
        st.lists(json_files({"text": "some words", "id": 1}), min_size=1, max_size=4).map(b"\n".join),
        st.lists(
            st.text(st.characters(), max_size=5).map(lambda t: json.dumps({"text": t}).encode()), max_size=5
        ).map(b"\n".join),
    )
)
def test_json_lines(folder, data):
    path = folder / "lines.jsonl"
    path.write_bytes(data)
    try:
        corpus = load_corpus([path], seq_length=1, seed=0)
    except DataError as error:
        message = str(error)
        assert str(path) in message or "part of the corpus has" in message, message
        assert not ("not JSON" in message or "expected an object" in message) or ", line " in message
        return
    texts = [json.loads(line)["text"] for line in data.split(b"\n") if line.strip()]
    # bytes and the end of each document
    expected = sorted(x for text in texts if text for x in [*text.encode(), 256])
    assert sorted(all_tokens(corpus.train) + all_tokens(corpus.validation)) == expected


@tries(0.03)
@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_plain_text(folder, data):
    path = folder / "plain.txt"
    path.write_bytes(data)
    try:
        corpus = load_corpus([path], seq_length=1, seed=0)
    except DataError as error:
        assert str(path) in str(error) or "part of the corpus has" in str(error)
        return
    assert all_tokens(corpus.train) + all_tokens(corpus.validation) == [*data, 256]


def tokenizer_file() -> dict:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models

    return json.loads(Fast(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")).to_str())


@tries(0.03)
@given(json_files(tokenizer_file()))
def test_tokenizers(folder, data):
    path = folder / "tokenizer.json"
    path.write_bytes(data)
    try:
        tokenizer = Tokenizer.from_file(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    assert 0 <= tokenizer.end_of_document < tokenizer.vocab_size
