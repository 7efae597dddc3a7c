"""What of a network trains: adapters, parameters in full, and quantised layers; and what comes out of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vla_ros.errors import ConfigError
from vla_ros_lab.training.recipes import LoraRecipe, Recipe
from vla_ros_models.training import ADAPTER, Trainable
from vla_ros_models.view import VIEWS, add_view

ADAPTERS = ("full", "lora", "qlora", *VIEWS)
# peft loads bitsandbytes, which recommends a library for a kind of product that no training has.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@dataclass(frozen=True)
class AdapterOptions:
    """Deviations from the recipe."""

    adapter: str = "lora"  # one of :data:`ADAPTERS`
    rank: int = 0  # 0: the recipe's
    alpha: float = 0.0  # 0: the recipe's, in proportion to the rank
    targets: str = ""  # pattern of the layers with an adapter; empty: the recipe's
    train: str = ""  # pattern of the parameters that train in full; empty: the recipe's


@dataclass(frozen=True, eq=False)
class Adapted:
    """A network of which some parameters train."""

    trainable: Trainable
    lora: LoraRecipe | None  # None without an adapter
    layers: dict[str, str]  # each layer with an adapter to its stored name
    whole: Mapping[str, str]  # each parameter that trains in full to its stored name
    quantized: dict[str, str]  # each quantised layer to its stored name
    view: Mapping[str, nn.Parameter] = field(default_factory=dict)  # of a viewpoint adapter, by the file's names

    @property
    def trainee(self) -> nn.Module:
        return self.trainable.trainee

    @property
    def learning_rate(self) -> float:
        return self.lora.learning_rate if self.lora is not None else 0.0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that train, by name."""
        return {name: one for name, one in self.trainable.trainee.named_parameters() if one.requires_grad}

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] of a layer's adapter; those of a convolution have further axes."""
        found: Any = self.trainable.trainee.get_submodule(layer)
        return found.lora_A[ADAPTER].weight.data, found.lora_B[ADAPTER].weight.data

    def delta(self, layer: str) -> Tensor:
        """Return what a layer's adapter adds to its weight, float32."""
        found: Any = self.trainable.trainee.get_submodule(layer)
        delta: Tensor = found.get_delta_weight(ADAPTER).float()
        return delta

    def base(self, layer: str) -> Tensor:
        """Return the dequantised weight of a quantised layer, float32."""
        from bitsandbytes.functional import dequantize_4bit

        found: Any = self.trainable.trainee.get_submodule(layer)
        weight = getattr(found, "base_layer", found).weight
        dequantized: Tensor = dequantize_4bit(weight.data, weight.quant_state).float()
        return dequantized


def adapt(trainable: Trainable, recipe: Recipe, options: AdapterOptions, device: str) -> Adapted:
    """Quantise layers, add adapters, and choose what trains, in float32; moves the network to ``device``.

    Raises ConfigError if nothing would train, or if an option would change nothing.
    """
    trainee, names = trainable.trainee, trainable.names
    not_its = {"full": ("rank", "alpha", "targets"), **dict.fromkeys(VIEWS, ("alpha", "targets", "train"))}
    if given := [name for name in not_its.get(options.adapter, ()) if getattr(options, name)]:
        raise ConfigError(f"--{given[0]}: --adapter {options.adapter} determines what trains; leave it out")
    if options.adapter in VIEWS:
        trainee.to(device)
        return Adapted(trainable, None, {}, {}, {}, add_view(trainable, options.adapter, options.rank))
    modules = {name.rpartition(".")[0]: stored.rpartition(".")[0] for name, stored in names.items()}
    lora, layers = None, dict[str, str]()
    for name in ("targets", "train"):
        _require_pattern(name, getattr(options, name))
    whole = options.train or recipe.trained
    if options.adapter != "full":
        lora = _chosen(recipe.lora, options)
        whole = options.train or lora.whole or r"$."
        layers = {
            name: stored
            for name, stored in modules.items()
            if isinstance(trainee.get_submodule(name), (nn.Linear, nn.Conv2d)) and re.match(lora.targets, stored)
        }
    chosen = {
        name: stored
        for name, stored in names.items()
        if re.match(whole, stored) and name.rpartition(".")[0] not in layers
    }
    _require_found("targets", options.targets, layers, "layer", [name for name in modules.values() if name])
    _require_found("train", options.train, chosen, "parameter of a layer without an adapter", names.values())
    quantized = dict[str, str]()
    if options.adapter == "qlora":
        quantized = {name: stored for name, stored in modules.items() if re.match(recipe.quantized, stored)}
        if not quantized:
            raise ConfigError(
                f"--adapter qlora: found no layer of {trainable.family} to quantise, because what trains is its "
                "action head; use lora, with --base-dtype bfloat16 for the rest"
            )
        for name in quantized:
            quantize(trainee, name, device)
        # Without it, peft takes the layers for unquantised ones.
        trainee.is_loaded_in_4bit = True  # type: ignore[assignment]
    trainee.to(device)
    if lora is not None:
        _add_adapters(trainee, lora, layers)
    for name, parameter in trainee.named_parameters():
        trains = name in chosen or ".lora_" in name
        parameter.requires_grad_(trains)
        if trains:
            parameter.data = parameter.data.float()
    found = Adapted(trainable, lora, layers, chosen, quantized)
    if not found.parameters:
        raise ConfigError(f"--train, --targets: nothing in {trainable.family} would train; check the patterns")
    return found


