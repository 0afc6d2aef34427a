"""The fields that other servers know and this one does not honour, by route.

What would change the answer is refused by name; what cannot is ignored. Refusals, docs/api.md and the tests come from
here; `tests/data/engine_fields.toml` holds the published requests of vLLM, SGLang, llama.cpp and TGI, and each of their
fields must be honoured, refused or ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_NOTHING: Final[tuple[Any, ...]] = (False, "", [])


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is known and not offered."""

    why: str
    neutral: tuple[Any, ...] = _NOTHING
    """The values that ask for nothing, next to null. `False` stands for 0 too."""
    details: Mapping[str, Any] | None = None
    """See `ApiError`."""


def _refuse(names: str, why: str = "is not offered", neutral: tuple[Any, ...] = _NOTHING) -> dict[str, Refusal]:
    return dict.fromkeys(names.split(), Refusal(why, neutral))


def _use(**alternatives: str) -> dict[str, Refusal]:
    return {name: Refusal(f"is not offered: use {instead}") for name, instead in alternatives.items()}


_ONE: Final = (False, 1)
_PRIVATE: Final = "is not offered on the public port"
_TEXT_ONLY: Final = "is not offered: this model reads text"
_EVERYWHERE: Final[Mapping[str, Refusal]] = {
    # Engines' own doors, which have cost others remote code or other tenants' data.
    **_refuse("bootstrap_host bootstrap_port bootstrap_room kv_transfer_params ec_transfer_params", _PRIVATE),
    **_refuse("custom_logit_processor logits_processors custom_params vllm_xargs prompt_embeds", _PRIVATE),
    **_refuse("return_hidden_states session_params data_parallel_rank disagg_prefill_dp_rank", _PRIVATE),
    **_refuse("routed_dp_rank lora_path lora adapter_id", f"{_PRIVATE}: use model"),
    # Other names, or other forms, of what is offered.
    **_refuse("guided_choice guided_grammar guided_json guided_regex", "is not offered: use structured_outputs"),
    **_refuse("ebnf grammar json_schema regex", "is not offered: use structured_outputs"),
    **_refuse("disable_any_whitespace whitespace_pattern", "is not offered here: use structured_outputs"),
    **_refuse("grammar_lazy grammar_triggers", "is not offered: use structured_outputs"),
    **_refuse("n_predict max_new_tokens", "is not offered: use max_tokens (max_output_tokens in responses)"),
    **_use(min_new_tokens="min_tokens", truncate="truncate_prompt_tokens", n_cmpl="n", extra_key="cache_salt"),
    **_use(no_stop_trim="include_stop_str_in_output", stop_regex="stop", n_probs="logprobs", top_n_tokens="logprobs"),
    **_use(thinking_token_budget="reasoning_effort", reasoning_budget="reasoning_effort", task="the messages"),
    **_use(reasoning_budget_tokens="reasoning_effort", thinking_budget_tokens="reasoning_effort"),
    **_use(enable_thinking="chat_template_kwargs.enable_thinking", thinking="chat_template_kwargs.thinking"),
    **_use(return_tokens_as_token_ids="return_token_ids", return_tokens="return_token_ids"),
    **_use(return_prompt_token_ids="return_token_ids", return_full_text="echo", details="logprobs"),
    **_use(decoder_input_details="prompt_logprobs", tool_prompt="tools", guideline="the messages"),
    "repeat_penalty": Refusal("is not offered: use repetition_penalty", _ONE),
    "do_sample": Refusal("is not offered: use temperature, 0 of which takes the likeliest token", (True,)),
    # Sampling that is not offered.
    **_refuse("dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"),
    **_refuse("xtc_probability xtc_threshold dynatemp_range dynatemp_exponent mirostat mirostat_eta mirostat_tau"),
    **_refuse("top_n_sigma", neutral=(False, -1)),
    **_refuse("repeat_last_n samplers adaptive_target adaptive_decay min_keep post_sampling_probs n_indent"),
    **_refuse("n_keep n_discard t_max_predict_ms preserved_tokens repetition_detection watermark watermarking"),
    **_refuse("use_beam_search early_stopping", "is not offered: the server samples"),
    **_refuse("length_penalty", "is not offered: the server samples", _ONE),
    **_refuse("spaces_between_special_tokens", neutral=(True,)),
    # Further parts of an answer, or another form of it.
    **_refuse("include_reasoning separate_reasoning stream_reasoning", neutral=(True,)),
    **_refuse("reasoning_in_content thinking_forced_open chat_format parse_tool_calls reasoning_format"),
    **_refuse("logprob_token_ids sampling_logprobs_mode return_sampling_mask return_flat_raw_output_top_logprobs"),
    **_refuse("return_flat_raw_top_logprobs_b64 return_meta_info return_input_ids_in_sglext"),
    **_refuse("return_output_ids_in_sglext return_cached_tokens_details return_spec_tokens_details"),
    **_refuse("return_routed_experts routed_experts_start_len routed_experts_prompt_start return_token_offsets"),
    **_refuse("return_prompt_text return_mm_kwargs return_progress response_fields timings_per_token"),
    **_refuse("moderation access_programs"),
    # Images, sound and video.
    **_refuse("mm_processor_kwargs media_io_kwargs mm_payload images_config video_config image", _TEXT_ONLY),
    **_refuse("max_dynamic_patch min_dynamic_patch use_audio_in_video", _TEXT_ONLY),
    **_refuse("encoding_format dimensions", "is a field of /v1/embeddings"),
}
_GENERATES: Final = "is not offered: an embedding is not generated"
_CHATS_ALONE: Final = "is a field of /v1/chat/completions"
_NO_CONTAINER: Final = (*_NOTHING, {}, {"id": None}, {"skills": []}, {"id": None, "skills": []})
_NO_THREADS: Final = "needs stored conversations, which this server does not keep: send all messages"
_MESSAGES_ALONE: Final = "is a field of /v1/messages"

