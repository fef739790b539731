"""What a model is fed, by kind: token ids, pictures, sound, or several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.config import Spec

Inputs = dict[str, Any]


def ids(B: int, T: int) -> Tensor:
    """Token ids that are no special token."""
    return torch.randint(3, 50, (B, T))


def padded(B: int, T: int) -> tuple[Tensor, Tensor]:
    """Token ids of unequal lengths, right padded with 0, and their mask."""
    mask = (torch.arange(T) < T - torch.arange(B).unsqueeze(1) % 3).long()
    return ids(B, T) * mask, mask


def text(model: nn.Module, spec: Spec) -> Inputs:
    return {"input_ids": ids(spec.B, spec.T)}


def text_padded(model: nn.Module, spec: Spec) -> Inputs:
    tokens, mask = padded(spec.B, spec.T)
    return {"input_ids": tokens, "attention_mask": mask}


def text_boxes(model: nn.Module, spec: Spec) -> Inputs:
    """Words with the corners of their boxes on a page."""
    corners = torch.randint(0, 25, (spec.B, spec.T, 2))
    return text_padded(model, spec) | {"bbox": torch.cat([corners, corners + 5], 2)}


def seq2seq(model: nn.Module, spec: Spec) -> Inputs:
    return text_padded(model, spec) | {"decoder_input_ids": ids(spec.B, spec.T - 2)}


def pixels(model: nn.Module, spec: Spec) -> Inputs:
    return {"pixel_values": torch.randn(spec.B, *(spec.shape or (3, 16, 16)))}


def video(model: nn.Module, spec: Spec) -> Inputs:
    return {str(model.main_input_name): torch.randn(spec.B, *(spec.shape or (4, 3, 16, 16)))}


def text_and_pixels(model: nn.Module, spec: Spec) -> Inputs:
    return text_padded(model, spec) | pixels(model, spec)


def sound(model: nn.Module, spec: Spec) -> Inputs:
    return {"input_values": torch.randn(spec.B, *(spec.shape or (90,)))}


def codes(model: nn.Module, spec: Spec) -> Inputs:
    """Sound that is already quantised, frames before samples."""
    return sound(model, spec) | {
        "audio_codes": torch.randint(0, 8, (1, spec.B, 1, 23)),
        "audio_scales": [None],
    }


def features(model: nn.Module, spec: Spec) -> Inputs:
    return {str(model.main_input_name): torch.randn(spec.B, *(spec.shape or (24, 16)))}


def masked_features(model: nn.Module, spec: Spec) -> Inputs:
    given = features(model, spec)
    return given | {"input_features_mask": torch.ones(spec.B, spec.shape[-1], dtype=torch.long)}


def pixels2seq(model: nn.Module, spec: Spec) -> Inputs:
    return pixels(model, spec) | {"decoder_input_ids": ids(spec.B, spec.T)}


def speech2seq(model: nn.Module, spec: Spec) -> Inputs:
    return features(model, spec) | {"decoder_input_ids": ids(spec.B, spec.T)}


KINDS = (text, text_padded, text_boxes, seq2seq, pixels, video, text_and_pixels, sound, codes, features)
FEEDS: dict[str, Callable[[nn.Module, Spec], Inputs]] = {
    f.__name__: f for f in (*KINDS, masked_features, pixels2seq, speech2seq)
}
