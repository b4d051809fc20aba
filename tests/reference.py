"""The model once more, written from the maths: plain torch, batch first, no parallelism, no shared code.

Weights come as a dictionary of whole tensors under the project's names. Slow and plain on purpose: explicit loops over
blocks, explicit masks, explicit softmax.
"""

from __future__ import annotations

import math

import torch

Weights = dict[str, torch.Tensor]


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu(x):
    return x / (1 + torch.exp(-x))


def rotate(x, theta):
    """x [B, T, heads, d]: the pair (x_i, x_{i + d/2}) turns by t * theta^(-2i/d)."""
    d = x.shape[-1]
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        for i in range(d // 2):
            angle = t * theta ** (-2 * i / d)
            a, b = x[:, t, :, i], x[:, t, :, i + d // 2]
            out[:, t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, t, :, i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def split_qkv(fused, heads, kv_heads):
    """Rows by key-value head: its query heads, its key head, its value head."""
    per, d = heads // kv_heads, fused.shape[0] // (heads + 2 * kv_heads)
    q, k, v = [], [], []
    for group in fused.split((per + 2) * d):
        q.append(group[: per * d])
        k.append(group[per * d : (per + 1) * d])
        v.append(group[(per + 1) * d :])
    return torch.cat(q), torch.cat(k), torch.cat(v)


def split_gate_up(fused, kv_heads):
    """Rows by group, as many groups as divide both sizes: its gate rows, then its up rows."""
    groups = math.gcd(fused.shape[0] // 2, kv_heads)
    gate, up = [], []
    for group in fused.split(fused.shape[0] // groups):
        half = group.shape[0] // 2
        gate.append(group[:half])
        up.append(group[half:])
    return torch.cat(gate), torch.cat(up)


def documents_of(tokens, eos_id):
    """[B, T]: the number of end marks up to each token, itself included."""
    ids, row_count = torch.zeros_like(tokens), tokens.shape[0]
    for row in range(row_count):
        number = 0
        for t in range(tokens.shape[1]):
            number += int(tokens[row, t] == eos_id)
            ids[row, t] = number
    return ids


def layer(w: Weights, name, x, heads, kv_heads, eps, theta, window, documents):
    batch, length, size = x.shape
    d = size // heads
    h = rms_norm(x, w[f"{name}.input_layernorm.weight"], eps)
    wq, wk, wv = split_qkv(w[f"{name}.self_attn.qkv_proj.weight"], heads, kv_heads)
    q = rotate((h @ wq.T).view(batch, length, heads, d), theta)
    k = rotate((h @ wk.T).view(batch, length, kv_heads, d), theta)
    v = (h @ wv.T).view(batch, length, kv_heads, d)
    rows = []
    for t in range(length):
        first = 0 if window is None else max(0, t - window + 1)
        per_head = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = (k[:, first : t + 1, group] * q[:, t : t + 1, head]).sum(-1) / math.sqrt(d)
            if documents is not None:
                scores[documents[:, first : t + 1] != documents[:, t : t + 1]] = -math.inf
            share = torch.exp(scores - scores.max(-1, keepdim=True).values)
            share = share / share.sum(-1, keepdim=True)
            per_head.append((share.unsqueeze(-1) * v[:, first : t + 1, group]).sum(1))
        rows.append(torch.cat(per_head, -1))
    x = x + torch.stack(rows, 1) @ w[f"{name}.self_attn.o_proj.weight"].T
    h = rms_norm(x, w[f"{name}.post_attention_layernorm.weight"], eps)
    gate, up = split_gate_up(w[f"{name}.mlp.gate_up_proj.weight"], kv_heads)
    return x + (silu(h @ gate.T) * (h @ up.T)) @ w[f"{name}.mlp.down_proj.weight"].T


def exchange(w: Weights, name, x, y, config, documents):
    slow, eps, theta = config.slow, config.model.rms_norm_eps, config.model.rope_theta
    size = slow.pool_size
    blocks = x.shape[1] // size
    p = torch.stack([x[:, b * size : (b + 1) * size].sum(1) / size for b in range(blocks)], 1)
    owners = None
    if documents is not None:
        owners = torch.stack([documents[:, (b + 1) * size - 1] for b in range(blocks)], 1)
        p = torch.stack([torch.stack(own_means(x[row], documents[row], size)) for row in range(x.shape[0])])
    entered = rms_norm(p, w[f"{name}.pool_norm.weight"], eps) @ w[f"{name}.pool_proj.weight"].T
    y = entered if y is None else y + entered
    for j in range(slow.num_layers):
        heads, kv_heads = slow.num_attention_heads, slow.num_key_value_heads
        y = layer(w, f"{name}.slow_layers.{j}", y, heads, kv_heads, eps, theta, None, owners)
    h = rms_norm(y, w[f"{name}.phi_norm.weight"], eps)
    c = w[f"{name}.gate"] * (silu(h @ w[f"{name}.phi_up.weight"].T) @ w[f"{name}.phi_down.weight"].T)
    if owners is None:
        tokens = [x[:, t] if t < size else x[:, t] + c[:, t // size - 1] for t in range(x.shape[1])]
        return torch.stack(tokens, 1), y
    rows = []
    for row in range(x.shape[0]):
        served = [t >= size and owners[row, t // size - 1] == documents[row, t] for t in range(x.shape[1])]
        own = [x[row, t] + c[row, t // size - 1] if served[t] else x[row, t] for t in range(x.shape[1])]
        rows.append(torch.stack(own))
    return torch.stack(rows), y


def own_means(x, documents, size):
    """Of each complete block, the mean over the tokens of its last token's document. x [T, D], documents [T]."""
    means = []
    for last in range(size - 1, x.shape[0], size):
        own = [x[t] for t in range(last - size + 1, last + 1) if documents[t] == documents[last]]
        means.append(sum(own) / len(own))
    return means


def logits(w: Weights, config, tokens: torch.Tensor, documents=None) -> torch.Tensor:
    """[B, T] -> [B, T, vocab_size]. documents [B, T]: what must not see each other has different numbers."""
    model, slow = config.model, config.slow
    x, y = w["embed_tokens.weight"][tokens], None
    for i in range(model.num_hidden_layers):
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        window = model.attention_window
        x = layer(w, f"layers.{i}", x, heads, kv_heads, model.rms_norm_eps, model.rope_theta, window, documents)
        if model.variant != "dense" and i + 1 in slow.exchange_after and tokens.shape[1] > slow.pool_size:
            x, y = exchange(w, f"exchanges.{slow.exchange_after.index(i + 1)}", x, y, config, documents)
    x = rms_norm(x, w["norm.weight"], model.rms_norm_eps)
    head = w["embed_tokens.weight"] if model.tie_word_embeddings else w["lm_head.weight"]
    return (x @ head.T)[..., : model.vocab_size]


def loss_sum(w: Weights, config, tokens, labels, documents=None) -> torch.Tensor:
    """Sum of -log p(label) over the labels that are not negative."""
    z = logits(w, config, tokens, documents)
    z = z - z.max(-1, keepdim=True).values
    log_p = z - torch.log(torch.exp(z).sum(-1, keepdim=True))
    valid = labels >= 0
    return -log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)[valid].sum()
