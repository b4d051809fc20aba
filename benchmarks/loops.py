"""Training steps to be timed: our whole path, and plain loops around our model and around those of other libraries.

Each function takes a config of one process, of which the other libraries take the shapes of the fast path. It gives the
step, a function of [B, T + 1] tokens, and its model's parameters. All use torch's fused AdamW and clip the gradient.

In bf16 each does what its users do: our model and Megatron's have bf16 weights with fp32 masters, Hugging Face's and
litgpt's have fp32 weights under autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastslow_scale.config import Config
from fastslow_scale.parallel.mesh import local_device, single_process_mesh

Step = Callable[[torch.Tensor], None]
Loss = Callable[[torch.Tensor], torch.Tensor]


def engine(config: Config) -> tuple[Step, int]:
    """What the training loop does between two batches, at TP=1: labels, schedule, DeepSpeed, guard, stop signal."""
    from fastslow_scale.model.compiled import compile_inner_parts
    from fastslow_scale.model.model import build_model
    from fastslow_scale.train.batch import count_valid, inputs_and_labels, mean_loss
    from fastslow_scale.train.engine import Engine
    from fastslow_scale.train.guard import Guard
    from fastslow_scale.train.loop import agreed_signal
    from fastslow_scale.train.schedule import learning_rate

    mesh = single_process_mesh()
    model = build_model(config, mesh)
    if config.train.compile:
        compile_inner_parts(model)
    engine, guard = Engine(model, config, mesh), Guard(config.train)
    steps = 0

    def step(rows: torch.Tensor) -> None:
        nonlocal steps
        tokens, labels = inputs_and_labels(rows, pad_id=-1)
        valid = count_valid(labels, mesh)
        engine.set_learning_rate(learning_rate(config, steps))
        loss_sum = engine.forward(tokens, labels)
        loss = mean_loss(loss_sum, valid, mesh)
        update = engine.backward(loss_sum, valid, discard=loss > guard.skip_above)
        assert update is not None and guard.judge(loss.item(), update.grad_norm, update.applied) is None
        assert agreed_signal(0, mesh) is None
        steps += 1

    return step, count(engine.model)


def plain(config: Config) -> tuple[Step, int]:
    """Our model, torch's fused AdamW and clipping, nothing else."""
    from fastslow_scale.model.model import build_model
    from fastslow_scale.train.optimizer import build_optimizer

    mesh = single_process_mesh()
    model = build_model(config, mesh).to(mesh.device)
    optimizer = Masters(build_optimizer(model, config))
    return loop(model, optimizer, config, lambda rows: model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel())


def hugging_face(config: Config) -> tuple[Step, int]:
    """LlamaForCausalLM of the same shape with its own loss, as its users train it."""
    model = llama(config)
    return loop(model, adamw(model, config), config, lambda rows: llama_loss(model, rows), autocast=True)


def hugging_face_compiled(config: Config) -> tuple[Step, int]:
    """The same through torch.compile."""
    model = llama(config)
    compiled = torch.compile(model)
    return loop(model, adamw(model, config), config, lambda rows: llama_loss(compiled, rows), autocast=True)


def llama(config: Config) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = config.model
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.key_value_heads,
            max_position_embeddings=config.train.seq_length,
            rms_norm_eps=shape.rms_norm_eps,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    return model.train().to(local_device())


def llama_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """It shifts the labels itself."""
    loss: torch.Tensor = model(input_ids=rows[:, :-1], labels=rows[:, :-1], use_cache=False).loss
    return loss


def litgpt(config: Config) -> tuple[Step, int]:
    """litgpt's GPT as a Llama of the same shape, with the loss of its pretraining script."""
    from litgpt.config import Config as Shape
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    shape = config.model
    model = GPT(
        Shape(
            block_size=config.train.seq_length,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            n_layer=shape.num_hidden_layers,
            n_embd=shape.hidden_size,
            n_head=shape.num_attention_heads,
            n_query_groups=shape.key_value_heads,
            intermediate_size=shape.intermediate_size,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=shape.rms_norm_eps,
            mlp_class_name="LLaMAMLP",
        )
    ).to(local_device())

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = chunked_cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        return loss

    return loop(model, adamw(model, config), config, loss_of, autocast=True)


def megatron(config: Config) -> tuple[Step, int]:
    """megatron-core's GPTModel of the same shape in its local spec, which needs no Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    device = single_process_mesh().device
    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(config.train.seed)
    else:
        # It would switch to a random state of the GPU around every dropout, of which there is none here.
        random.get_cuda_rng_tracker().fork = contextlib.nullcontext
    shape, in_bf16 = config.model, config.train.dtype == "bf16"
    settings = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=in_bf16,
        params_dtype=torch.bfloat16 if in_bf16 else torch.float32,
    )
    model = GPTModel(
        settings,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        shape.vocab_size,
        config.train.seq_length,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
    ).to(device)
    length = config.train.seq_length
    positions = torch.arange(length, device=device)[None]
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(rows[:, :-1], positions, hidden, labels=rows[:, 1:]).mean()
        return loss

    return loop(model, Masters(adamw(model, config)), config, loss_of)


class Masters:
    """An optimizer of fp32 copies of weights in bf16; weights in fp32 are their own masters."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._weights: list[torch.Tensor] = []
        self._masters: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            for number, weight in enumerate(group["params"]):
                if weight.dtype != torch.float32:
                    group["params"][number] = weight.detach().float()
                    self._weights.append(weight)
                    self._masters.append(group["params"][number])

    def step(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._optimizer.step()
        if self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()
        for weight in self._weights:
            weight.grad = None


def loop(model: nn.Module, optimizer: Any, config: Config, loss_of: Loss, autocast: bool = False) -> tuple[Step, int]:
    """Forward, backward, clip, update. `autocast`: this is how the model computes in bf16."""
    on = autocast and config.train.dtype == "bf16"

    def step(rows: torch.Tensor) -> None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=True) if on else contextlib.nullcontext():
            loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, count(model)


def adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    settings = config.optimizer
    return torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
