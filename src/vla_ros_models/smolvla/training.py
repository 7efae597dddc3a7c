"""The loss of SmolVLA: pi0's, over the valid steps of a batch (LeRobot 0.6.1, its policy)."""

from dataclasses import replace

import torch
from torch import Tensor

from vla_ros_models.engine.training import Call
from vla_ros_models.pi.training import FlowInputs, FlowLossForm, FlowTrainee
from vla_ros_models.smolvla.loading import SMOLVLA_TENSORS, SmolVlaCheckpoint, load_network, read_words
from vla_ros_models.smolvla.network import SmolVlaNetwork
from vla_ros_models.training import Trainable, separate


class SmolVlaTrainee(FlowTrainee):
    """SmolVLA with gradients: the state is the prefix's last token, and an action does not see later ones.

    ``image_ids`` are the control tokens around an image, if the model has them.
    """

    network: SmolVlaNetwork
    state_in_prefix = True
    causal = True

    def __init__(
        self,
        network: SmolVlaNetwork,
        form: FlowLossForm,
        recompute_layers: bool = False,
        image_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(network, form, recompute_layers)
        self.image_ids = image_ids

    def _words(self, tokens: Tensor) -> Tensor:
        """Embed the prompt; ids after the vocabulary are control tokens around an image, which are not scaled."""
        vocabulary = self.network.architecture.vocabulary
        control = tokens >= vocabulary
        if not self.image_ids:
            return super()._words(tokens)
        ids = torch.tensor(self.image_ids, device=tokens.device)
        plain = self.network.embed_tokens(ids[(tokens - vocabulary).clamp(min=0)])
        return torch.where(control[..., None], plain, super()._words(tokens.clamp(max=vocabulary - 1)))

    def _patches(self, images: Tensor, run: Call) -> Tensor:
        tokens = super()._patches(images, run)
        if not self.image_ids:
            return tokens
        ends = self.network.embed_tokens.weight[list(self.image_ids)].to(tokens.dtype)
        before, after = (part.expand(len(images), -1, -1) for part in (ends[:-1], ends[-1:]))
        return torch.cat([before, tokens, after], dim=1)

    def _project(self, patches: Tensor) -> Tensor:
        sizes = self.network.architecture
        unit, side = sizes.shuffle, sizes.vision.image_size // sizes.vision.patch_size // sizes.shuffle
        grid = patches.view(len(patches), side, unit, side, unit, -1)
        shuffled = grid.transpose(2, 3).reshape(len(patches), side * side, -1)
        scale: float = sizes.prefix.hidden_size**0.5
        return super()._project(shuffled) * scale


def make_trainable(
    checkpoint: SmolVlaCheckpoint, device: str, dtype: str, recompute_layers: bool, mask_padding: bool = True
) -> Trainable:
    """Load a checkpoint for training; matrices have the type ``dtype``."""
    sizes = checkpoint.architecture
    words = read_words(checkpoint.words, sizes.vocabulary)
    processing = replace(checkpoint.processing, control=words.tokenizer.control, truncate_left=words.truncate_left)
    ids = words.image_ids if sizes.special_tokens else ()
    network = load_network(checkpoint, device, dtype)
    form = FlowLossForm(processing.action_size, mask_padding)
    names = {f"network.{name}": stored for name, stored in separate(network, checkpoint.parts).items()}
    if sizes.vision.image_size != sizes.stored_image:
        del names["network.vision.pos_embed"]  # each patch has the position of a stored one; these stay as they are
    return Trainable(
        SmolVlaTrainee(network, form, recompute_layers, ids),
        names,
        checkpoint.stored,
        FlowInputs(
            processing,
            words.tokenizer.encode,
            checkpoint.image_keys,
            tuple(key for key, _ in checkpoint.state_keys),
            sizes.vision.image_size,
            sizes.state_dim,
            sizes.action_dim,
            tuple(range(sizes.vocabulary, sizes.vocabulary + len(ids))),
            checkpoint.cameras,
            checkpoint.empty,
            state_token=True,
        ),
        checkpoint.spec,
        sizes.prefix,
        "smolvla",
        tower=sizes.vision,
        tied=SMOLVLA_TENSORS.embeddings,
    )
