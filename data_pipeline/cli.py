"""`fastslow data ...`: from text to shards, and a look at what is in them."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.arguments import finite, refuse_empty
from data_pipeline.errors import UserError
from data_pipeline.faults import FaultCounts, stop_at
from data_pipeline.files import write_durably
from data_pipeline.folder import CacheSettings, open_folder
from data_pipeline.index import SPLITS, Manifest
from data_pipeline.inputs import InputFiles, find_files
from data_pipeline.progress import byte_progress
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer, train_tokenizer

app = typer.Typer(no_args_is_help=True, help="Tokenizer, shards, and what is in them.", pretty_exceptions_enable=False)


class ModelKind(StrEnum):
    bpe = "bpe"
    unigram = "unigram"


class OnError(StrEnum):
    stop = "stop"
    skip = "skip"


class PackingKind(StrEnum):
    concat = "concat"
    best_fit = "best-fit"


class Split(StrEnum):
    train = "train"
    validation = "validation"


Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        metavar="GLOB...",
        help="Files, folders, globs, URLs. .txt, .md, code: a document each; .jsonl, .parquet: one a row; .gz, .zst.",
    ),
]
MoreInputs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MORE]...", help="Further inputs: what the shell makes of an unquoted glob."),
]
TextField = Annotated[str, typer.Option(help="The field (column) of a row that holds the text.")]
MoreEndings = Annotated[
    list[str] | None,
    typer.Option("--ext", help="A further file ending to read as text, such as .json; may be repeated."),
]
ErrorRule = Annotated[OnError, typer.Option(help="At an unusable document: stop, or skip it, count it and list it.")]
Fraction = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the documents held out for validation.")]
Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="A folder written by `data shard` or `data demo`, or its URL.")
]
CacheDir = Annotated[Path, typer.Option(help="Where the shards of a URL are kept.")]
CacheGb = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="The most that all shards in --cache-dir may take.")
]
Seed = Annotated[int, typer.Option(help="Seed of the order; 0 shows what a run with train.seed=0 sees.")]
CACHE = CacheSettings()


@app.command()
def demo(output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("data/demo")) -> None:
    """Write the small corpus of configs/tiny.yaml: the King James Bible, its tokenizer and shards."""
    from data_pipeline.demo import build_demo, find_corpus, finished_demo

    corpus = find_corpus()
    manifest = finished_demo(output, corpus)
    if manifest is not None:
        _say(f"{output} is there already")
    else:
        with byte_progress("encoding", corpus.stat().st_size) as on_bytes:
            manifest = build_demo(output, corpus, on_bytes)
        _say(f"wrote {output}")
    _print_counts(manifest)


@app.command()
def planted(output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("data/planted")) -> None:
    """Write the texts of configs/planted.yaml, whose letters can only be foretold by remembering far back."""
    from data_pipeline.planted import build_planted

    manifest = build_planted(output)
    _say(f"wrote {output}")
    _print_counts(manifest)


@app.command()
def tokenizer(
    input: Inputs,
    vocab_size: Annotated[int, typer.Option(min=1, help="Number of pieces.")],
    output: Annotated[Path, typer.Option(help="The folder to write tokenizer.model into.")],
    more: MoreInputs = None,
    model: Annotated[ModelKind, typer.Option(help="bpe trains fast; unigram encodes fast.")] = ModelKind.bpe,
    text_field: TextField = "text",
    ext: MoreEndings = None,
    on_error: ErrorRule = OnError.stop,
    sample_documents: Annotated[
        int | None, typer.Option(min=1, help="Train on so many documents, drawn evenly; bounds the memory.")
    ] = None,
    max_line_bytes: Annotated[int, typer.Option(min=1, help="Longer lines are left out of the training.")] = 1 << 14,
) -> None:
    """Train a lossless sentencepiece tokenizer."""
    from data_pipeline.readers import read_documents
    from data_pipeline.tokenizer import sample_texts

    target = output / MODEL_NAME
    if target.exists():
        raise UserError(f"--output {target} exists already: remove it or choose another --output")
    files = _find(input, more, ext)
    faults = FaultCounts()
    with byte_progress("reading", files.num_bytes) as on_bytes:
        on_fault = faults.add if on_error is OnError.skip else stop_at
        documents = read_documents(files.files, text_field, on_fault, on_bytes)
        texts = (document.text for document in documents)
        chosen = texts if sample_documents is None else sample_texts(texts, sample_documents)
        trained, report = train_tokenizer(chosen, vocab_size, model.value, max_line_bytes)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_durably(target, trained.model)
    except OSError as error:
        raise UserError(f"--output {target} cannot be written: {error.strerror}") from None
    megabytes = report.num_bytes / 1e6
    _say(f"wrote {target}: {trained.vocab_size} pieces from {report.num_documents} documents, {megabytes:.2f} MB")
    for line in faults.lines():
        _say(line)
    if report.num_skipped_lines:
        _say(
            f"left out of the training: {report.num_skipped_lines} lines longer than {max_line_bytes} bytes, "
            f"{report.num_skipped_bytes / 1e6:.2f} MB (--max-line-bytes)"
        )
    _say(f"sha256 {trained.sha256}")


@app.command()
def shard(
    input: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.model, or the folder that holds it.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a training sequence.")],
    output: Annotated[Path, typer.Option(help="The folder to write; it must not exist yet.")],
    more: MoreInputs = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read and encode.")] = 1,
    text_field: TextField = "text",
    ext: MoreEndings = None,
    on_error: ErrorRule = OnError.stop,
    validation_fraction: Fraction = 0.05,
    seed: Annotated[int, typer.Option(help="Shuffles the documents before packing.")] = 0,
    packing: Annotated[
        PackingKind, typer.Option(help="concat fills every row; best-fit keeps documents whole and pads rows.")
    ] = PackingKind.concat,
    dedup: Annotated[bool, typer.Option("--dedup", help="Leave out exact copies of documents.")] = False,
    shard_mb: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB.")] = 256,
) -> None:
    """Encode a corpus and write it as webdataset shards of packed sequences.

    Given again, the same command goes on where an interrupted one stopped.
    """
    from data_pipeline.encode import Reading
    from data_pipeline.files import refuse_existing
    from data_pipeline.pool import Corpus
    from data_pipeline.shards import Layout, write_data_folder

    refuse_existing(output)
    loaded = Tokenizer.load(tokenizer)
    files = _find(input, more, ext)
    layout = Layout(seq_len, validation_fraction, seed, packing.value, dedup, shard_mb << 20)
    corpus = Corpus(files, Reading(text_field, skip_faults=on_error is OnError.skip))
    start = time.monotonic()
    try:
        with byte_progress("encoding", files.num_bytes) as progress:
            manifest = write_data_folder(
                output,
                corpus,
                loaded,
                layout,
                workers=workers,
                on_bytes=progress,
                on_kept=progress.shorten,
                say=_say,
            )
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from what is encoded")
        raise typer.Exit(130) from None
    _say(f"wrote {output} in {time.monotonic() - start:.1f} s")
    _print_counts(manifest)


@app.command()
def verify(folder: Folder, cache_dir: CacheDir = CACHE.folder, cache_gb: CacheGb = CACHE.gigabytes) -> None:
    """Read every byte: checksums, sizes and counts. Exit 1 names each damaged shard and member."""
    from data_pipeline.verify import find_damage

    opened = open_folder(folder, CacheSettings(cache_dir, cache_gb))
    manifest = Manifest.load(opened.path)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    with byte_progress("verifying", sum(shard.bytes for shard in shards)) as on_bytes:
        damage = list(find_damage(opened, manifest, on_bytes))
    for line in damage:
        _say(f"damaged: {line}")
    if damage:
        raise typer.Exit(1)
    _say(f"{folder} is whole: {len(shards)} shards, {sum(split.tokens for split in manifest.splits.values())} tokens")


@app.command()
def info(folder: Folder, cache_dir: CacheDir = CACHE.folder, cache_gb: CacheGb = CACHE.gigabytes) -> None:
    """Print documents, tokens, shards and bytes per token."""
    _print_counts(Manifest.load(open_folder(folder, CacheSettings(cache_dir, cache_gb)).path))


@app.command()
def sample(
    folder: Folder,
    n: Annotated[int, typer.Option("--n", min=1, help="How many sequences.")] = 3,
    split: Annotated[Split, typer.Option(help="train or validation.")] = Split.train,
    seed: Seed = 0,
    cache_dir: CacheDir = CACHE.folder,
    cache_gb: CacheGb = CACHE.gigabytes,
) -> None:
    """Print decoded sequences, as a training run meets them."""
    from data_pipeline.order import SampleOrder
    from data_pipeline.stream import TokenDataset

    dataset = TokenDataset.open(folder, split.value, cache=CacheSettings(cache_dir, cache_gb))
    loaded = Tokenizer.load(dataset.tokenizer_path)
    order = SampleOrder(dataset.num_samples, dataset.manifest.rows_per_member, seed)
    for sample_id in order(0, min(n, dataset.num_samples)).tolist():
        _say(f"--- {split.value} sample {sample_id}")
        tokens = dataset.rows([sample_id])[0, 1:]
        _say("\n<end of document>\n".join(loaded.decode(part) for part in _split_at(tokens.tolist(), dataset.eos_id)))


@app.command()
def order(
    folders: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="One data folder or URL, or those of a mixture.")
    ],
    start: Annotated[int, typer.Option("--from", min=0, help="First position: step k begins at k x batch size.")] = 0,
    count: Annotated[int, typer.Option(min=0, help="How many positions.")] = 10,
    weights: Annotated[str | None, typer.Option(help="Of a mixture: as many numbers, such as 0.7,0.3.")] = None,
    seed: Seed = 0,
    cache_dir: CacheDir = CACHE.folder,
    cache_gb: CacheGb = CACHE.gigabytes,
) -> None:
    """Print which sample a run sees at each position, and where it lies: what an audit of a run needs."""
    from data_pipeline.mixture import Mixture, Reader, sources_of
    from data_pipeline.stream import TokenDataset

    cache = CacheSettings(cache_dir, cache_gb)
    if len(folders) == 1:
        reader = Reader(TokenDataset.open(folders[0], cache=cache), seed)
    else:
        shares = _numbers("--weights", weights, len(folders))
        sources = sources_of((folder, share, folder) for folder, share in zip(folders, shares, strict=True))
        reader = Reader(Mixture.open(sources, cache=cache), seed)
    for place in reader.audit(start, count):
        _say(f"position {place.position} epoch {place.epoch} sample {place.sample}: {place.member} row {place.row}")


def _numbers(option: str, text: str | None, count: int) -> list[float]:
    """Positive numbers with commas between; all 1 where nothing is given."""
    try:
        numbers = [float(part) for part in text.split(",")] if text else [1.0] * count
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 < number < float("inf") for number in numbers):
        raise UserError(f"{option} must be {count} positive numbers with commas between (got {text})")
    return numbers


def _split_at(tokens: list[int], mark: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _find(inputs: list[str], more: list[str] | None, more_endings: list[str] | None) -> InputFiles:
    files = find_files([*inputs, *(more or [])], more_endings or [])
    if files.num_ignored:
        _say(f"ignoring {files.num_ignored} files of other kinds in the named folders")
    if files.num_empty:
        _say(f"ignoring {files.num_empty} empty code files")
    return files


def _print_counts(manifest: Manifest) -> None:
    for name in SPLITS:
        split = manifest.splits[name]
        if not split.rows:
            _say(f"{name}: empty: the corpus has too few documents to hold one out; a run cannot validate on it")
            continue
        text = f"{split.documents} documents, {split.characters} characters, {split.bytes} bytes"
        rate = f"{split.bytes / split.tokens:.3f} bytes/token"
        rows = f"{split.rows} sequences of {manifest.seq_length}, {len(split.shards)} shards"
        _say(f"{name}: {text}, {split.tokens} tokens, {rate}, {rows}")
    hashes = f"tokenizer {manifest.tokenizer_sha256[:12]}, data {manifest.fingerprint[:12]}"
    _say(f"vocabulary {manifest.vocab_size}, {manifest.dtype}, {hashes}")


def _say(line: str) -> None:
    typer.echo(line)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit; a `UserError` becomes one line and status 2."""
    try:
        refuse_empty(sys.argv[1:] if arguments is None else arguments)
        app(arguments)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
