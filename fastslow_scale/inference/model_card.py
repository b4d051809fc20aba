"""The README.md of an exported model: what the run was, in numbers, and how to load the folder."""

from __future__ import annotations

from fastslow_scale.config import Config
from fastslow_scale.monitor.metrics import FILE_NAME, read_metrics
from fastslow_scale.train.checkpoint_reader import CheckpointReader

VARIANTS = {
    "dense": "the fast path alone, a Llama decoder",
    "coupled": "a fast path and a slow one, coupled by a learned gate",
    "frozen": "a fast path and a slow one whose gate was held at zero",
    "frozen_slow": "a fast path and a slow one of random weights, coupled by a learned gate",
}


def model_card(reader: CheckpointReader, config: Config, architecture: str, parameters: int) -> str:
    """Markdown with Hugging Face's header. The validation loss is the last one measured up to the checkpoint's step."""
    model, slow = config.model, config.slow
    window = f", attention window {model.attention_window}" if model.attention_window else ""
    rows = {
        "variant": f"`{model.variant}`: {VARIANTS[model.variant]}",
        "architecture": f"`{architecture}`",
        "parameters": f"{parameters:,}",
        "fast path": f"{model.num_hidden_layers} layers of width {model.hidden_size}{window}",
    }
    if model.variant != "dense":
        rows["slow path"] = (
            f"over blocks of {slow.pool_size} tokens, width {slow.hidden_size}, {slow.num_layers} layers at each "
            f"exchange, after fast layers {', '.join(map(str, slow.exchange_after))}"
        )
    rows["vocabulary"] = f"{model.vocab_size:,}"
    rows["context"] = f"{config.train.seq_length:,} tokens"
    rows["trained on"] = f"{reader.step * config.train.tokens_per_step:,} tokens ({reader.step:,} steps)"
    measured = validation(reader)
    if measured is not None:
        step, loss = measured
        rows["validation loss"] = f"{loss:.4f} nats per token, at step {step:,}"
    trust = "" if model.variant == "dense" else ", trust_remote_code=True"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {model.variant.replace("_", " ").capitalize()} language model

Trained with fastslow-scale.

| | |
|---|---|
{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
inputs = tokenizer(["Once upon a time"], return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.batch_decode(ids, skip_special_tokens=True)[0])
```

The tokenizer is a sentencepiece model with byte fallback that alters no text. Its code lies beside it and needs the
package sentencepiece. In the training data a document ends with the end mark, and the next one begins after it: to
begin a new text, start from the id `tokenizer.eos_token_id`.
"""


def validation(reader: CheckpointReader) -> tuple[int, float] | None:
    """Step and loss of the run's last validation up to the checkpoint; None: none is known."""
    metrics = reader.path.parent.parent / FILE_NAME
    if not metrics.is_file():
        return None
    found = [
        (record["step"], record["validation_loss"])
        for record in read_metrics(metrics)
        if "validation_loss" in record and record["step"] <= reader.step
    ]
    return found[-1] if found else None
