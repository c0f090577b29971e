"""A LangGraph agent as one writes it anyway: a ReAct loop with two tools, compiled once, when this module is imported.

What makes it Palestra's: the client asks for its key at every call (`session_key`), so that one graph serves all sessions. The base URL
comes from OPENAI_BASE_URL, which the worker sets. `run` waits for whole replies, `run_streaming` reads them token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from palestra.agents.session import session_key
from palestra.envs.arithmetic import evaluate

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0}


@tool
def calculator(expression: str) -> int:
    """Computes + - * and parentheses."""
    return evaluate(expression)


@tool
def convert(value: float, source: str, target: str) -> float:
    """Converts a length between mm, cm, m and km."""
    try:
        return round(value * METRES[source] / METRES[target], 6)
    except KeyError as error:
        raise ValueError(f"no unit {error}; units: {', '.join(METRES)}") from None


TOOLS: tuple[BaseTool, ...] = (calculator, convert)


def build(streaming: bool, tools: Sequence[BaseTool] = TOOLS) -> Any:
    """The compiled graph: the model is asked until it calls no tool any more."""
    # With retries of its own a client would play a lost call again, as another turn.
    model = ChatOpenAI(model="policy", api_key=session_key, streaming=streaming, max_retries=0)
    model_with_tools = model.bind_tools(tools)

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model_with_tools.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile()


GRAPH, STREAMING_GRAPH = build(streaming=False), build(streaming=True)
# The session's own budget of turns ends an episode; LangGraph's bound would end it as a fault.
CONFIG = {"recursion_limit": 1000}


def run(messages: list[dict[str, Any]]) -> str:
    """Plays one episode from the environment's first messages; the last reply is the answer."""
    return str(GRAPH.invoke({"messages": messages}, CONFIG)["messages"][-1].text)


def run_streaming(messages: list[dict[str, Any]]) -> str:
    """The same, over streamed replies."""
    answer = ""
    for state in STREAMING_GRAPH.stream({"messages": messages}, CONFIG, stream_mode="values"):
        answer = str(state["messages"][-1].text)
    return answer