REFUSED: Final[Mapping[str, Mapping[str, Refusal]]] = {
    "/v1/chat/completions": {
        **_EVERYWHERE,
        **_refuse("truncation", "is a field of /v1/responses: use truncate_prompt_tokens", ("disabled",)),
        **_refuse("documents web_search_options"),
        **_refuse("mcp_servers", _MESSAGES_ALONE),
        **_refuse("audio", "is not offered: this server makes text"),
        **_refuse("chat_template", "is not accepted from a request"),
        **_refuse("add_special_tokens", "is not offered: the chat template writes them"),
        **_refuse("best_of", "is not offered: use n, or /v1/completions", _ONE),
        **_refuse("echo prompt input_ids suffix", "is not offered: use /v1/completions"),
        **_refuse("function_call", "is deprecated: use tool_choice"),
        **_refuse("functions", "is deprecated: use tools"),
        **_use(reasoning="reasoning_effort", max_output_tokens="max_completion_tokens", input="messages"),
        **_use(instructions="a system message", text="response_format", include="logprobs"),
        **_use(
            system="a system message",
            stop_sequences="stop",
            output_config="response_format",
            output_format="response_format",
        ),
        **_use(context_management="the messages that the model shall see"),
    },
    "/v1/completions": {
        **_EVERYWHERE,
        **_refuse("truncation", "is a field of /v1/responses: use truncate_prompt_tokens", ("disabled",)),
        **_refuse("suffix", "is not offered: the model does not fill in the middle"),
        **_refuse("messages tools tool_choice parallel_tool_calls reasoning_effort chat_template_kwargs", _CHATS_ALONE),
        **_refuse("continue_final_message add_generation_prompt modalities chat_template documents", _CHATS_ALONE),
        **_refuse("verbosity reasoning functions function_call audio prediction", _CHATS_ALONE),
        **_refuse("mcp_servers", _MESSAGES_ALONE),
        **_use(max_completion_tokens="max_tokens", max_output_tokens="max_tokens", top_logprobs="logprobs"),
        **_use(
            input="prompt",
            input_ids="a prompt of token ids",
            instructions="prompt",
            text="response_format",
            include="logprobs",
        ),
        **_use(
            system="prompt", stop_sequences="stop", output_config="response_format", output_format="response_format"
        ),
        **_use(context_management="the prompt that the model shall see"),
    },
    "/v1/responses": {
        **_EVERYWHERE,
        **_refuse(
            "previous_response_id", "needs stored responses, which this server does not keep: send the whole input"
        ),
        **_refuse("background", "needs stored responses, which this server does not keep"),
        **_refuse("conversation", "needs stored conversations, which this server does not keep: send the whole input"),
        **_refuse("prompt", "needs stored prompts, which this server does not keep: send instructions and input"),
        **_refuse("context_management", "is not offered: send what the model shall see"),
        **_refuse("mcp_servers", _MESSAGES_ALONE),
        **_refuse("previous_input_messages enable_response_messages", "is not offered: send the whole input"),
        **_refuse("n best_of", "is not offered: a response has one answer", _ONE),
        **_refuse("echo suffix add_special_tokens prompt_logprobs input_ids", "is not offered: use /v1/completions"),
        **_refuse("continue_final_message add_generation_prompt return_token_ids modalities", _CHATS_ALONE),
        **_refuse("chat_template documents audio functions function_call web_search_options", _CHATS_ALONE),
        **_use(max_tokens="max_output_tokens", max_completion_tokens="max_output_tokens", messages="input"),
        **_use(response_format="text.format", logprobs="top_logprobs", chat_template_kwargs="reasoning.effort"),
        **_use(reasoning_effort="reasoning.effort", verbosity="text.verbosity", prediction="input"),
        **_use(system="instructions", output_config="text.format", output_format="text.format", stop_sequences="stop"),
    },
    "/v1/messages": {
        **_EVERYWHERE,
        **_refuse("compaction", "is not offered: send what the model shall see"),
        **_refuse("container", "is not offered: the server runs no code", _NO_CONTAINER),
        **_refuse("inference_geo", "is not offered: the answer is made where this server runs", ("", "global")),
        "thread": Refusal(_NO_THREADS, details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]}),
        **_refuse("n best_of", "is not offered: a message has one answer", _ONE),
        **_refuse("logprobs top_logprobs prompt_logprobs return_token_ids stream_options modalities", _CHATS_ALONE),
        **_refuse("continue_final_message add_generation_prompt chat_template_kwargs verbosity", _CHATS_ALONE),
        **_refuse("prediction chat_template documents functions function_call", _CHATS_ALONE),
        **_refuse("echo add_special_tokens input_ids suffix", "is not offered: use /v1/completions"),
        **_refuse("include", "is not offered: use /v1/responses"),
        **_refuse("truncation", "is a field of /v1/responses: use truncate_prompt_tokens", ("disabled",)),
        **_use(max_completion_tokens="max_tokens", max_output_tokens="max_tokens", reasoning="thinking"),
        **_use(response_format="output_config.format", prompt="messages"),
        **_use(text="output_config.format"),
        **_use(reasoning_effort="output_config.effort", stop="stop_sequences", input="messages"),
        **_use(parallel_tool_calls="tool_choice.disable_parallel_tool_use", instructions="system"),
    },
    "/v1/embeddings": {
        **_EVERYWHERE,
        **_refuse("temperature top_p top_k min_p typical_p seed logit_bias frequency_penalty", _GENERATES),
        **_refuse("presence_penalty repetition_penalty stop stop_token_ids ignore_eos min_tokens", _GENERATES),
        **_refuse("include_stop_str_in_output skip_special_tokens bad_words allowed_token_ids", _GENERATES),
        **_refuse("structured_outputs response_format max_tokens max_completion_tokens stream", _GENERATES),
        **_refuse("max_output_tokens stop_sequences stream_options logprobs top_logprobs prompt_logprobs", _GENERATES),
        **_refuse("tools tool_choice parallel_tool_calls reasoning_effort reasoning text", _GENERATES),
        **_refuse("verbosity prediction modalities include instructions system truncation", _GENERATES),
        **_refuse("chat_template_kwargs continue_final_message add_generation_prompt chat_template", _GENERATES),
        **_refuse("output_config output_format context_management echo return_token_ids", _GENERATES),
        **_refuse("mcp_servers", _GENERATES),
        **_refuse("truncate_prompt_tokens truncation_side", "is not offered: send what the model shall see"),
        **_refuse("add_special_tokens", "is not offered: send token ids", (True,)),
        **_refuse("normalize", "is not offered: the model's files say whether it normalizes", (True,)),
        **_refuse("n best_of", "is not offered: an input has one embedding", _ONE),
        **_refuse("padding embed_overrides embed_override_token_id"),
        **_refuse("embed_dtype", "is not offered: embeddings are float32", ("float32",)),
        **_refuse("endianness", "is not offered: base64 is little-endian", ("native", "little")),
        **_refuse("use_activation", "is not offered: the model's files say whether it normalizes", (True,)),
        **_use(messages="input", prompt="input", input_ids="an input of token ids"),
    },
}
"""By route, without the fields that the route honours."""

IGNORED: Final[Mapping[str, str]] = {
    name: why
    for why, names in {
        "names the request or who sent it": "request_id rid session_id custom_labels custom_id stream_interval",
        "names who pays, or what else sees the request": "billing_policy diagnostics fallback_credit_token"
        " user_profile_id workspace_id betas speed",
        "names the models that answer what this one declines": "fallbacks",
        "bounds the calls of tools that are not run here": "max_tool_calls",
        "concerns caches and slots": "cache_control cache_prompt n_cache_reuse id_slot backend_sampling",
        "concerns speculation, which changes no token": "speculative.n_max speculative.n_min speculative.p_min"
        " speculative.type speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits",
    }.items()
    for name in names.split()
}
"""Fields that cannot change an answer, on every route. So are unknown ones."""


def refused_at(route: str, honoured: Iterable[str]) -> dict[str, Refusal]:
    """Return what a route refuses, given the fields that it honours."""
    return {name: refusal for name, refusal in REFUSED[route].items() if name not in set(honoured)}
