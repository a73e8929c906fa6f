"""Shapes of the parameters of known networks, computed from their architecture."""

from __future__ import annotations

from collections.abc import Callable

Shapes = dict[str, tuple[int, ...]]


def resnet50() -> Shapes:
    """List the 161 parameters of ResNet-50, 25.6 million numbers."""
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    width = 64
    for stage, (blocks, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            convolutions = [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            if block == 0:
                convolutions.append((4 * inner, width, 1, 1))  # of the shortcut
            for number, shape in enumerate(convolutions, 1):
                name = f"layer{stage}.{block}.{{}}{number}.{{}}"
                shapes[name.format("conv", "weight")] = shape
                shapes |= {name.format("bn", what): shape[:1] for what in ("weight", "bias")}
            width = 4 * inner
    return {**shapes, "fc.weight": (1000, width), "fc.bias": (1000,)}


def llama_1b() -> Shapes:
    """List the 146 parameters of Llama 3.2 1B, 1.24 billion numbers; its output layer is the embedding."""
    layers, hidden, inner, heads, kv_heads, vocabulary = 16, 2048, 8192, 32, 8, 128256
    kv = hidden // heads * kv_heads
    layer: Shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: Shapes = {"embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "norm.weight": (hidden,)}


#: By the name that --keys takes.
MODELS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50, "llama-1b-shapes": llama_1b}
