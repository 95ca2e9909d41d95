"""A second opinion on the model code: the forward pass of a small GGUF file in numpy float64, whole prompt at once.

Owns one plain reading of the llama (Mixtral included), qwen2, qwen3, qwen3moe and gpt-oss architectures as GGUF
stores them. Must not import anything of
lamina and must stay simple enough to be checked by eye: no cache, no batching, no splitting.
"""

import math
from pathlib import Path

import numpy as np
from gguf import GGUFReader, quants
from numpy.typing import NDArray

Array = NDArray[np.float64]


class TinyModel:
    """The decoded weights and metadata of a GGUF file, and their forward pass."""

    def __init__(self, path: Path | str) -> None:
        reader = GGUFReader(path)
        self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        self.arch = str(self.metadata["general.architecture"])
        self.weights: dict[str, Array] = {}
        for tensor in reader.tensors:
            values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            self.weights[tensor.name] = values.reshape(tensor.shape.tolist()[::-1])
        self.num_heads = int(self._get("attention.head_count"))
        self.num_kv_heads = int(self._get("attention.head_count_kv", self.num_heads))
        self.head_dim = int(self._get("attention.key_length", int(self._get("embedding_length")) // self.num_heads))

    def logits(self, tokens: list[int]) -> Array:
        """Logits [len(tokens), vocab] of a prompt that starts at position 0."""
        cos, sin = self._rotation(len(tokens))
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(int(self._get("block_count"))):
            prefix = f"blk.{layer}."
            x = x + self._attention(prefix, self._norm(x, prefix + "attn_norm"), cos, sin)
            h = self._norm(x, prefix + ("post_attention_norm" if self.arch == "gpt-oss" else "ffn_norm"))
            if prefix + "ffn_gate_inp.weight" in self.weights:
                x = x + self._experts(prefix, h)
            else:
                gated = self._join(self._linear(h, prefix + "ffn_gate"), self._linear(h, prefix + "ffn_up"))
                x = x + self._linear(gated, prefix + "ffn_down")
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        result: Array = self._norm(x, "output_norm") @ head.T
        return result

    def greedy(self, tokens: list[int], num_tokens: int) -> list[int]:
        """The `num_tokens` most likely tokens after `tokens`, one by one, each from a pass over the whole text."""
        text = list(tokens)
        for _ in range(num_tokens):
            text.append(int(np.argmax(self.logits(text)[-1])))
        return text[len(tokens) :]

    def _get(self, key: str, default: object = None) -> float:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, int | float):
            raise KeyError(f"{self.arch}.{key} is missing or no number")
        return value

    def _norm(self, x: Array, name: str) -> Array:
        eps = self._get("attention.layer_norm_rms_epsilon")
        result: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * self.weights[name + ".weight"]
        return result

    def _linear(self, x: Array, name: str) -> Array:
        result: Array = x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", np.zeros(1))
        return result

    def _experts(self, prefix: str, x: Array) -> Array:
        """Token by token, expert by expert; shares sum to 1 in every family here."""
        scores = self._linear(x, prefix + "ffn_gate_inp")
        out = np.zeros_like(x)
        for token, row in enumerate(scores):
            chosen = np.argsort(-row, kind="stable")[: int(self._get("expert_used_count"))]
            exps = np.exp(row[chosen] - row.max())
            for expert, share in zip(chosen.tolist(), exps / exps.sum(), strict=True):
                gate, up = (
                    self._expert_linear(x[token], prefix + f"ffn_{part}_exps", expert) for part in ("gate", "up")
                )
                out[token] += share * self._expert_linear(self._join(gate, up), prefix + "ffn_down_exps", expert)
        return out

    def _expert_linear(self, x: Array, name: str, expert: int) -> Array:
        bias = self.weights.get(name + ".bias")
        result: Array = self.weights[name + ".weight"][expert] @ x
        return result if bias is None else result + bias[expert]

    def _join(self, gate: Array, up: Array) -> Array:
        if self.arch == "gpt-oss":
            gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1
            return gate / (1 + np.exp(-1.702 * gate)) * up
        return gate / (1 + np.exp(-gate)) * up

    def _attention(self, prefix: str, x: Array, cos: Array, sin: Array) -> Array:
        n = len(x)
        q = self._linear(x, prefix + "attn_q").reshape(n, self.num_heads, self.head_dim)
        k = self._linear(x, prefix + "attn_k").reshape(n, self.num_kv_heads, self.head_dim)
        v = self._linear(x, prefix + "attn_v").reshape(n, self.num_kv_heads, self.head_dim)
        if prefix + "attn_q_norm.weight" in self.weights:
            q, k = self._norm(q, prefix + "attn_q_norm"), self._norm(k, prefix + "attn_k_norm")
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        group = self.num_heads // self.num_kv_heads
        out = np.empty_like(q)
        for head in range(self.num_heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(self.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            if f"{self.arch}.attention.sliding_window" in self.metadata and int(prefix.split(".")[1]) % 2 == 0:
                scores[np.tril_indices(n, -int(self._get("attention.sliding_window")))] = -np.inf
            peak = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(axis=-1, keepdims=True)
            if prefix + "attn_sinks.weight" in self.weights:
                total = total + np.exp(self.weights[prefix + "attn_sinks.weight"][head] - peak)
            out[:, head] = weights / total @ v[:, head // group]
        return self._linear(out.reshape(n, -1), prefix + "attn_output")

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotate pairs of x [n, heads, head_dim]: adjacent ones for llama, halves for the others."""
        half = self.head_dim // 2
        first = np.s_[..., 0::2] if self.arch == "llama" else np.s_[..., :half]
        second = np.s_[..., 1::2] if self.arch == "llama" else np.s_[..., half:]
        out = np.empty_like(x)
        out[first] = x[first] * cos - x[second] * sin
        out[second] = x[second] * cos + x[first] * sin
        return out

    def _rotation(self, num_positions: int) -> tuple[Array, Array]:
        """cos and sin, each [positions, 1, head_dim / 2], of every angle with the file's scaling applied."""
        dim, base = self.head_dim, self._get("rope.freq_base", 10000.0)
        theta = base ** (-2.0 * np.arange(dim // 2) / dim)
        magnitude = 1.0
        kind = self.metadata.get(f"{self.arch}.rope.scaling.type", "none")
        if kind == "linear":
            theta = theta / self._get("rope.scaling.factor")
        elif kind == "yarn":
            factor, original = self._get("rope.scaling.factor"), self._get("rope.scaling.original_context_length")
            low, high = (dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (32.0, 1.0))
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0, 1)
            theta = theta / factor * ramp + theta * (1 - ramp)
            magnitude = 1 + 0.1 * math.log(factor)
        theta = theta / self.weights.get("rope_freqs.weight", np.ones(1))
        angle = np.arange(num_positions)[:, None, None] * theta
        return magnitude * np.cos(angle), magnitude * np.sin(angle)
