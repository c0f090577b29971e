"""From an open session to a trainer's rows, against a running `palestra serve`: python examples/serve_client.py URL TOKEN_FILE

In: the control URL that `palestra serve` prints, and the file with its admin token. Out: a line per row that a trainer would get. It waits
for the model's replies, and at most a minute for the group.
"""

import sys
import uuid
from pathlib import Path

from openai import OpenAI

from palestra.server.client import ServiceClient

TASK = "What is 12 plus 30?"


def main(url: str, token_file: str) -> None:
    """Two rollouts of one task, played, scored, closed, and claimed as a group."""
    service = ServiceClient(url, Path(token_file).read_text().strip())
    group_id = f"example-{uuid.uuid4().hex[:8]}"
    for _ in range(2):
        session = service.open(group_id=group_id, group_size=2, task=TASK, max_turns=4)
        agent = OpenAI(base_url=session.base_url, api_key=session.api_key)
        messages = [{"role": "user", "content": TASK}]
        for _ in range(2):
            reply = agent.chat.completions.create(model="policy", messages=messages, max_tokens=16)
            answer = reply.choices[0].message
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "Are you sure?"}]
        service.reward(session, 1.0 if "42" in (answer.content or "") else 0.0)
        print(f"{session.rollout_id}: reward {service.close_with(session)}")
    groups = service.claim(1, owner="example", ttl_s=60, deadline_s=60)
    for row in (row for group in groups for row in group.samples):
        print(f"{row.group_id} {row.rollout_id}: {len(row.token_ids)} tokens, {int(row.loss_mask.sum())} to train on")
    # A trainer would train here, keep a checkpoint, and then say so: the groups are done with.
    service.commit(1, "no-checkpoint", [group.group_id for group in groups], owner="example")
    service.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
