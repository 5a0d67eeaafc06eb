# SPDX-License-Identifier: Apache-2.0
"""Where the model is in a training checkpoint."""

from __future__ import annotations

from bytecheckpoint.config import Config
from bytecheckpoint.convert.source import Source
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import below, location_to_read

__all__ = ["is_step_of_parts", "model_of"]

# Names under which training code puts a model, and a model and an optimizer together.
_MODEL, _TOGETHER = "model", "model_and_optim"
# The same in one checkpoint: of Lightning, of DeepSpeed.
_PREFIXES = (_MODEL, "state_dict", "module")
# Names that training code gives to what is not the model, where the keys of the model have no prefix.
_OTHERS = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state")
# The same, beside a model with a prefix.
_BESIDE = (
    *_OTHERS,
    "optimizer_states",
    "optimizer_state_dict",
    "lr_schedulers",
    "callbacks",
    "loops",
    "ema",
    "rng_state",
)
# Of a model itself, beside "model.layers", as Hugging Face names them.
_HEADS = ("lm_head", "score", "classifier", "embed_out", "visual", "vision_tower", "multi_modal_projector")
_METADATA = ".metadata"


def is_step_of_parts(source: str, config: Config) -> bool:
    """Whether a path or URL is the folder of a step that ``bytecheckpoint.save`` saved."""
    place = known(location_to_read(source), config)
    parts = (_MODEL, "optimizer")
    return not folder_at(place).has(_METADATA) and any(folder_at(below(place, part)).has(_METADATA) for part in parts)


def model_of(source: str, config: Config) -> tuple[str, LoadSpec | None]:
    """Finds the model in a checkpoint.

    It is in one of these places, of which the first that is there counts: the part ``model`` of what
    ``bytecheckpoint.save`` saved; the keys below ``model``, as of ``{"model": ..., "optimizer": ...}`` or of OLMo-core,
    or below ``state_dict`` (Lightning) or ``module`` (DeepSpeed); all keys but those of optimizer, scheduler,
    dataloader and train state, as of torchtitan, whose model may have the names of Hugging Face, ``model.layers``
    beside ``lm_head``. A checkpoint in which nothing else is, is the model.

    Args:
        source: Path or URL.
        config: Settings.

    Returns:
        The checkpoint that has the model, and what to take of it; None for all of it.

    Raises:
        ConfigError: No key is left for the model. Or there are tensors beside it of which nothing is known.
    """
    place = known(location_to_read(source), config)
    for part in (_MODEL, _TOGETHER):
        if not folder_at(place).has(_METADATA) and folder_at(below(place, part)).has(_METADATA):
            place = below(place, part)
            break
    contents = Source(str(place), None, config).open().stored.contents()
    tops = {name.split(".", 1)[0] for name, *_ in contents}
    prefix = next((each for each in _PREFIXES if each in tops), "")
    with_tensors = {name.split(".", 1)[0] for name, dtype, *_ in contents if dtype is not None}
    beside = with_tensors - {prefix, *_BESIDE}
    is_deepspeed = prefix == "module" and "ds_version" in tops  # beside it is what users saved with it
    if prefix and (is_deepspeed or not beside):
        return str(place), LoadSpec(include=prefix, rename={prefix: ""})
    if prefix and not beside <= {*_HEADS}:
        raise ConfigError(
            f"convert({place}): there are tensors of {listed(sorted(beside))} beside those of {prefix}, and no telling "
            "which are the model: use --include and --rename"
        )
    others = [name for name in _OTHERS if name in tops]
    if prefix:
        others += sorted(tops - with_tensors - {*others})  # a step, an epoch
    if others and tops <= {*_OTHERS}:
        raise ConfigError(f"convert({place}): only {listed(others)} is there, and no model: use --include")
    return str(place), LoadSpec(exclude=others) if others else None
