# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of peft, added to the weights of its base while these are converted."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytecheckpoint.config import Config
from bytecheckpoint.convert.change import FLOATS, shapes_of
from bytecheckpoint.errors import ConfigError, KeyMismatchError, ShapeMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import location_to_read

if TYPE_CHECKING:
    import torch

    from bytecheckpoint.native import _core

__all__ = ["Adapter"]

_CONFIG = "adapter_config.json"
_MOST_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
# Names of the two factors, in what peft's save_pretrained writes and in the state dict of its model.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(\.(?!weight$)[^.]+)?(\.weight)?")
_SAVED = re.compile(r"\.modules_to_save\.[^.]+\.")
# Values of init_lora_weights with which the base stays as it is.
_PLAIN_BEGINS = (True, False, None, "gaussian", "orthogonal")
# Settings with which an adapter is more than the product of two factors.
_UNKNOWN = ("use_dora", "lora_bias", "target_parameters", "alora_invocation_tokens")


@dataclass(frozen=True)
class _Product:
    """What is added to a weight: ``left @ right * scale``, of shape [rows, columns]."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float


class Adapter:
    """Adds a LoRA adapter to its base; see ``Change``. Sums are computed in float32, and rounded once.

    A weight becomes ``weight + B @ A * alpha / rank``, as peft's ``merge_and_unload`` makes it. Weights that the
    adapter has whole (``modules_to_save``, biases) take the place of those of the base first.

    Args:
        place: Folder that peft's ``save_pretrained`` wrote, or a checkpoint of any kind with the same names.
        alpha: ``lora_alpha``; None takes that of ``adapter_config.json``.
    """

    def __init__(self, place: str, alpha: float | None) -> None:
        self._place = place
        self._alpha = alpha
        self._digest = b""
        self._products: dict[str, _Product] = {}
        self._whole: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Collection[str]:
        """See ``Change``."""
        return self._products.keys() | self._whole.keys()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_products": {}, "_whole": {}}  # each process reads the adapter for itself

    def identity(self) -> bytes:
        """See ``Change``."""
        return repr((self._place, self._alpha, self._digest)).encode()

    def prepare(self, wanted: _core.Checkpoint, place: str, spec: LoadSpec | None, config: Config) -> None:
        """See ``Change``."""
        from bytecheckpoint.contents.stored_state import read

        settings = self._settings(config)
        stored = read(self._place, config=config)
        # In the checkpoint that has the base, too, all but the factors is the base itself.
        is_same = Path(stored.path) == Path(place)
        names = [name for name in stored if not is_same or _FACTOR.fullmatch(name)]
        state = {name: value for name in names if hasattr(value := stored[name], "dtype")}
        self._check_same(state, settings)
        factors, whole = _sorted(state)
        shapes = shapes_of(wanted)
        own_name = {_plain_name(name): name for name in shapes}
        strange = [name for name in (*_weights_of(factors), *whole) if name not in own_name]
        if strange or not factors:
            why = f"the base has no {listed(strange, 5)}" if strange else "it has no factors lora_A and lora_B"
            raise KeyMismatchError(
                f"convert: adapter {self._place}: {why}; LoadSpec(rename=...) gives the base other names. A weight "
                "that is tied to another one is not stored, and cannot have an adapter here",
                self._place,
            )
        self._products, self._whole = {}, {}
        for weight, pair in _weights_of(factors).items():
            name = own_name[weight]
            self._products[name] = self._product(name, pair, settings, shapes[name])
        for plain, value in whole.items():
            dtype, shape = shapes[own_name[plain]]
            if tuple(value.shape) != shape or dtype not in FLOATS:
                raise ShapeMismatchError(
                    f"convert: adapter {self._place}: '{plain}' is {[*value.shape]}, but {dtype} {[*shape]} there",
                    self._place,
                )
            self._whole[own_name[plain]] = value.reshape(-1)

    def compute(self, name: str, first: int, elements: torch.Tensor) -> torch.Tensor:
        """See ``Change``."""
        import torch

        last = first + elements.numel()
        if name in self._whole:
            elements = self._whole[name][first:last]
        product = self._products.get(name)
        if product is None:
            return elements
        columns = product.right.shape[1]
        begin, end = first // columns, -(-last // columns)  # of the rows that the elements are in
        added = (product.left[begin:end] @ product.right).reshape(-1)[first - begin * columns : last - begin * columns]
        return torch.add(elements.to(added.dtype), added, alpha=product.scale)

    def _settings(self, config: Config) -> dict[str, Any]:
        """Returns what ``adapter_config.json`` says.

        Raises:
            ConfigError: It is not there and needed, or says what is not known here.
        """
        place = known(location_to_read(self._place), config)
        folder = folder_at(place)
        is_file = isinstance(place, Path) and not folder.is_there()
        text = None if is_file else folder.read_file(_CONFIG, _MOST_CONFIG_BYTES)
        if text is None:
            if self._alpha is None:
                raise ConfigError(f"convert: adapter {self._place}: it has no {_CONFIG}: pass lora_alpha")
            return {}
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"convert: adapter {self._place}: {_CONFIG}: {error}") from None
        if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
            raise ConfigError(f"convert: adapter {self._place}: {_CONFIG} is of no LoRA adapter: peft_type")
        strange = [name for name in _UNKNOWN if settings.get(name)]
        if settings.get("init_lora_weights", True) not in _PLAIN_BEGINS:
            strange.append("init_lora_weights")  # it changes the base, too
        if strange:
            raise ConfigError(
                f"convert: adapter {self._place}: {strange[0]}={settings[strange[0]]!r} is not supported: add it with "
                "peft's merge_and_unload"
            )
        return settings

    def _check_same(self, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
        import torch

        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name, value in state.items():
            digest.update(name.encode() + b"\0" + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if self._digest and self._digest != digest.digest():
            raise ConfigError(f"convert: adapter {self._place}: it has changed since the conversion began; begin anew")
        self._digest = digest.digest()

    def _product(
        self,
        name: str,
        pair: Mapping[str, tuple[torch.Tensor, bool]],
        settings: Mapping[str, Any],
        of_base: tuple[str, tuple[int, ...]],
    ) -> _Product:
        import torch

        dtype, shape = of_base
        if {*pair} != {"A", "B"} or any(factor.dim() != 2 for factor, _ in pair.values()):
            raise ConfigError(f"convert: adapter {self._place}: '{name}' needs factors A and B with two dims")
        (a, is_embedding), (b, _) = pair["A"], pair["B"]
        rank = a.shape[0]
        within = getattr(torch, FLOATS.get(dtype, "float32"))
        left, right = b.to(within), a.to(within)
        if is_embedding or settings.get("fan_in_fan_out"):
            left, right = right.T, left.T
        if dtype not in FLOATS or left.shape[1] != right.shape[0] or (left.shape[0], right.shape[1]) != shape:
            raise ShapeMismatchError(
                f"convert: adapter {self._place}: factors {[*a.shape]} and {[*b.shape]} do not fit '{name}', which is "
                f"{dtype} {[*shape]}; a quantized base must be dequantized first",
                self._place,
            )
        alpha = self._alpha if self._alpha is not None else _alpha_of(_plain_name(name), settings)
        return _Product(left, right.contiguous(), alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _plain_name(name: str) -> str:
    """Returns the name that a tensor has without an adapter."""
    return _SAVED.sub(".", name.removeprefix(_PREFIX).replace(".base_layer.", "."))


def _alpha_of(weight: str, settings: Mapping[str, Any]) -> float:
    """Returns ``lora_alpha`` of a weight: a pattern is the end of the name of its module, or all of it, as for peft."""
    module = weight.removesuffix(".weight")
    patterns = settings.get("alpha_pattern") or {}
    found = next((alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)), None)
    return float(settings.get("lora_alpha", 8) if found is None else found)


def _sorted(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the factors by name, and the weights that are whole by the name in the base."""
    factors, whole = {}, {}
    for name, value in state.items():
        found = _FACTOR.fullmatch(name)
        if found is not None:
            factors[name] = (found, value)
        elif ".original_module." not in name:
            whole[_plain_name(name)] = value
    return factors, whole


def _weights_of(factors: Mapping[str, Any]) -> dict[str, dict[str, tuple[torch.Tensor, bool]]]:
    """Returns the pairs of factors, by the name of the weight in the base."""
    pairs: dict[str, dict[str, tuple[torch.Tensor, bool]]] = {}
    for found, value in factors.values():
        pair = pairs.setdefault(f"{_plain_name(found['module'])}.weight", {})
        pair[found["which"]] = (value, found["embedding"] is not None)
    return pairs
