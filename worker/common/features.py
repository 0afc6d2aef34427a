"""The features that a request needs of an engine, by the names of `WorkerMember.unsupported`."""

from __future__ import annotations

from worker.wire import GenerateRequest, SamplingParams


def required_features(request: GenerateRequest) -> list[str]:
    """Name the features beyond sampling with the usual parameters.

    A resumed request needs the state of its sampling so far: that of a grammar, or counts for penalties.
    """
    features = sampling_features(request.sampling)
    if any(choice.output_ids for choice in request.choices):
        features += resume_features(request.sampling)
    return features


def sampling_features(sampling: SamplingParams) -> list[str]:
    """Name the fields that not every engine has."""
    grammar = sampling.grammar
    features = [] if grammar is None else [f"grammar:{grammar.kind}", *(["grammar:compact"] if grammar.compact else [])]
    optional = ("allowed_token_ids", "logprobs", "prompt_logprobs")
    features += [name for name in optional if getattr(sampling, name) is not None]
    if sampling.typical_p != 1.0:
        features.append("typical_p")
    if sampling.bad_words:
        features.append("bad_words")
    return features


def resume_features(sampling: SamplingParams) -> list[str]:
    """Name the states that a resumed request must rebuild from its output so far."""
    features = [] if sampling.grammar is None else ["resume:grammar"]
    if sampling.frequency_penalty or sampling.presence_penalty:
        features.append("resume:penalties")
    return features