def _require_pattern(option: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--{option} {pattern}: no regular expression of Python: {error}") from None


def _require_found(option: str, pattern: str, found: Collection[str], what: str, names: Iterable[str]) -> None:
    if pattern and not found:
        raise ConfigError(
            f"--{option} {pattern}: fits the beginning of no {what}; names are the checkpoint's, as {min(names)}"
        )


def _chosen(recipe: LoraRecipe, options: AdapterOptions) -> LoraRecipe:
    from dataclasses import replace

    rank = options.rank or recipe.rank
    alpha = options.alpha or recipe.alpha * rank / recipe.rank
    ranks = {pattern: one * rank // recipe.rank for pattern, one in recipe.ranks.items()}
    return replace(recipe, rank=rank, alpha=alpha, targets=options.targets or recipe.targets, ranks=ranks)


def _add_adapters(trainee: nn.Module, lora: LoraRecipe, layers: Mapping[str, str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    ranks = {
        f"^{re.escape(name)}$": rank
        for name, stored in layers.items()
        for pattern, rank in lora.ranks.items()
        if re.match(pattern, stored)
    }
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=list(layers),
        init_lora_weights="gaussian" if lora.gaussian else True, rank_pattern=ranks, alpha_pattern=ranks,
    )  # fmt: skip
    inject_adapter_in_model(config, trainee)
    for layer in layers:  # autocast casts the products' inputs itself
        adapted: Any = trainee.get_submodule(layer)
        adapted.cast_input_dtype_enabled = False
    if lora.both:
        for name, parameter in trainee.named_parameters():
            if ".lora_" in name:
                nn.init.normal_(parameter.data, std=lora.both)


def quantize(network: nn.Module, name: str, device: str) -> None:
    """Replace a linear layer by one in NF4 on ``device``, without double quantisation, as OpenVLA's script does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer: Any = network.get_submodule(name)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with torch.device("meta"):
        packed = Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, dtype, False, "nf4")
    packed.weight = Params4bit(
        layer.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4"
    ).to(device)
    if layer.bias is not None:
        packed.bias = nn.Parameter(layer.bias.data.to(device), requires_grad=False)
    owner, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(owner), leaf, packed)


def merged_tensors(adapted: Adapted, weight: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the checkpoint that training changed, merged, by its stored name, float32.

    ``weight`` takes a stored name and returns the checkpoint's own tensor.
    """
    parameters = dict(adapted.trainable.trainee.named_parameters())
    for name, stored in adapted.whole.items():
        yield stored, parameters[name].data.float()
    for layer, stored in (adapted.layers | adapted.quantized).items():
        own = adapted.base(layer).cpu() if layer in adapted.quantized else weight(f"{stored}.weight").float()
        delta = adapted.delta(layer).cpu().view(own.shape) if layer in adapted.layers else 0.0
        yield f"{stored}.weight", own + delta
