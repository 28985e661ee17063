"""Make a language model that fits in a megabyte: random weights, a tokenizer of one sentence.

Run by the live server's interpreter: `python tiny_model.py FOLDER`. It proves nothing about text
quality; it makes the real server load, tokenize, schedule and generate. Seeded, so that two
machines get the same answers. What it says depends on the prompt: tied embeddings would repeat the
last token for ever, and then equal texts prove nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VOCABULARY = 600


def tokenizer() -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - 2,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokens.train_from_iterator(["one kernel, one marker, one answer"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>")
    fast.chat_template = _TEMPLATE
    return fast


def model(spoken: list[int]) -> Qwen3ForCausalLM:
    """Return a model that says no tokens but these."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    made = Qwen3ForCausalLM(config)
    # The best of many random scores is above zero: a token that always scores zero is never it.
    silent = [token for token in range(_VOCABULARY) if token not in spoken]
    with torch.no_grad():
        made.lm_head.weight[silent] = 0
    return made.to(torch.bfloat16)


def visible(tokens: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that are text by themselves: no part of a letter, nothing special."""
    every = range(len(tokens))
    texts = {token: tokens.decode([token], skip_special_tokens=True) for token in every}
    return [token for token, text in texts.items() if text.isascii() and text.strip().isprintable()
            and text.strip()]  # fmt: skip


def main(folder: Path) -> None:
    tokens = tokenizer()
    tokens.save_pretrained(folder)
    model(visible(tokens)).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
