"""Fields of a request's body that its dialect does not know.

Most of them change nothing here and are logged. Those that other servers or dialects know, and that
bind or change the answer, are refused: a client would rely on a guarantee that nobody keeps.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.fields import brief

log = logging.getLogger(__name__)

MAX_NAMED = 5  # unknown fields logged for one body
MAX_WARNINGS = 100  # unknown fields logged for one dialect
_warned: defaultdict[str, set[str]] = defaultdict(set)

# Other servers' names for what an answer must look like.
FORMATS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("guided_whitespace_pattern", "structured_outputs", "structural_tag", "json_schema"),
    *("grammar", "ebnf", "regex", "response_format", "response_schema", "output_format"),
    *("output_config", "format"),
)
# Names of binding fields, with values that ask for nothing. So do null, false and empty values.
BINDING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(FORMATS, ({"type": "text"},)),
    # Which tokens may come
    **dict.fromkeys(("allowed_token_ids", "bad_words", "bad_words_ids", "banned_tokens"), ()),
    **dict.fromkeys(("banned_strings", "custom_token_bans", "force_words_ids"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"), ()),
    **dict.fromkeys(("logit_bias", "logits_processors", "custom_logit_processor"), ()),
    **dict.fromkeys(("custom_params", "vllm_xargs", "sequence_bias"), ()),
    # Where an answer ends
    **dict.fromkeys(("min_tokens", "min_length", "min_new_tokens", "ban_eos_token"), (0,)),
    **dict.fromkeys(("stop", "stop_sequences", "stop_token_ids", "stop_regex", "eos_token_id"), ()),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "no_stop_trim"), ()),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), ()),
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict"), (-1,)),
    **dict.fromkeys(("t_max_predict_ms", "max_time", "truncate_prompt_tokens"), (-1, 0)),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget", "reasoning_budget"), (-1,)),
    # Which tool is called
    **dict.fromkeys(("tools", "functions"), ()),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    # How it is sampled or searched
    **dict.fromkeys(("n", "best_of", "num_beams", "num_return_sequences", "beam_width"), (1,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "diversity_penalty"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty"), (0, 1)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "typ_p", "tfs_z", "tfs"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "penalty_alpha", "min_p"), (0,)),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "mirostat", "mirostat_mode"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "top_a", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "top_n_sigma", "watermark"), (0, -1)),
    "samplers": (),
    # What the answer holds
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),  # false asks for them
    "add_special_tokens": (),  # a chat template writes its own
    **dict.fromkeys(("logprobs", "top_logprobs", "n_probs", "decoder_input_details"), (0,)),
    **dict.fromkeys(("documents", "extra_body", "lora_path", "echo"), ()),
}
_SPELLINGS = {name: name for name in BINDING} | {  # and those in Gemini's style
    re.sub("_(.)", lambda match: match[1].upper(), name): name for name in BINDING
}


def check_unknown(
    dialect: str, extra: Mapping[str, Any] | None, ignored: Collection[str] = ()
) -> None:
    """Refuse unknown fields that would bind the answer, and log the others.

    Each field is named once. Only the first few of a body are named, and the others are counted. A
    dialect gets at most `MAX_WARNINGS` such lines. Raise ApiError for a field of `BINDING`.
    """
    if not extra:
        return
    unknown = [name for name in extra if name not in ignored]
    for name in unknown:
        if name in _SPELLINGS:
            _check_binding(name, extra[name])
    warned = _warned[dialect]
    fresh = [name for name in (name[:100] for name in unknown[:MAX_NAMED]) if name not in warned]
    if not fresh or len(warned) >= MAX_WARNINGS:
        return
    warned.update(fresh)
    more = len(unknown) - MAX_NAMED
    log.warning(
        "ignoring unknown fields in %s requests: %s%s%s",
        dialect,
        ", ".join(map(repr, fresh)),
        f" and {more} more" if more > 0 else "",
        "; further unknown fields are not logged" if len(warned) >= MAX_WARNINGS else "",
        extra={"event": "unknown_fields", "fields": fresh, "num_more": max(0, more)},
    )


def _check_binding(name: str, value: Any) -> None:
    plain = _SPELLINGS[name]
    if value is None or value in BINDING[plain]:
        return
    if (value is False or value in ("", [], {})) and plain != "skip_special_tokens":
        return
    instead = "; a JSON schema binds the answer here" if plain in FORMATS else ""
    raise invalid(
        f"{name} is {brief(value)}; leave it out, because it is not supported{instead}.",
        name,
        "unsupported_parameter",
        reason="unsupported",
    )
