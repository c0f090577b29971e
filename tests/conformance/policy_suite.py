"""What every policy keeps: one assistant message per question, its own objects, and only the errors of the Protocol.

Subclass `PolicySuite` and give a fixture `policy` that answers the conversation below.
"""

from __future__ import annotations

from typing import Any

from palestra.agents.types import Policy, PolicyReply
from palestra.envs.spaces import fresh, is_message

CONVERSATION = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 plus 30?"})
TOOLS = ({"type": "function", "function": {"name": "calculator", "description": "", "parameters": {"type": "object"}}},)


class PolicySuite:
    def test_it_answers_with_an_assistant_message(self, policy: Policy) -> None:
        reply = policy.act(CONVERSATION, TOOLS, 10.0)
        assert isinstance(reply, PolicyReply)
        assert is_message(reply.message, ("assistant",))
        assert isinstance(reply.message["content"], str)
        assert reply.finish_reason in {"stop", "length", "tool_calls"}

    def test_it_leaves_the_conversation_alone(self, policy: Policy) -> None:
        conversation: Any = fresh(CONVERSATION)
        policy.act(conversation, TOOLS, 10.0)
        assert conversation == [dict(message) for message in CONVERSATION]

    def test_its_replies_are_objects_of_their_own(self, policy: Policy) -> None:
        first = policy.act(CONVERSATION, TOOLS, 10.0).message
        kept = fresh(first)
        second = policy.act(CONVERSATION, TOOLS, 10.0).message
        second["content"] = "changed"
        assert first == kept

    def test_it_answers_without_tools(self, policy: Policy) -> None:
        assert is_message(policy.act(CONVERSATION, (), 10.0).message, ("assistant",))
