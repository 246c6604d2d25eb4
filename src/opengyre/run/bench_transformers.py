"""The transformers side of ``bench engine``: imported only where transformers is installed."""

from transformers import LlamaConfig, LlamaForCausalLM

from opengyre.engine.transformers_engine import TransformersEngine, weights_of
from opengyre.model.decoder import DecoderConfig, Parameters
from opengyre.model.weights import to_file_names


def engine_of(config: DecoderConfig, parameters: Parameters, batch: int) -> TransformersEngine:
    """Return an engine over a transformers Llama of our decoder's shape and weights."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context_tokens,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=True,
        )
    )
    model.load_state_dict(to_file_names(config, parameters), strict=False)
    engine = TransformersEngine(
        model, context_tokens=config.context_tokens, slots=2 * batch + 1, max_running=batch, kv_tokens=1 << 20
    )
    engine.set_version(0, weights_of(model))
    return engine
