"""Parts of a transformers model: its own modules, called as its own forward calls them. One entry per line of models.

The module is built again on the meta device from its configuration, without dropout: values come from `materialize`
(by seed) or `load` (the module's own state_dict). transformers is not imported before a model of it is at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from wavetrain.base.errors import InputError, Problem
from wavetrain.runtime.parts import Part, Parts

UNSUPPORTED = {"add_cross_attention": True, "is_decoder": True}  # they make other models of the same classes


@dataclass(frozen=True)
class Line:
    """How a line of models is taken apart, each function given the whole module."""

    model_type: str
    embedding: Callable[[Any], nn.Module]
    blocks: Callable[[Any], tuple[nn.Module, ...]]
    head: Callable[[Any], nn.Module]


def parts_of_module(module: nn.Module) -> Parts:
    """A transformers model taken apart; `module` itself is left alone, on whatever device it is."""
    name = type(module).__name__
    if name not in LINES:
        rule = "the runtime can't take this class apart"
        raise InputError(Problem(where=name, rule=rule, legal=tuple(LINES)))
    return _parts(type(module), module.config, LINES[name])


def parts_of_config(config: Any) -> Parts:
    """The model that a transformers configuration describes, taken apart."""
    for name, line in LINES.items():
        if line.model_type == config.model_type:
            return _parts(getattr(import_module("transformers"), name), config, line)
    legal = tuple(line.model_type for line in LINES.values())
    rule = "the runtime can't take this model apart"
    raise InputError(Problem(where="config", key="model_type", value=config.model_type, rule=rule, legal=legal))


def _parts(kind: Callable[[Any], Any], config: Any, line: Line) -> Parts:
    config = _without_dropout(config)
    wrong = [key for key, value in UNSUPPORTED.items() if getattr(config, key, None) is value]
    if wrong:
        rule = "the runtime can't take such a model apart"
        raise InputError(Problem(where=config.model_type, key=key, value=True, rule=rule) for key in wrong)
    with torch.device("meta"):
        model = kind(config).eval()
    owners = {id(module): name for name, module in model.named_modules()}
    return Parts(
        embedding=_part(line.embedding(model), owners),
        blocks=tuple(_part(block, owners) for block in line.blocks(model)),
        head=_part(line.head(model), owners),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        ties=dict(model._tied_weights_keys) if config.tie_word_embeddings else {},  # noqa: SLF001 -- no public name
        std=config.initializer_range,
    )


def _without_dropout(config: Any) -> Any:
    config = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def _part(module: nn.Module, owners: Mapping[int, str]) -> Part:
    names = {}
    for path, _ in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = path.rpartition(".")
        names[path] = f"{owners[id(module.get_submodule(owner))]}.{leaf}"
    return Part(module, names)


# --- what a model's forward makes once and gives to each of its layers ---


class Surroundings(nn.Module):
    """Positions, mask and rotary angles for hidden states of one shape; all blocks of a stage share them.

    Where hidden states are cut along the sequence, `sequence_parts` says into how many: these are for all of it.
    """

    def __init__(self, config: Any, *, mask: str, rotary: nn.Module | None = None, positions: bool = True) -> None:
        super().__init__()
        self.config, self.mask, self.rotary, self.positions = config, mask, rotary, positions
        self.sequence_parts = 1
        self._key: tuple[torch.Size, torch.dtype, torch.device] | None = None
        self._made: dict[str, Any] = {}

    def forward(self, hidden: Tensor) -> dict[str, Any]:
        """The arguments of a layer beside the hidden states."""
        key = (hidden.shape, hidden.dtype, hidden.device)
        if key != self._key:
            batch, length, width = hidden.shape
            whole = hidden.new_zeros(()).expand(batch, length * self.sequence_parts, width)
            self._key, self._made = key, self._make(whole)
        return self._made

    def _make(self, hidden: Tensor) -> dict[str, Any]:
        places = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        given: dict[str, Any] = {"position_ids": places} if self.positions else {}
        make_mask = getattr(import_module("transformers.masking_utils"), self.mask)
        mask = make_mask(config=self.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, **given)
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(hidden, position_ids=places)
        return given | {"attention_mask": mask}


class Block(nn.Module):
    """A layer with its surroundings."""

    def __init__(self, layer: nn.Module, surroundings: Surroundings) -> None:
        super().__init__()
        self.layer, self.surroundings = layer, surroundings

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden, **self.surroundings(hidden))  # type: ignore[no-any-return]


class Gpt2Embedding(nn.Module):
    """Tokens plus positions, which GPT-2 adds in its model's own forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.positions = model.transformer.wte, model.transformer.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.tokens(tokens) + self.positions(places)  # type: ignore[no-any-return]


# --- the lines ---


def _gpt2_blocks(model: Any) -> tuple[nn.Module, ...]:
    surroundings = Surroundings(model.config, mask="create_causal_mask")
    return tuple(Block(layer, surroundings) for layer in model.transformer.h)


def _bert_blocks(model: Any) -> tuple[nn.Module, ...]:
    surroundings = Surroundings(model.config, mask="create_bidirectional_mask", positions=False)
    return tuple(Block(layer, surroundings) for layer in model.bert.encoder.layer)


def _bert_embedding(model: Any) -> nn.Module:
    """Its buffers are no parameters, so nobody fills them later: they get their values here."""
    embeddings = model.bert.embeddings
    rows = model.config.max_position_embeddings
    embeddings.position_ids = torch.arange(rows).expand(1, -1)
    embeddings.token_type_ids = torch.zeros(1, rows, dtype=torch.int64)
    return embeddings  # type: ignore[no-any-return]


def _rotary_blocks(model: Any) -> tuple[nn.Module, ...]:
    config = model.config
    rotary = type(model.model.rotary_emb)(config)  # off the meta device: its buffers are values
    masks = {False: "create_causal_mask", True: "create_sliding_window_causal_mask"}
    around = {windowed: Surroundings(config, mask=mask, rotary=rotary) for windowed, mask in masks.items()}
    layers = enumerate(model.model.layers)
    return tuple(Block(layer, around[_is_windowed(config, number)]) for number, layer in layers)


def _is_windowed(config: Any, layer: int) -> bool:
    if config.model_type == "qwen2":  # its configuration says so layer by layer
        return bool(config.layer_types[layer] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None


def _rotary_embedding(model: Any) -> nn.Module:
    return model.model.embed_tokens  # type: ignore[no-any-return]


def _rotary_head(model: Any) -> nn.Module:
    return nn.Sequential(model.model.norm, model.lm_head)


def _rotary_line(model_type: str) -> Line:
    return Line(model_type, _rotary_embedding, _rotary_blocks, _rotary_head)


LINES = {
    "GPT2LMHeadModel": Line(
        "gpt2", Gpt2Embedding, _gpt2_blocks, lambda model: nn.Sequential(model.transformer.ln_f, model.lm_head)
    ),
    "LlamaForCausalLM": _rotary_line("llama"),
    "MistralForCausalLM": _rotary_line("mistral"),
    "Qwen2ForCausalLM": _rotary_line("qwen2"),
    "BertForMaskedLM": Line("bert", _bert_embedding, _bert_blocks, lambda model: model.cls),
}
