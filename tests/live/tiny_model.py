"""Make a language model that fits in a megabyte: random weights, a tokenizer of one sentence.

Run by the live server's interpreter: `python tiny_model.py FOLDER`. It proves nothing about text
quality; it makes the real server load, tokenize, schedule and generate. Seeded, so that two
machines get the same answers.
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


def model() -> Qwen3ForCausalLM:
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
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def main(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
