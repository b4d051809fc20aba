"""A fast-slow language model for Hugging Face transformers. Needs torch and transformers only.

The fast path is a Llama decoder. After each fast layer named in `slow.exchange_after` (counted from 1), the mean of
every complete block of P = `slow.pool_size` tokens enters the slow path, and what that answers is added to the tokens
of the next block:

    p_b = mean of x over the tokens of block b
    y   = y + pool_proj(pool_norm(p))              then `slow.num_layers` Llama layers, causal over the blocks
    x_t = x_t + gate * phi(y)_{t // P - 1}         phi(y) = phi_down(silu(phi_up(phi_norm(y))))

Positions and blocks count from each row's first token that is not padding. While generating, the slow path runs when a
block ends: it keeps its own keys and values, and a running sum of the block that is not complete.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

Rope = tuple[torch.Tensor, torch.Tensor]

# transformers 5.24 renamed past_key_values.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class FastSlowConfig(PretrainedConfig):
    """Llama's words for the fast path; `slow` holds the sizes of the slow one.

    Args:
        attention_window: tokens that a token sees, itself included; None for all before it.
        slow: pool_size, exchange_after, num_layers, hidden_size, intermediate_size, num_attention_heads,
            num_key_value_heads, phi_intermediate_size.
    """

    model_type = "fastslow"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache"]

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 2,
        max_position_embeddings: int = 512,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
        attention_window: int | None = None,
        initializer_range: float = 0.02,
        slow: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.attention_window = attention_window
        self.initializer_range = initializer_range
        self.slow = slow or {
            "pool_size": 8,
            "exchange_after": [max(1, num_hidden_layers // 2)],
            "num_layers": 1,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "phi_intermediate_size": 2 * hidden_size,
        }
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class TokenMemory:
    """Keys and values of a fast layer, one for each token, padding included: [B, G, T, head_dim]."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of new tokens, [B, G, t, head_dim] -> those of all."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self.keys, self.values = k, v
        return k, v

    def reorder(self, rows: torch.Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class BlockMemory(TokenMemory):
    """Keys and values of a slow layer, [B, G, S, head_dim]: block b of a row at place b, zeros behind a row's last."""

    blocks: Blocks

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of new blocks, [B, G, m, head_dim] -> those of all. What a row has fewer than m is left out."""
        rows, new = self.blocks.ending.nonzero(as_tuple=True)
        places = self.blocks.complete[rows] + new
        size = int((self.blocks.complete + self.blocks.ended).max())
        grown = []
        for old, added in ((self.keys, k), (self.values, v)):
            whole = added.new_zeros(*added.shape[:2], size, added.shape[3])
            if old is not None:
                whole[:, :, : old.shape[2]] = old
            whole[rows, :, places] = added[rows, :, new]
            grown.append(whole)
        self.keys, self.values = grown
        return self.keys, self.values


class ExchangeMemory:
    """What an exchange remembers of each row.

    Attributes:
        block_sum: the sum of x over the tokens of the block that is not complete, [B, D], at least in fp32.
        given: what the last complete block gives to the tokens of the one after it, [B, D].
        layers: of the slow layers.
    """

    def __init__(self, num_layers: int):
        self.block_sum: torch.Tensor | None = None
        self.given: torch.Tensor | None = None
        self.layers = [BlockMemory() for _ in range(num_layers)]

    def reorder(self, rows: torch.Tensor) -> None:
        if self.block_sum is not None and self.given is not None:
            self.block_sum, self.given = self.block_sum.index_select(0, rows), self.given.index_select(0, rows)
        for layer in self.layers:
            layer.reorder(rows)


class FastSlowCache:
    """What the model remembers of B texts. The model makes it; it is passed back as `cache` or `past_key_values`."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, config: FastSlowConfig):
        self.real: torch.Tensor | None = None  # [B, T]: which of the tokens are not padding
        self.layers = [TokenMemory() for _ in range(config.num_hidden_layers)]
        self.exchanges = [ExchangeMemory(config.slow["num_layers"]) for _ in config.slow["exchange_after"]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens taken in so far, padding included."""
        return 0 if self.real is None else self.real.shape[1]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on as what row beam_idx[i] was."""
        if self.real is not None:
            self.real = self.real.index_select(0, beam_idx.to(self.real.device))
        for layer in self.layers:
            layer.reorder(beam_idx)
        for exchange in self.exchanges:
            exchange.reorder(beam_idx)


class Blocks:
    """Where the t new tokens of each row stand among its blocks.

    Attributes:
        complete: blocks that were complete before them, [B].
        ended: blocks that they complete, [B]; `most` is the largest.
        ending: which of the `most` new blocks a row really has, [B, most].
        slot: 0 for a token of the block that was begun, 1 for one of the next, and so on, [B, t].
        real: whether it is no padding, [B, t].
    """

    def __init__(self, real: torch.Tensor, positions: torch.Tensor, new: int, pool_size: int):
        counts = real.sum(1)
        self.real = real[:, -new:]
        self.complete = (counts - self.real.sum(1)) // pool_size
        self.ended = counts // pool_size - self.complete
        self.most = int(self.ended.max())
        self.ending = torch.arange(self.most, device=real.device) < self.ended[:, None]
        self.slot = (positions[:, -new:] // pool_size - self.complete[:, None]).clamp(0, self.most)

    @property
    def positions(self) -> torch.Tensor:
        """The new blocks' own positions, [B, most]."""
        return self.complete[:, None] + torch.arange(self.most, device=self.complete.device)

    def seen(self) -> torch.Tensor:
        """[B, 1, most, S]: which blocks a new one sees, itself included."""
        all_blocks = torch.arange(int((self.complete + self.ended).max()), device=self.complete.device)
        return (all_blocks <= self.positions[..., None])[:, None]


def rope_at(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """cos and sin of the angles of positions [B, t], both [B, 1, t, head_dim]; taken in fp64 and rounded once."""
    i = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[:, None, :, None].double() * theta ** (-i / head_dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama's half-split rotation of [B, H, t, head_dim]."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = hidden_size // heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rope: Rope, seen: torch.Tensor, memory: TokenMemory) -> torch.Tensor:
        """x [B, t, D] and seen [B, 1, t, T] -> [B, t, D]."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = memory.extend(rotate(k, rope), v)
        out = F.scaled_dot_product_attention(rotate(q, rope), k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer, fast or slow."""

    def __init__(self, hidden_size: int, intermediate_size: int, heads: int, kv_heads: int, eps: float):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = Attention(hidden_size, heads, kv_heads)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = MLP(hidden_size, intermediate_size)

    def forward(self, x: torch.Tensor, rope: Rope, seen: torch.Tensor, memory: TokenMemory) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, seen, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Exchange(nn.Module):
    """Fast to slow and back, after one fast layer."""

    def __init__(self, config: FastSlowConfig):
        super().__init__()
        slow, eps, width = config.slow, config.rms_norm_eps, config.slow["hidden_size"]
        sizes = (slow["intermediate_size"], slow["num_attention_heads"], slow["num_key_value_heads"])
        self.pool_size = slow["pool_size"]
        self.pool_norm = RMSNorm(config.hidden_size, eps)
        self.pool_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.slow_layers = nn.ModuleList(Layer(width, *sizes, eps) for _ in range(slow["num_layers"]))
        self.phi_norm = RMSNorm(width, eps)
        self.phi_up = nn.Linear(width, slow["phi_intermediate_size"], bias=False)
        self.phi_down = nn.Linear(slow["phi_intermediate_size"], config.hidden_size, bias=False)
        self.gate = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        blocks: Blocks,
        memory: ExchangeMemory,
        rope: Rope | None,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, t, D], and y [B, m, D_slow] of the m blocks that end here or None -> the new x and y.

        rope, seen: for the slow layers; None where no row's block ends: then the slow path does not run.
        """
        rows = torch.arange(x.shape[0], device=x.device)
        if memory.block_sum is None or memory.given is None:
            memory.given = torch.zeros_like(x[:, 0])
            memory.block_sum = memory.given.to(torch.promote_types(x.dtype, torch.float32))
        slot = blocks.slot[..., None].expand_as(x)
        begun = F.pad(memory.block_sum[:, None], (0, 0, 0, blocks.most))
        sums = begun.scatter_add(1, slot, (x * blocks.real[..., None]).to(begun.dtype))
        memory.block_sum = sums[rows, blocks.ended]

        given = memory.given[:, None]
        if rope is not None and seen is not None:
            entered = self.pool_proj(self.pool_norm((sums[:, :-1] / self.pool_size).to(x.dtype)))
            y = entered if y is None else y + entered
            for layer, remembered in zip(self.slow_layers, memory.layers, strict=True):
                remembered.blocks = blocks
                y = layer(y, rope, seen, remembered)
            phi = self.phi_down(F.silu(self.phi_up(self.phi_norm(y))))
            given = torch.cat([given, self.gate * phi], 1)
        memory.given = given[rows, blocks.ended]
        return x + given.gather(1, slot), y


class FastSlowDecoder(nn.Module):
    """Embedding, fast layers, the exchanges between them, norm."""

    def __init__(self, config: FastSlowConfig):
        super().__init__()
        self.config = config
        sizes = (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config.hidden_size, *sizes, config.rms_norm_eps) for _ in range(config.num_hidden_layers)
        )
        self.exchanges = nn.ModuleList(Exchange(config) for _ in config.slow["exchange_after"])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: torch.Tensor, real: torch.Tensor, cache: FastSlowCache) -> torch.Tensor:
        """New tokens [B, t]; real [B, T] says which of all tokens are not padding -> [B, t, D]."""
        config, slow, new = self.config, self.config.slow, tokens.shape[1]
        x = self.embed_tokens(tokens)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        seen = self._seen(real, positions, new)
        rope = rope_at(
            positions[:, -new:], config.hidden_size // config.num_attention_heads, config.rope_theta, x.dtype
        )
        blocks = Blocks(real, positions, new, slow["pool_size"])
        slow_rope = slow_seen = None
        if blocks.most:
            slow_head_dim = slow["hidden_size"] // slow["num_attention_heads"]
            slow_rope = rope_at(blocks.positions, slow_head_dim, config.rope_theta, x.dtype)
            slow_seen = blocks.seen()

        exchange_at = {layer: k for k, layer in enumerate(slow["exchange_after"])}
        y = None
        for number, (layer, memory) in enumerate(zip(self.layers, cache.layers, strict=True), start=1):
            x = layer(x, rope, seen, memory)
            if number in exchange_at:
                k = exchange_at[number]
                x, y = self.exchanges[k](x, y, blocks, cache.exchanges[k], slow_rope, slow_seen)
        cache.real = real
        return self.norm(x)

    def _seen(self, real: torch.Tensor, positions: torch.Tensor, new: int) -> torch.Tensor:
        """[B, 1, t, T]: which tokens a new one sees. Padding sees itself too, so that it stays a number."""
        column = torch.arange(real.shape[1], device=real.device)
        distance = column[-new:, None] - column
        seen = (distance >= 0) & real[:, None]
        if self.config.attention_window is not None:
            seen &= positions[:, -new:, None] - positions[:, None] < self.config.attention_window
        return (seen | (distance == 0))[:, None]


class FastSlowForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder and its head."""

    config_class = FastSlowConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    # Tokens cannot be taken back out of the slow path: generate() then refuses to draft with another model.
    _is_stateful = True
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: FastSlowConfig):
        super().__init__(config)
        self.model = FastSlowDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: FastSlowCache | None = None,
        past_key_values: FastSlowCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor, ...]:
        """Logits of the token after each.

        Args:
            input_ids: [B, t], the tokens that come after those in the cache.
            attention_mask: [B, T] for all tokens, those in the cache included; 0 for padding. None: there is none.
            cache, past_key_values: what an earlier call returned; two names of one thing.
            labels: [B, t], the same ids as `input_ids`, -100 where no loss is wanted.
            logits_to_keep: only those of the last so many tokens; 0 for all.

        Raises:
            ValueError: a mask of another size, or a cache of another kind.
        """
        given = cache if cache is not None else past_key_values
        if given is not None and not isinstance(given, FastSlowCache):
            raise ValueError(
                f"the cache must be a FastSlowCache that this model returned, not a {type(given).__name__}"
            )
        memory = FastSlowCache(self.config) if given is None else given
        total = memory.get_seq_length() + input_ids.shape[1]
        if attention_mask is not None:
            if attention_mask.shape != (input_ids.shape[0], total):
                raise ValueError(
                    f"attention_mask must be {(input_ids.shape[0], total)}, not {tuple(attention_mask.shape)}"
                )
            real = attention_mask.bool()
        else:
            real = torch.ones_like(input_ids, dtype=torch.bool)
            if memory.real is not None:
                real = torch.cat([memory.real, real], 1)
        hidden = self.model(input_ids, real, memory)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)

        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        keep = use_cache if use_cache is not None else not self.training
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: memory if keep else None})
        return output if return_dict is not False else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: FastSlowCache | None = None,
        past_key_values: FastSlowCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the cache has not seen. Positions follow from the mask, so generate()'s own are not used."""
        memory = cache if cache is not None else past_key_values
        if memory is not None:
            total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            input_ids = input_ids[:, memory.get_seq_length() - total :]
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, CACHE: memory, "use_cache": use_cache}
        return inputs | {name: kwargs[name] for name in ("logits_to_keep",) if name in kwargs}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
