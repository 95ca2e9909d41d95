"""Has llama.cpp continue twenty prompts greedily and writes the logits along the way as compact JSON.

    python tests/goldens/make_llama_goldens.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf \
        --out tests/goldens/smollm2_logits.json --f32-out tests/goldens/smollm2_f32_logits.json

README.md beside this file describes the result and how to compare with it; `golden_variants` measures what it is worth.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from golden_prompts import CHAT_PROMPTS, EXACT_LENGTHS, F32_PROMPTS, TEMPLATE_CHATS, TEXT_PROMPTS, Chat
from golden_variants import compare, f32_context, force, measure_variants
from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # type: ignore[import-not-found]
from llama_peer import UNITS_PER_NAT, PeerContext, PeerModel, file_facts, log_softmax, peer_facts

NUM_CONTINUED = 32
NUM_TOP = 64


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt and its greedy continuation; logits[i] predicts continuation[i], float32 [32, vocabulary]."""

    prompt: list[int]
    continuation: list[int]
    logits: npt.NDArray[np.float32]


def continue_greedily(context: PeerContext, prompt: list[int]) -> Run:
    """Feeds the prompt in one batch, then the most likely token one by one (also past an end-of-text token)."""
    context.clear()
    rows = [context.feed(prompt)[0]]
    while len(rows) < NUM_CONTINUED:
        rows.append(context.feed([int(rows[-1].argmax())])[0])
    return Run(prompt, [int(row.argmax()) for row in rows], np.stack(rows))


def pack_run(run: Run) -> dict[str, Any]:
    """The JSON form of a run: `ids`, `cont`, and per position `top` ids, `nlp` and `rest` in 1e-5 nats below 0."""
    logprobs = log_softmax(run.logits)
    order = np.argsort(-logprobs, axis=-1, kind="stable")
    top = order[:, :NUM_TOP]
    rest = np.exp(np.take_along_axis(logprobs, order[:, NUM_TOP:], axis=-1)).sum(axis=-1)
    top_units = np.rint(-np.take_along_axis(logprobs, top, axis=-1) * UNITS_PER_NAT).astype(int)
    rest_units = np.rint(-np.log(rest) * UNITS_PER_NAT).astype(int)
    return {
        "ids": run.prompt,
        "cont": run.continuation,
        "top": top.tolist(),
        "nlp": top_units.tolist(),
        "rest": rest_units.tolist(),
    }


def render(model: PeerModel, chat: Chat, *, add_generation_prompt: bool) -> str:
    """The chat through the template in the model file, by llama-cpp-python's Jinja formatter."""
    formatter = Jinja2ChatFormatter(
        template=model.chat_template(),
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        add_generation_prompt=add_generation_prompt,
    )
    messages: Any = [{"role": role, "content": content} for role, content in chat]
    return str(formatter(messages=messages).prompt)


def pack_chat(model: PeerModel, chat: Chat, *, add_generation_prompt: bool) -> dict[str, Any]:
    """One rendered chat and its ids, control tokens parsed."""
    text = render(model, chat, add_generation_prompt=add_generation_prompt)
    return {
        "messages": [{"role": role, "content": content} for role, content in chat],
        "add_generation_prompt": add_generation_prompt,
        "text": text,
        "ids": model.tokenize(text, add_special=False, parse_special=True),
    }


def collect_prompts(model: PeerModel) -> list[dict[str, Any]]:
    """The prompts without their runs. Raises ValueError if one that must have a certain length has not."""
    chats = [
        {"name": name, "parse_special": True} | pack_chat(model, chat, add_generation_prompt=True)
        for name, chat in CHAT_PROMPTS.items()
    ]
    texts: list[dict[str, Any]] = [
        {
            "name": name,
            "parse_special": False,
            "text": text,
            "ids": model.tokenize(text, add_special=False, parse_special=False),
        }
        for name, text in TEXT_PROMPTS.items()
    ]
    for prompt in texts:
        name, length = prompt["name"], len(prompt["ids"])
        if EXACT_LENGTHS.get(name, length) != length:
            raise ValueError(f"prompt {name} has {length} tokens, not {EXACT_LENGTHS[name]}: edit its text")
    return chats + texts


def collect_chats(model: PeerModel) -> dict[str, dict[str, Any]]:
    """Every chat rendered with a generation prompt and, under its name plus `_closed`, without."""
    return {
        f"{name}{'' if generate else '_closed'}": pack_chat(model, chat, add_generation_prompt=generate)
        for name, chat in (TEMPLATE_CHATS | CHAT_PROMPTS).items()
        for generate in (True, False)
    }


def force_f32(path: Path, runs: list[Run]) -> tuple[list[Run], dict[str, float]]:
    """The same prompts and continuations on the dequantised model, and how much feeding one by one changes them."""
    context = f32_context(path)
    f32_runs = [Run(run.prompt, run.continuation, force(context, run, one_batch=True)) for run in runs]
    stepped = [force(context, run, one_batch=False) for run in runs]
    return f32_runs, compare(f32_runs, stepped, NUM_TOP)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")
    print(f"{path}: {path.stat().st_size} bytes; variants {json.dumps(value['variants'], indent=1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--f32-out", type=Path, required=True, help="JSON file to write, of the dequantised model")
    arguments = parser.parse_args()
    model = PeerModel(arguments.model, vocab_only=False)
    context = PeerContext(model)
    prompts = collect_prompts(model)
    runs = [continue_greedily(context, prompt["ids"]) for prompt in prompts]
    f32_runs, f32_stepped = force_f32(arguments.model, runs)
    variants = measure_variants(model, runs, NUM_TOP)
    variants["f32_weights"] = compare(runs, [run.logits for run in f32_runs], NUM_TOP)
    facts = {"format": 1, "peer": peer_facts(), "model": file_facts(arguments.model)}
    facts |= {"units_per_nat": UNITS_PER_NAT, "num_top": NUM_TOP}
    goldens = facts | {
        "settings": "default context: one thread, f16 KV cache, prompt in one batch, then one token at a time; no BOS",
        "variants": variants,
        "prompts": [prompt | pack_run(run) for prompt, run in zip(prompts, runs, strict=True)],
        "chats": collect_chats(model),
    }
    f32_goldens = facts | {
        "settings": "model dequantised to f32, f32 KV cache, no flash attention, prompt and continuation in one batch",
        "variants": {"one_by_one": f32_stepped},
        "prompts": [
            {"name": prompt["name"]} | pack_run(run)
            for prompt, run in zip(prompts, f32_runs, strict=True)
            if prompt["name"] in F32_PROMPTS
        ],
    }
    write_json(arguments.out, goldens)
    write_json(arguments.f32_out, f32_goldens)


if __name__ == "__main__":
    main()
