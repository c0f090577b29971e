"""What is measured, a role each: run as a script among the packages of ours or of a peer, so each role imports for itself.

`step-palestra`, `step-gem`, `step-skyrl`: for each line on standard input, measures for a while and prints microseconds of CPU per step.
`serve-openenv PORT`: OpenEnv's server with its template's echo environment. `client-openenv URL`: OpenEnv's client against a host of ours.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

ROUND_S = 0.12
STEPS = 50
"""Steps between two looks at the clock: far more than looking costs."""
NUMBER, MOST = 777_777, 1_000_000
ADD = {"a": 17, "b": 25}


def measure(reset: Callable[[], Any], step: Callable[[int], Any]) -> float:
    """Microseconds of CPU per step: the best of many short runs, since neighbours only ever make it slower."""
    best, until = float("inf"), time.perf_counter() + ROUND_S
    while time.perf_counter() < until:
        reset()
        began = time.thread_time_ns()
        for number in range(STEPS):
            step(number)
        best = min(best, (time.thread_time_ns() - began) / STEPS / 1000)
    return best


def answer(
    plain: tuple[Callable[[], Any], Callable[[int], Any]], tool: tuple[Callable[[], Any], Callable[[int], Any]]
) -> None:
    """Measures whenever a line comes."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"plain": measure(*plain), "tool": measure(*tool)}), flush=True)


