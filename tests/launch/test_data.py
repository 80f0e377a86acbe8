import json

import numpy as np
import pytest
import tokenizers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coat_launch.batches import Split
from coat_launch.data import VALIDATION_SHARE, Tokenizer, load_corpus, padded_vocab_size, tokenise
from coat_launch.errors import LaunchError

END = 256


def write_files(folder, count=40, words=30):
    """Files with lines of the form "<n>:<word> <word> ...", different in every file."""
    folder.mkdir(exist_ok=True)
    for n in range(count):
        text = f"{n}:" + " ".join(f"w{n}_{i}" for i in range(words + n))
        (folder / f"{n:03}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vocab = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3, "</s>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def all_tokens(split):
    """Every token of a split once, in the order of the documents, except a tail that fills no sample."""
    samples = [split.sample(i) for i in range(len(split))]
    return np.concatenate([s[:-1] for s in samples] + [samples[-1][-1:]])


def documents_of(split):
    """The whole documents among the split's tokens, as strings."""
    text = all_tokens(split)
    parts = np.split(text, np.flatnonzero(text == END))
    return {bytes(part[part != END].astype(np.uint8)) for part in parts[:-1]}


def global_batches(split, ranks, steps, consumed=0):
    """Samples of each step as a set, gathered over the ranks."""
    out = []
    for step in range(steps):
        samples = []
        for rank in range(ranks):
            for batch in split.micro_batches(
                consumed + 8 * step, global_batch_size=8, micro_batch_size=2, rank=rank, ranks=ranks
            ):
                samples += [tuple(row) for row in batch.tokens.tolist()]
        out.append(sorted(samples))
    return out


def test_batch_contents(tmp_path):
    corpus = load_corpus([write_files(tmp_path / "text")], seq_length=32, seed=3)
    batches = list(corpus.train.micro_batches(0, global_batch_size=6, micro_batch_size=2))
    assert len(batches) == 3
    for batch in batches:
        assert all(t.dtype == torch.int64 and t.shape == (2, 32) and t.is_contiguous() for t in batch)
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        assert torch.equal(batch.position_ids[1], torch.arange(32))
        assert batch.loss_mask.eq(1).all()
    # a sequence's last label is the first token of the next sequence
    assert corpus.train.sample(0)[-1] == corpus.train.sample(1)[0]
    assert corpus.vocab_size == 257 and padded_vocab_size(257) == 384 and padded_vocab_size(384) == 384


def test_no_threads_share_a_batch(tmp_path):
    """Ranks on one machine would wait for each other's threads: torch splits large copies over threads, NumPy
    does not."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.add(func)
            return func(*args, **(kwargs or {}))

    called = set()
    train = load_corpus([write_files(tmp_path / "text")], seq_length=16, seed=0).train
    with Counted():
        batch = train.batch(range(4))
    # as for every tensor made from a NumPy array
    assert called == {torch.ops.aten.lift_fresh.default} and len(batch.tokens) == 4


def test_every_document_is_in_one_part_and_nothing_is_lost(tmp_path):
    folder = write_files(tmp_path / "text")
    texts = {path.read_bytes() for path in folder.iterdir()}
    # with one token per sample there is no tail
    corpus = load_corpus([folder], seq_length=1, seed=0)
    train, validation = documents_of(corpus.train), documents_of(corpus.validation)
    assert not train & validation
    assert train | validation == texts
    share = corpus.validation.num_tokens / (corpus.validation.num_tokens + corpus.train.num_tokens)
    # documents are not cut, so the share is met to within one of 40 documents
    assert VALIDATION_SHARE <= share < VALIDATION_SHARE + 1 / 20
    other = load_corpus([folder], seq_length=1, seed=1)
    assert documents_of(other.validation) != validation


def test_a_document_that_is_most_of_the_corpus_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 5000)
    (tmp_path / "b.txt").write_text("y" * 200)
    for seed in range(8):
        corpus = load_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], seq_length=16, seed=seed)
        assert corpus.train.num_tokens == 5001 and corpus.validation.num_tokens == 201


def test_same_global_batches_on_any_number_of_ranks(tmp_path):
    corpus = load_corpus([write_files(tmp_path / "text")], seq_length=32, seed=3)
    one = global_batches(corpus.train, 1, steps=3)
    assert one == global_batches(corpus.train, 2, steps=3) == global_batches(corpus.train, 4, steps=3)
    assert one[0] != one[1]
    fresh = load_corpus([tmp_path / "text"], seq_length=32, seed=3)
    assert global_batches(fresh.train, 1, steps=1, consumed=16)[0] == one[2]
    shuffled = load_corpus([tmp_path / "text"], seq_length=32, seed=4)
    assert global_batches(shuffled.train, 1, steps=1) != one[:1]


def test_an_epoch_visits_each_sample_once_and_the_next_in_another_order(tmp_path):
    split = load_corpus([write_files(tmp_path / "text")], seq_length=32, seed=3).train
    count = len(split)
    epochs = [split.batch(range(first, first + count)).tokens.tolist() for first in (0, count)]
    documents = sorted(split.sample(i)[:-1].tolist() for i in range(count))
    assert sorted(epochs[0]) == sorted(epochs[1]) == documents
    assert epochs[0] != epochs[1]
    # the order is not that of another seed either
    for seed in (2, 4):
        other = Split(split._tokens, split._documents, seq_length=32, seed=seed)
        orders = [other.batch(range(first, first + count)).tokens.tolist() for first in (0, count)]
        assert not any(order in epochs for order in orders)
    # an earlier batch is the same at a second call: batches do not depend on earlier calls
    assert split.batch(range(count)).tokens.tolist() == epochs[0]


def test_standard_library_is_the_default():
    corpus = load_corpus(seq_length=256, seed=0)
    assert len(corpus.train) > 5000 and len(corpus.validation) > 200
    # source text: mostly printable ASCII
    tokens = all_tokens(corpus.validation)
    assert np.isin(tokens, [9, 10, *range(32, 127)]).mean() > 0.95
    assert b"import" in tokens.astype(np.uint8).tobytes()


def test_jsonl(tmp_path):
    lines = [json.dumps({"text": f"document {i} é", "id": i}) for i in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n\n" + json.dumps({"text": ""}) + "\n", "utf-8")
    corpus = load_corpus([path], seq_length=1, seed=0)
    assert documents_of(corpus.train) | documents_of(corpus.validation) == {
        f"document {i} é".encode() for i in range(30)
    }


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b'{"text": 1}', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 10**5], ids=len
)
def test_lines_that_are_no_documents(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(LaunchError, match="a.jsonl, line 2: expected"):
        load_corpus([tmp_path / "a.jsonl"], seq_length=1, seed=0)


def test_blocks_do_not_cut_lines_or_characters(tmp_path, monkeypatch):
    # blocks then end within characters and lines
    monkeypatch.setattr("coat_launch.data.BLOCK_BYTES", 5)
    text = "äöü ßßß\n" * 50 + "ünfinished"
    (tmp_path / "a.txt").write_text(text, "utf-8")
    corpus = load_corpus([tmp_path / "a.txt"], seq_length=1, seed=0)
    tokens = np.concatenate([all_tokens(corpus.train), all_tokens(corpus.validation)])
    assert tokens[:-1].astype(np.uint8).tobytes().decode() == text and tokens[-1] == END
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff")
    with pytest.raises(LaunchError, match="a.txt: not UTF-8 "):
        load_corpus([tmp_path / "a.txt"], seq_length=1, seed=0)


def test_large_token_ids_are_kept():
    """Two bytes hold ids below 2**16; a vocabulary of 65,537 has one id more."""
    for size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32), (2**17, np.uint32)):
        ids = np.array([size - 2, 1], np.uint32)
        tokenizer = Tokenizer(lambda text, ids=ids: ids, size, size - 1)
        tokens, lengths = tokenise([iter(["text"])], tokenizer)
        assert (
            tokens.dtype == dtype and tokens.tolist() == [size - 2, 1, size - 1] and lengths.tolist() == [3]
        )


def test_hugging_face_tokenizer(tmp_path, word_tokenizer):
    (tmp_path / "a.txt").write_text("red green blue blue\n" * 20)
    corpus = load_corpus([tmp_path / "a.txt"], seq_length=4, seed=0, tokenizer=word_tokenizer)
    assert corpus.vocab_size == 5
    assert corpus.train.sample(0).tolist() == [1, 2, 3, 3, 1]
    assert all_tokens(corpus.validation)[-1] == 4


def test_end_of_document_is_added_where_the_tokenizer_has_none(tmp_path, word_tokenizer):
    content = json.loads(word_tokenizer.read_text())
    del content["model"]["vocab"]["</s>"]
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_file(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (5, 4)
    # ids may have gaps
    content["model"]["vocab"]["seven"] = 9
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_file(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (11, 10)


def test_unusable_arguments_are_refused(tmp_path):
    good, empty = tmp_path / "good.txt", tmp_path / "folder"
    good.write_text("red green blue " * 100)
    (tmp_path / "t.json").write_text('{"a": 1}')
    empty.mkdir()
    for named, paths, options in (
        ("nowhere.txt", [tmp_path / "nowhere.txt"], {}),
        ("folder", [empty], {}),
        ("none.json", [good], {"tokenizer": tmp_path / "none.json"}),
        ("t.json", [good], {"tokenizer": tmp_path / "t.json"}),
    ):
        with pytest.raises(LaunchError, match=named):
            load_corpus(paths, seq_length=16, seed=0, **options)
