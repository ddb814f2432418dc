"""transformers as the oracle: the same config.json, built on the meta device."""

import json
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "published")


def built(fields: dict):
    """The transformers model of a config, without memory."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[fields["model_type"]](**fields)
    kind = transformers.AutoModelForMaskedLM if fields["model_type"] == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def fields_of(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())
