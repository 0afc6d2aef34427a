"""The check of `headstart doctor --engine-url` that compares an engine's prompts with the gateway's."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server.errors import InvalidRequestError
from server.schema.fields import Message
from server.schema.intent import Conversation
from server.text.chat_template import ChatTemplate
from server.text.template_sandbox import TemplateError
from server.text.tokenizer import Tokenizer, TokenizerError
from worker.common.checks import Check, judge
from worker.wire import TokenizerBundle, unpack


async def check_template(line: dict[str, Any]) -> Check:
    """Compare the engine's ids of a conversation with the ids that a gateway would send."""
    engine_ids = line["ids"]
    if engine_ids is None:
        return Check("template", "ok", "not compared: the engine renders no conversation")
    fix = (
        "gateways render with the template of the tokenizer's files: put the engine's there, or name a folder that "
        "has it with --tokenizer"
    )
    bundle = unpack(base64.b64decode(line["bundle"]), TokenizerBundle)
    if bundle.chat_template is None:
        return Check("template", "fail", "the tokenizer's files have no chat template, and the engine has one", fix)
    messages = [Message(**message) for message in line["messages"]]
    with ThreadPoolExecutor(1) as executor:
        try:
            rendering = ChatTemplate(bundle.chat_template, bos_token=bundle.bos_token, eos_token=bundle.eos_token)
            prompt = rendering.render(Conversation(messages=messages))
            ids = await Tokenizer(bundle, executor).encode(prompt.text)
        except (TemplateError, TokenizerError, InvalidRequestError) as error:
            return Check("template", "fail", str(error), fix)
    found = f"the engine and the gateway give the same {len(ids)} ids of a conversation"
    if ids != engine_ids:
        found = f"of a conversation the engine makes {len(engine_ids)} ids, and the gateway {len(ids)} others"
    return judge("template", found, (ids != engine_ids, "fail", fix))