def step_palestra() -> None:
    """A guessing game, and an environment with a tool that is run inline."""
    from palestra.envs.core import MessageEnv, Response
    from palestra.envs.toolenv import ToolEnv
    from palestra.envs.tools import tool
    from palestra.envs.types import Message, StopReason, Task

    boxed = re.compile(r"\\boxed{(\d{1,9})}")

    class Guess(MessageEnv):
        """Guess the number."""

        tasks = (Task(f"Guess the number between 1 and {MOST}.", NUMBER, "guess"),)

        def setup(self, task: Task) -> None:
            self.seen: set[int] = set()

        def respond(self, action: Message) -> Response:
            found = boxed.findall(str(action.get("content"))[:4000])
            if not found:
                return Response([{"role": "user", "content": "No guess."}], StopReason.ENV_DONE)
            guess, turn = int(found[-1]), self.turn
            if guess in self.seen:
                return Response([{"role": "user", "content": f"At turn {turn}, {guess} was guessed before."}])
            self.seen.add(guess)
            if guess == NUMBER:
                return Response([{"role": "user", "content": "Right."}], StopReason.ANSWER, 1.0)
            hint = "lower" if guess > NUMBER else "higher"
            return Response([{"role": "user", "content": f"At turn {turn}, you guessed {guess}: it is {hint}."}])

    class Adder(ToolEnv):
        """Adds with a tool."""

        tasks = (Task("What is 17 plus 25?", 42, "add"),)

        @tool
        def add(self, a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

    guess, adder = Guess(), Adder()
    function = {"name": "add", "arguments": json.dumps(ADD)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    content = (
        "The middle of what is left seems best to me, so I try it. \\boxed{%d}"  # as long as a reply of a small model
    )
    answer(
        (guess.reset, lambda number: guess.step({"role": "assistant", "content": content % (number + 1)})),
        (adder.reset, lambda number: adder.step(call)),
    )


def step_gem() -> None:
    """gem's guessing game, and the same behind its wrapper for tools."""
    from gem.envs.game_env.guess_the_number import GuessTheNumberEnv
    from gem.tools.base_tool import BaseTool
    from gem.tools.tool_env_wrapper import ToolEnvWrapper

    block = re.compile(r"<add>(.*?)</add>", re.DOTALL)

    class Add(BaseTool):  # type: ignore[misc]
        """A tool as gem's own are written: the call is found in the text."""

        tool_type = "add"

        def instruction_string(self) -> str:
            return "Write <add>{...}</add> to add."

        def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
            found = block.search(action)
            if found is None:
                return False, True, "", ""
            given = json.loads(found[1])
            return True, False, f"<result>{int(given['a']) + int(given['b'])}</result>", action[: found.end()]

    guess = GuessTheNumberEnv(1, MOST, 1 << 30)
    wrapped = ToolEnvWrapper(GuessTheNumberEnv(1, MOST, 1 << 30), [Add()], max_tool_uses=None)
    content = "The middle of what is left seems best to me, so I try it. \\boxed{%d}"
    call = f"<add>{json.dumps(ADD)}</add>"
    answer(
        (guess.reset, lambda number: guess.step(content % (number + 1))),
        (wrapped.reset, lambda number: wrapped.step(call)),
    )


def step_skyrl() -> None:
    """skyrl-gym's GSM8K of several turns, and an environment with one of its tool groups."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
    from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv
    from skyrl_gym.tools.core import ToolGroup, tool

    block = re.compile(r"<add>(.*?)</add>", re.DOTALL)

    class Sums(ToolGroup):  # type: ignore[misc]
        """Adds."""

        def __init__(self) -> None:
            super().__init__("sums")

        @tool
        def add(self, a: int, b: int) -> str:
            """Adds two numbers."""
            return str(a + b)

    class Adder(BaseTextEnv):  # type: ignore[misc]
        """As its search environment: the call is found in the text."""

        def __init__(self) -> None:
            super().__init__()
            self.max_turns = 1 << 30
            self.init_tool_groups([Sums()])

        def step(self, action: str) -> Any:
            self.turns += 1
            found = block.search(action)
            given = json.loads(found[1]) if found else {}
            text = self._execute_tool("sums", "add", [int(given["a"]), int(given["b"])])
            seen = [{"role": "user", "content": f"<result>{text}</result>"}]
            return BaseTextEnvStepOutput(observations=seen, reward=0.0, done=False, metadata={})

    extras = {"reward_spec": {"ground_truth": "42"}, "max_turns": 1 << 30}
    math, adder = GSM8kMultiTurnEnv(extras=extras), Adder()
    prompt = [{"role": "user", "content": "What is 17 plus 25?"}]
    content = "The middle of what is left seems best to me, so I try it. #### %d"
    call = f"<add>{json.dumps(ADD)}</add>"
    answer(
        (lambda: math.init(prompt), lambda number: math.step(content % (number + 100))),
        (lambda: adder.init(prompt), lambda number: adder.step(call)),
    )


def serve_openenv(port: str) -> None:
    """An echo environment as OpenEnv's template has it, behind its own server."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):  # type: ignore[misc]
        """What is echoed."""

        message: str

    class Heard(Observation):  # type: ignore[misc]
        """The echo."""

        echoed_message: str = ""
        message_length: int = 0

    class Echo(Environment):  # type: ignore[misc]
        """Says what it hears."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State(episode_id="", step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Any:
            self._state = State(episode_id=episode_id or "", step_count=0)
            return Heard(echoed_message="ready", done=False, reward=0.0)

        def step(self, action: Any, **more: Any) -> Any:
            self._state.step_count += 1
            said = action.message
            about = {"original_message": said, "step": self._state.step_count}
            return Heard(echoed_message=said, message_length=len(said), done=False, reward=0.0, metadata=about)

        @property
        def state(self) -> Any:
            return self._state

    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=1000)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


def client_openenv(url: str) -> None:
    """Two episodes with OpenEnv's own client against our calculator."""
    from openenv.core.generic_client import GenericEnvClient

    with GenericEnvClient(base_url=url).sync() as env:
        for seed in (3, 3):
            first = env.reset(seed=seed)
            assert (first.reward, first.done) == (None, False), first
            call = {"name": "calculator", "arguments": json.dumps({"expression": "1+1"})}
            calls = [{"id": "c", "type": "function", "function": call}]
            step = env.step({"message": {"role": "assistant", "content": "", "tool_calls": calls}})
            assert (step.observation["text"], step.reward, step.done) == ("2", 0.0, False), step
            last = env.step({"message": "The answer is 2"})
            assert (last.reward, last.done) == (0.2, True), last
            assert last.metadata["reward"]["components"]["valid_call"] == 1.0, last
            assert env.state()["step_count"] == 2
        for wrong in ({"message": "more"}, {"text": "x"}):
            try:
                env.step(wrong)
            except RuntimeError:  # "Server error: ...", as its client says it
                continue
            raise AssertionError(f"{wrong} was taken")
    print(json.dumps({"openenv_client": "ok"}))


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    ROLES: dict[str, Callable[..., None]] = {
        "step-palestra": step_palestra,
        "step-gem": step_gem,
        "step-skyrl": step_skyrl,
        "serve-openenv": serve_openenv,
        "client-openenv": client_openenv,
    }
    ROLES[role](*words)
