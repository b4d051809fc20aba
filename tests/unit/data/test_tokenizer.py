"""The tokenizer alters nothing, is the same each time, and says what it cannot do."""

from __future__ import annotations

import hashlib
import io
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer, sample_texts, train_tokenizer

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def oracle(tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)


def test_nasty_texts_come_back_exactly(tokenizer: Tokenizer, nasty_texts: list[str]) -> None:
    for text in nasty_texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_character_comes_back_and_none_gives_a_control_id(tokenizer: Tokenizer) -> None:
    everything = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    step = 1 << 14
    for start in range(0, len(everything), step):
        text = "".join(everything[start : start + step])
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {UNK_ID, BOS_ID, EOS_ID, PAD_ID} & set(ids)


def test_ids_are_those_of_sentencepiece(
    tokenizer: Tokenizer, oracle: sentencepiece.SentencePieceProcessor, texts: list[str], nasty_texts: list[str]
) -> None:
    for text in [*texts[:50], *nasty_texts, "".join(texts)]:
        if "\u2581" not in text:
            assert tokenizer.encode(text) == oracle.encode(text)
    assert (oracle.unk_id(), oracle.bos_id(), oracle.eos_id(), oracle.pad_id()) == (UNK_ID, BOS_ID, EOS_ID, PAD_ID)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (EOS_ID, PAD_ID, 400)


def test_a_newline_is_a_piece_of_its_own(tokenizer: Tokenizer, oracle: sentencepiece.SentencePieceProcessor) -> None:
    newline = oracle.piece_to_id("\n")
    assert newline != UNK_ID
    assert tokenizer.encode("\n\n\n") == [newline] * 3
    assert tokenizer.encode("the\nthe").count(newline) == 1


def test_the_word_mark_goes_through_bytes(tokenizer: Tokenizer, oracle: sentencepiece.SentencePieceProcessor) -> None:
    assert oracle.decode(oracle.encode("a\u2581b")) == "a b", "what happens without the detour"
    mark = [oracle.piece_to_id(piece) for piece in ("<0xE2>", "<0x96>", "<0x81>")]
    assert tokenizer.encode("a \u2581\u2581 b") == oracle.encode("a ") + mark + mark + oracle.encode(" b")


def test_control_ids_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("one"), EOS_ID, PAD_ID, PAD_ID]) == "one"


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("x\ud800y")


def test_training_gives_the_same_bytes_each_time(tokenizer: Tokenizer, texts: list[str]) -> None:
    again, report = train_tokenizer(iter(texts), 400)
    assert again.model == tokenizer.model
    assert again.sha256 == hashlib.sha256(tokenizer.model).hexdigest()
    assert (report.num_documents, report.num_bytes) == (len(texts), sum(len(text.encode()) for text in texts))
    assert report.num_skipped_lines == 0


def test_unigram_is_lossless_and_deterministic_too(texts: list[str], nasty_texts: list[str]) -> None:
    first, second = (train_tokenizer(texts[:100], 300, "unigram")[0] for _ in range(2))
    assert first.model == second.model
    for text in nasty_texts:
        assert first.decode(first.encode(text)) == text


def test_long_lines_are_counted_and_left_out(texts: list[str]) -> None:
    long = "x" * 200
    trained, report = train_tokenizer([*texts, f"short\n{long}\n{long}y"], 400, max_line_bytes=199)
    assert (report.num_skipped_lines, report.num_skipped_bytes) == (2, 401)
    assert trained.model == train_tokenizer([*texts, "short\n"], 400, max_line_bytes=199)[0].model


def test_characters_that_the_trainer_drops_lines_for_cost_no_line(texts: list[str]) -> None:
    with_marks = [text.replace(" the ", "\u2581\u2585\0") for text in texts]
    with_breaks = [text.replace(" the ", "\n\n\n") for text in texts]
    assert train_tokenizer(with_marks, 350)[0].model == train_tokenizer(with_breaks, 350)[0].model


def test_a_sample_is_even_and_does_not_depend_on_the_order(texts: list[str]) -> None:
    chosen = sample_texts(iter(texts), 100)
    assert chosen == sample_texts(reversed(texts), 100)
    assert len(set(chosen)) == 100
    assert set(chosen) <= set(texts)
    # 50 expected of each half, standard deviation 4.4
    assert 30 < len(set(chosen) & set(texts[: len(texts) // 2])) < 70
    assert set(sample_texts(texts, 50)) < set(chosen)
    assert sorted(sample_texts(texts, 10_000)) == sorted(texts)


def test_a_sample_holds_no_more_than_it_needs(texts: list[str]) -> None:
    alive: weakref.WeakSet[Text] = weakref.WeakSet()

    def corpus() -> Iterator[str]:
        for text in texts:
            alive.add(document := Text(text))
            yield document
            del document
            assert len(alive) <= 6

    assert len(sample_texts(corpus(), 5)) == 5


class Text(str):
    """A text that can be watched."""


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_beyond_the_text_is_refused_with_the_largest(model_type: str) -> None:
    texts = ["hello world\n"] * 5
    with pytest.raises(UserError) as raised:
        train_tokenizer(texts, 5000, model_type)  # type: ignore[arg-type]
    words = str(raised.value).split()
    assert str(raised.value).startswith("--vocab-size 5000 is larger than the text supports: at most ")
    assert train_tokenizer(texts, int(words[-1]), model_type)[0].vocab_size == int(words[-1])  # type: ignore[arg-type]


def test_a_vocabulary_without_room_for_bytes_is_refused_with_the_smallest(texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"--vocab-size 100 is too small: this text needs at least \d+") as raised:
        train_tokenizer(texts, 100)
    least = int(str(raised.value).split()[-1])
    assert train_tokenizer(texts, least)[0].vocab_size == least


@pytest.mark.parametrize("texts_without_lines", [[], ["\n\n"], ["x" * 20_000]])
def test_a_corpus_without_lines_is_refused(texts_without_lines: list[str]) -> None:
    with pytest.raises(UserError, match="no line to train a tokenizer on"):
        train_tokenizer(texts_without_lines, 300)


def test_an_error_of_the_corpus_passes_through_the_trainer() -> None:
    def corpus() -> Iterator[str]:
        yield "fine\n"
        raise UserError("corpus.txt:7: invalid UTF-8")

    with pytest.raises(UserError, match=r"^corpus\.txt:7: invalid UTF-8$"):
        train_tokenizer(corpus(), 300)


def test_load_reads_a_file_or_its_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    assert Tokenizer.load(tmp_path).sha256 == tokenizer.sha256
    assert Tokenizer.load(tmp_path / "tokenizer.model").sha256 == tokenizer.sha256
    with pytest.raises(UserError, match=r"missing cannot be read"):
        Tokenizer.load(tmp_path / "missing")
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(UserError, match=r"text\.model is not a sentencepiece model"):
        Tokenizer.load(tmp_path / "text.model")


def train_with_sentencepiece(texts: list[str], **options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", minloglevel=2, **options
    )
    return model.getvalue()


def test_a_model_that_alters_text_or_lacks_marks_is_refused(texts: list[str]) -> None:
    plain = train_with_sentencepiece(texts, vocab_size=100)
    with pytest.raises(UserError, match="has no padding"):
        Tokenizer(plain)
    lossy = train_with_sentencepiece(texts, vocab_size=400, pad_id=3, byte_fallback=True)
    with pytest.raises(UserError, match="alters text"):
        Tokenizer(lossy)
