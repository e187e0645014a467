"""An inference engine and a tokenizer for AReaL's own proxy, so that it serves recorded turns where there is no GPU.

Loaded by AReaL's processes, in AReaL's interpreter; nothing of ours is imported.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ADMIN_KEY = "admin-key-of-this-run"
_END = "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SCENARIO = re.compile(r"Scenario: (\w+)")


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes, which AReaL loads like any other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=_END, pad_token="<|pad|>")
    made.chat_template = _TEMPLATE
    made.save_pretrained(folder)


class RecordedEngine:
    """Answers by the scenario that the prompt names: the turns of a file, an error, or nothing for a long time."""

    def __init__(self, turns: str, tokenizer: str) -> None:
        from areal.api.cli_args import AgentConfig

        agent = AgentConfig(
            agent_cls_path="nobody.asks", admin_api_key=ADMIN_KEY, tool_call_parser="qwen3_coder", reasoning_parser="qwen3", engine_max_tokens=200_000,
            chat_template_type="concat",
        )  # fmt: skip
        self.config = SimpleNamespace(tokenizer_path=tokenizer, agent=agent, lora_name="")
        self._turns: dict[str, list[dict[str, Any]]] = json.loads(Path(turns).read_text(encoding="utf-8"))

    def initialize(self) -> None:
        """Nothing is served by anybody else."""

    def get_version(self) -> int:
        """Return the version of the weights."""
        return 7

    async def agenerate(self, request: Any) -> Any:
        """Return the next turn as tokens."""
        from areal.api.io_struct import ModelResponse

        prompt = request.tokenizer.decode(request.input_ids)
        found = _SCENARIO.search(prompt)
        scenario = found.group(1) if found else "none"
        if scenario == "broken":
            raise RuntimeError("the engine is broken")
        if scenario == "hangs":
            await asyncio.sleep(600)
        turns, said_before = self._turns[scenario], prompt.count("<|im_start|>assistant\n") - 1
        said = _text(
            turns[min(said_before, len(turns) - 1)]
        )  # AReaL's parser hears no call without arguments
        tokens = [*request.tokenizer.encode(said, add_special_tokens=False), request.tokenizer.eos_token_id]
        return ModelResponse(
            input_tokens=list(request.input_ids), output_tokens=tokens, output_logprobs=[-0.1] * len(tokens),
            output_versions=[self.get_version()] * len(tokens), stop_reason="stop", tokenizer=request.tokenizer,
            latency=0.0, ttft=0.0,
        )  # fmt: skip


def _text(turn: dict[str, Any]) -> str:
    """Return a turn as the model's own text, with tool calls as Qwen's coder models write them."""
    calls = "".join(
        f"<tool_call>\n<function={call['name']}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call.get("arguments", {}).items())
        + "</function>\n</tool_call>"
        for call in turn.get("tool_calls", [])
    )
    return f"{turn.get('content') or ''}\n{calls}"
